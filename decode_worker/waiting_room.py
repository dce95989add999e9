"""Reservations that wait for blocks: the back-pressure of the whole system."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.lazy_heap import LazyHeap
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


@dataclass(eq=False, slots=True)
class WaitingReservation:
    """One request for blocks. Compared by identity. `answer` is called once, on the engine thread."""

    request: EngineRequest
    coordinator_id: str
    writer_agent_id: str
    arrived_s: float
    answer: Answer
    bypassed: int = 0
    local_prefill_tokens: int = 0
    """The prompt is computed here when at most so many of its tokens are not cached."""
    arrival: int = 0
    """Counts up with each entry of a room."""

    @property
    def queue_key(self) -> tuple[int, int]:
        """Order of service: higher priority first, then earlier arrival."""
        return -self.request.priority, self.arrival


class WaitingRoom:
    """First come, first served by priority; one that does not fit may be overtaken `max_bypasses` times.

    What a step asks of it costs the same however many wait.
    """

    def __init__(self, *, max_waiting: int, max_bypasses: int) -> None:
        self._max_waiting = max_waiting
        self._max_bypasses = max_bypasses
        self._order: LazyHeap[tuple[int, int], WaitingReservation] = LazyHeap()
        self._deadlines: LazyHeap[float, WaitingReservation] = LazyHeap()
        self._by_id: dict[str, list[WaitingReservation]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._order)

    def add(self, entry: WaitingReservation) -> None:
        """Queues an entry. Raises ResourceExhaustedError (QUEUE_FULL) when too many wait."""
        if len(self._order) >= self._max_waiting:
            raise ResourceExhaustedError(
                f"{self._max_waiting} reservations are waiting already",
                reason="QUEUE_FULL",
                retry_after_s=1.0,
            )
        self._arrivals += 1
        entry.arrival = self._arrivals
        self._order.push(entry.queue_key, entry)
        self._deadlines.push(entry.request.deadline_s, entry)
        self._by_id.setdefault(entry.request.request_id, []).append(entry)

    def remove(self, request_id: str) -> bool:
        """Forgets an entry without an answer; whether it was there."""
        entries = list(self._by_id.get(request_id, ()))
        for entry in entries:
            self._forget(entry)
        return bool(entries)

    def remove_coordinator(self, coordinator_id: str) -> None:
        """Forgets everything one coordinator asked for. Costs O(waiting)."""
        for entry in [entry for entries in self._by_id.values() for entry in entries]:
            if entry.coordinator_id == coordinator_id:
                self._forget(entry)

    def expire(self, now: float) -> None:
        """Answers the entries whose deadline has passed."""
        while (first := self._deadlines.peek()) is not None and first[0] <= now:
            self._forget(first[1])
            message = "the deadline passed while waiting for KV blocks on the decode worker"
            first[1].answer(DeadlineExceededError(message))

    def grant(self, try_reserve: Callable[[WaitingReservation], bool]) -> None:
        """Offers room to the first entries in turn; `try_reserve` says whether one was served."""
        skipped: list[WaitingReservation] = []
        for entry in self._first(MAX_LOOKS):
            if try_reserve(entry):
                self._forget(entry)
                for other in skipped:
                    other.bypassed += 1
            elif entry.bypassed >= self._max_bypasses:
                return
            else:
                skipped.append(entry)

    def _first(self, count: int) -> list[WaitingReservation]:
        first: list[WaitingReservation] = []
        while len(first) < count and (entry := self._order.pop()) is not None:
            first.append(entry)
        for entry in first:
            self._order.push(entry.queue_key, entry)
        return first

    def _forget(self, entry: WaitingReservation) -> None:
        self._order.discard(entry)
        self._deadlines.discard(entry)
        entries = self._by_id[entry.request.request_id]
        entries.remove(entry)
        if not entries:
            del self._by_id[entry.request.request_id]
