"""Unix sockets between a worker and the processes of its vLLM. They carry protobuf messages of bounded size."""

from __future__ import annotations

import multiprocessing
import os
import socket
from contextlib import suppress
from multiprocessing.connection import Client, Connection
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from splitserve.errors import BrokenInvariantError
from splitserve.runtime.child_launch import end_with_parent
from splitserve.v1 import vllm_pb2 as pb

MAX_MESSAGE_BYTES = 2**26
"""Enough for a write of sixteen million blocks."""

M = TypeVar("M", bound=Message)


class VllmEndedError(BrokenInvariantError):
    """The process at the other end has ended. A worker and the processes of its vLLM need each other to go on."""


def end_with_starter() -> None:
    """Lets Linux kill this process of vLLM when the worker, or the process of vLLM, that has started it dies."""
    parent = multiprocessing.parent_process()  # vLLM starts its processes by multiprocessing
    assert parent is not None
    assert parent.pid is not None
    end_with_parent(parent.pid)


class VllmLink:
    """One end of a connection. `peer` names the process at the other end in errors."""

    def __init__(self, connection: Connection, peer: str) -> None:
        self._connection, self._peer = connection, peer

    @classmethod
    def to_worker(cls, path: str, hello: pb.VllmHello) -> VllmLink:
        """Connects a process of vLLM to the worker that listens at the Unix socket `path`, and sends `hello`."""
        link = cls(Client(path, "AF_UNIX"), "the worker")
        link.send(hello)
        return link

    def send(self, message: Message) -> None:
        """Sends a message. Raises VllmEndedError."""
        try:
            self._connection.send_bytes(message.SerializeToString())
        except OSError as error:
            raise VllmEndedError(f"{self._peer} has ended") from error

    def receive(self, kind: type[M], timeout_s: float | None = None) -> M | None:
        """Waits for a message, at most `timeout_s` seconds; returns None if there is none by then.

        Raises VllmEndedError, also for bytes that are no message of this kind.
        """
        try:
            if not self._connection.poll(timeout_s):
                return None
            return kind.FromString(self._connection.recv_bytes(MAX_MESSAGE_BYTES))
        except (EOFError, OSError, DecodeError) as error:
            raise VllmEndedError(f"{self._peer} has ended") from error

    def close(self) -> None:
        """Ends the connection; a thread that reads from it gets VllmEndedError. Idempotent."""
        # Not closed: a thread may be about to read from its descriptor, which the next file that is opened would get.
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
