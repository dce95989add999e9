"""Writes of several ranks that make up one write of their worker. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kv_transfer.transports.transport import WriteResult


@dataclass(slots=True)
class JoinedWrite:
    """One write, of which each pair of a writing and a receiving rank does a part."""

    handle: int
    agent_id: str
    notification: bytes | None
    """What the peer is told when all parts have ended well."""
    parts: set[tuple[int, int]]
    """The (rank, its handle) of parts that have not ended."""
    error: str | None = None
    in_doubt: bool = False

    @property
    def result(self) -> WriteResult:
        """How it ended, once no part is left."""
        return WriteResult(self.handle, self.error, self.in_doubt)


class JoinedWrites:
    """The joined writes of one worker that have not ended. Their handles are negative: no transport's own are."""

    def __init__(self) -> None:
        self._write_of_part: dict[tuple[int, int], JoinedWrite] = {}
        self._last_handle = 0

    def begin(
        self, agent_id: str, parts: Iterable[tuple[int, int]], notification: bytes | None, error: str | None
    ) -> int:
        """Joins posted parts, at least one, each a (rank, its handle); returns the handle of the whole.

        `error`: why a further part was not posted; the write then fails when those that were posted have ended.
        """
        self._last_handle -= 1
        write = JoinedWrite(self._last_handle, agent_id, notification, set(parts), error)
        self._write_of_part.update(dict.fromkeys(write.parts, write))
        return write.handle

    def end(self, rank: int, part: WriteResult) -> JoinedWrite | None:
        """A part has ended: the whole write if it was the last one. None also for what is no part, or ended before.

        A write fails with the error of the first part that failed, and is in doubt if any part of it is.
        """
        key = rank, part.handle
        write = self._write_of_part.pop(key, None)
        if write is None:
            return None
        write.parts.discard(key)
        write.error = write.error or part.error
        write.in_doubt = write.in_doubt or part.in_doubt
        return None if write.parts else write

    def holds(self, rank: int, handle: int) -> bool:
        """Whether a rank's write is a part that has not ended."""
        return (rank, handle) in self._write_of_part
