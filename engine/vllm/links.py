"""Connections between a worker's engine thread and the processes of its vLLM: protobuf messages of bounded size."""

from __future__ import annotations

import socket
from multiprocessing.connection import Connection
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from splitserve.errors import BrokenInvariantError
from splitserve.v1 import vllm_pb2 as pb

MAX_MESSAGE_BYTES = 2**26
"""A write of sixteen million blocks."""

M = TypeVar("M", bound=Message)


class VllmEndedError(BrokenInvariantError):
    """The other end is gone. A worker cannot go on without all processes of its vLLM, nor can these without it."""


class VllmLink:
    """One end of a connection; `who` names the other end in errors."""

    def __init__(self, connection: Connection, who: str) -> None:
        self._connection = connection
        self._who = who

    @classmethod
    def to_worker(cls, path: str, hello: pb.VllmHello) -> VllmLink:
        """A connection of a process of vLLM's to the worker that listens at `path`."""
        end = socket.socket(socket.AF_UNIX)
        end.connect(path)
        link = cls(Connection(end.detach()), "the worker")
        link.send(hello)
        return link

    def send(self, message: Message) -> None:
        """Sends a message. Raises VllmEndedError."""
        try:
            self._connection.send_bytes(message.SerializeToString())
        except OSError as error:
            raise VllmEndedError(f"{self._who} has ended") from error

    def receive(self, kind: type[M]) -> M:
        """Waits for a message. Raises VllmEndedError, also for what is no such message."""
        try:
            return kind.FromString(self._connection.recv_bytes(MAX_MESSAGE_BYTES))
        except (EOFError, OSError, DecodeError) as error:
            raise VllmEndedError(f"{self._who} has ended") from error

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Whether a message, or the end, can be received without waiting; waits for one at most `timeout_s`."""
        try:
            return self._connection.poll(timeout_s)
        except OSError as error:
            raise VllmEndedError(f"{self._who} has ended") from error

    def close(self) -> None:
        """Closes the connection. Idempotent."""
        self._connection.close()
