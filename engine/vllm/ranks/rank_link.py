"""Connections between a worker's engine thread and its ranks: whole protobuf messages of bounded size."""

from __future__ import annotations

import socket
from multiprocessing.connection import Connection
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from splitserve.errors import BrokenInvariantError
from splitserve.v1 import ranks_pb2 as pb

MAX_MESSAGE_BYTES = 2**26
"""A write of sixteen million blocks."""

M = TypeVar("M", bound=Message)


class RankEndedError(BrokenInvariantError):
    """The other end is gone. A worker without all of its ranks cannot go on, nor can a rank without its worker."""


class RankLink:
    """One end of a connection; `who` names the other end in errors."""

    def __init__(self, connection: Connection, who: str) -> None:
        self._connection = connection
        self._who = who

    @classmethod
    def to_worker(cls, path: str, rank: int, channel: pb.RankChannel.ValueType) -> RankLink:
        """A rank's connection to the worker that listens at `path`."""
        end = socket.socket(socket.AF_UNIX)
        end.connect(path)
        link = cls(Connection(end.detach()), "the worker")
        link.send(pb.RankHello(rank=rank, channel=channel))
        return link

    def send(self, message: Message) -> None:
        """Sends a message. Raises RankEndedError."""
        self.send_bytes(message.SerializeToString())

    def send_bytes(self, data: bytes | memoryview) -> None:
        """Sends bytes as one message. Raises RankEndedError."""
        try:
            self._connection.send_bytes(data)
        except OSError as error:
            raise RankEndedError(f"{self._who} has ended") from error

    def receive(self, kind: type[M]) -> M:
        """Waits for a message. Raises RankEndedError, also for what is no such message."""
        try:
            return kind.FromString(self._connection.recv_bytes(MAX_MESSAGE_BYTES))
        except (EOFError, OSError, DecodeError) as error:
            raise RankEndedError(f"{self._who} has ended") from error

    def receive_bytes(self, count: int) -> bytes:
        """Waits for a message of exactly `count` bytes. Raises RankEndedError."""
        try:
            data = self._connection.recv_bytes(count)
        except (EOFError, OSError) as error:
            raise RankEndedError(f"{self._who} has ended") from error
        if len(data) != count:
            raise RankEndedError(f"{self._who} sent {len(data)} bytes of {count}")
        return data

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Whether a message, or the end, can be received without waiting; waits for one at most `timeout_s`."""
        try:
            return self._connection.poll(timeout_s)
        except OSError as error:
            raise RankEndedError(f"{self._who} has ended") from error

    def close(self) -> None:
        """Closes the connection. Idempotent."""
        self._connection.close()
