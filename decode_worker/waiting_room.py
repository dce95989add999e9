"""Reservations that wait for blocks: the back-pressure of the whole system."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.types import EngineRequest
from kv_transfer.ticket import KvTicket
from splitserve.errors import DeadlineExceededError, ResourceExhaustedError, SplitserveError

MAX_LOOKS = 8
"""Waiting reservations tried a round, so that a round costs the same however many wait."""


@dataclass(frozen=True, slots=True)
class Granted:
    """A reservation's ticket, None for a prompt that is computed here, and how long it waited, in seconds."""

    ticket: KvTicket | None
    wait_s: float


Answer = Callable[[Granted | SplitserveError], None]


@dataclass(slots=True)
class WaitingReservation:
    """One request for blocks. `answer` is called once, on the engine thread."""

    request: EngineRequest
    coordinator_id: str
    writer_agent_id: str
    arrived_s: float
    answer: Answer
    bypassed: int = 0
    local_prefill_tokens: int = 0
    """The prompt is computed here when at most so many of its tokens are not cached."""


class WaitingRoom:
    """First come, first served by priority; one that does not fit may be overtaken `max_bypasses` times."""

    def __init__(self, *, max_waiting: int, max_bypasses: int) -> None:
        self._max_waiting = max_waiting
        self._max_bypasses = max_bypasses
        self._waiting: list[WaitingReservation] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, entry: WaitingReservation) -> None:
        """Queues an entry. Raises ResourceExhaustedError (QUEUE_FULL) when too many wait."""
        if len(self._waiting) >= self._max_waiting:
            raise ResourceExhaustedError(
                f"{self._max_waiting} reservations are waiting already",
                reason="QUEUE_FULL",
                retry_after_s=1.0,
            )
        place = len(self._waiting)
        while place and self._waiting[place - 1].request.priority < entry.request.priority:
            place -= 1
        self._waiting.insert(place, entry)

    def remove(self, request_id: str) -> bool:
        """Forgets an entry without an answer; whether it was there."""
        before = len(self._waiting)
        self._waiting = [entry for entry in self._waiting if entry.request.request_id != request_id]
        return len(self._waiting) < before

    def remove_coordinator(self, coordinator_id: str) -> None:
        """Forgets everything one coordinator asked for."""
        self._waiting = [entry for entry in self._waiting if entry.coordinator_id != coordinator_id]

    def expire(self, now: float) -> None:
        """Answers the entries whose deadline has passed."""
        late = [entry for entry in self._waiting if entry.request.deadline_s <= now]
        if not late:
            return
        self._waiting = [entry for entry in self._waiting if entry.request.deadline_s > now]
        for entry in late:
            message = "the deadline passed while waiting for KV blocks on the decode worker"
            entry.answer(DeadlineExceededError(message))

    def grant(self, try_reserve: Callable[[WaitingReservation], bool]) -> None:
        """Offers room to the first entries in turn; `try_reserve` says whether one was served."""
        skipped: list[WaitingReservation] = []
        for entry in self._waiting[:MAX_LOOKS]:
            if try_reserve(entry):
                self._waiting.remove(entry)
                for other in skipped:
                    other.bypassed += 1
            elif entry.bypassed >= self._max_bypasses:
                return
            else:
                skipped.append(entry)
