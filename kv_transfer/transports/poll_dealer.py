"""One poll of a worker's transport for all who wait for something of it."""

from __future__ import annotations

from collections.abc import Callable

from kv_transfer.transports.transport import PollResult, WriteResult


class PollDealer:
    """Keeps what polls have brought until whoever it is for takes it: writes for who sends, notifications for who
    receives.

    A poll takes both off the transport, so a worker that does both has one dealer. `poll` is the transport's, or a
    lane prober's, which polls more often. Runs on the transport's thread.
    """

    def __init__(self, poll: Callable[[], PollResult]) -> None:
        self._poll = poll
        self._kept = PollResult()

    def poll(self) -> None:
        """Polls once."""
        found = self._poll()
        self._kept.writes += found.writes
        self._kept.notifications += found.notifications

    def take_writes(self) -> list[WriteResult]:
        """The writes that have ended since the last call, in order."""
        writes, self._kept.writes = self._kept.writes, []
        return writes

    def take_notifications(self) -> list[tuple[str, bytes]]:
        """The notifications that have arrived since the last call, in order; see `PollResult`."""
        notifications, self._kept.notifications = self._kept.notifications, []
        return notifications
