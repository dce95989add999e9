"""Polls of a transport: how often an idle worker makes them, and which side of a worker gets their results."""

from __future__ import annotations

from collections.abc import Callable

from kv_transfer.transports.regions import VRAM
from kv_transfer.transports.transport import PollResult, WriteResult

_IDLE_POLL_S = 1.0
"""Bounds how long unsolicited notifications stay unread."""
_DRIVEN_POLL_S = 0.01
"""The same where only polls make progress: it bounds the answer to a peer's first messages."""


def idle_poll_s(kind: str, memory_kind: str) -> float:
    """Longest time in seconds between two polls of an idle worker, so that peers get an answer.

    Short where nothing but polls makes progress: with `ucx`, and for the memory of a device (`memory_kind` "VRAM").
    """
    return _DRIVEN_POLL_S if kind == "ucx" or memory_kind == VRAM else _IDLE_POLL_S


class PollDealer:
    """Keeps the results of polls: ended writes for the sending side, notifications for the receiving side.

    A poll takes both from the transport, so a worker with both sides has one dealer. `poll` is the transport's, or a
    lane prober's, which polls more often. Runs on the transport's thread.
    """

    def __init__(self, poll: Callable[[], PollResult]) -> None:
        self._poll = poll
        self._kept = PollResult()

    def poll(self) -> None:
        """Polls once. Also called during a step if the transport has no progress thread."""
        polled = self._poll()
        self._kept.writes += polled.writes
        self._kept.notifications += polled.notifications

    def take_writes(self) -> list[WriteResult]:
        """The writes that have ended since the last call, in order."""
        writes, self._kept.writes = self._kept.writes, []
        return writes

    def take_notifications(self) -> list[tuple[str, bytes]]:
        """The notifications that have arrived since the last call, in order; see `PollResult`."""
        notifications, self._kept.notifications = self._kept.notifications, []
        return notifications
