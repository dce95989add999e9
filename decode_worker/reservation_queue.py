"""Reservations that wait for blocks: the back-pressure of the whole system.

A request reserves its decode blocks before its prompt is computed, so a full decode worker stops prefill here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from engine.core.engine import Engine, Then
from engine.core.precedence import Precedence, PrecedenceQueue
from engine.core.types import EngineRequest
from kv_transfer.handoff.ticket import KvTicket
from splitserve.errors import DeadlineExceededError, ResourceExhaustedError, SplitserveError
from splitserve.queues import LazyHeap, Offer, offer_in_order

MAX_LOOKS = 8
"""Maximum number of waiting reservations tried at a time, which bounds the cost however many wait."""


@dataclass(frozen=True, slots=True)
class Granted:
    """A granted reservation: its ticket (None if the prompt is computed here), and the seconds that it waited."""

    ticket: KvTicket | None
    wait_s: float


Reply = Callable[[Granted | SplitserveError], None]
"""Receives the outcome of a reservation, on the engine thread."""


@dataclass(eq=False, slots=True)
class WaitingReservation:
    """A reservation that waits. Compared by identity. `reply` is called at most once, on the engine thread."""

    request: EngineRequest
    coordinator_id: str
    writer_agent_id: str
    arrived_s: float
    reply: Reply
    bypassed: int = 0
    local_prefill_tokens: int = 0
    """The prompt is computed here if at most this many of its tokens are not cached."""
    lane_bytes_per_s: float = 0.0
    """How fast the writer's KV would come; 0: unknown, nothing is read back in its place."""
    arrival: int = 0
    """Its number in the order of arrival, set by the queue."""
    place: int = 0
    """See `engine.core.precedence`; set by the queue."""

    @property
    def precedence(self) -> Precedence:
        """Where it stands among other requests."""
        return self.request.precedence

    def computes_here(self, cached_tokens: int) -> bool:
        """Whether the prompt is computed here if so many of its tokens are cached."""
        lacking = len(self.request.token_ids) - cached_tokens
        return bool(self.local_prefill_tokens) and lacking <= self.local_prefill_tokens

    def reads_back(self, core: Engine, then: Then, again: Then | None) -> bool:
        """Begins to read what lower tiers have of a prefix that a peer would have to transfer otherwise, or asks a
        store that workers share; whether it has.

        Then `then` or `again` is called on the engine thread; see `Engine.read_back`. Blocks are reserved only after
        that, and the ticket says of the prefix what is in the pool by then: nothing decodes behind blocks that may not
        come. A prompt that is computed here has its blocks read as any prompt, and a prefix that is fetched does not
        wait.
        """
        if not self.lane_bytes_per_s or self.request.prefix_only:
            return False
        if self.local_prefill_tokens and self.computes_here(core.cached_tokens(self.request)):
            return False
        return core.read_back(self.request, self.lane_bytes_per_s, then, again)

    def require_may_wait(self) -> None:
        """Raises ResourceExhaustedError (NO_ROOM_FOR_PREFIX) for a prefix, which is fetched at once or computed."""
        if self.request.prefix_only:
            message = "requests need this worker's blocks now, and a prefix does not wait for them"
            raise ResourceExhaustedError(message, reason="NO_ROOM_FOR_PREFIX", retry_after_s=1.0)


class ReservationQueue:
    """In order of precedence; one that does not fit may be bypassed `max_bypasses` times.

    The cost per step does not depend on how many wait. Those whose prefix is being read are set aside: they do not
    count as waiting for blocks, and are offered none.
    """

    def __init__(self, *, max_waiting: int, max_bypasses: int) -> None:
        self._max_waiting = max_waiting
        self._max_bypasses = max_bypasses
        self._order: PrecedenceQueue[WaitingReservation] = PrecedenceQueue()
        self._deadlines: LazyHeap[float, WaitingReservation] = LazyHeap()
        self._by_id: dict[str, list[WaitingReservation]] = {}
        self._arrivals = 0
        self._tried_at: tuple[int, ...] | None = None
        """The state in which they were last tried; None if others have come since."""

    def __len__(self) -> int:
        return len(self._order)

    def add(self, entry: WaitingReservation) -> None:
        """Queues an entry. Raises ResourceExhaustedError: QUEUE_FULL if too many wait, NO_ROOM_FOR_PREFIX for a prefix
        if any does."""
        if len(self._order):
            entry.require_may_wait()
        if len(self._deadlines) >= self._max_waiting:
            raise ResourceExhaustedError(
                f"{self._max_waiting} reservations are waiting already",
                reason="QUEUE_FULL",
                retry_after_s=1.0,
            )
        self._arrivals += 1
        entry.arrival = entry.place = self._arrivals
        self._order.push(entry)
        self._deadlines.push(entry.request.deadline_s, entry)
        self._by_id.setdefault(entry.request.request_id, []).append(entry)
        self._tried_at = None

    def read_first(self, core: Engine, entry: WaitingReservation) -> None:
        """Sets an entry aside while lower tiers are asked for its prefix, and read. It keeps its place."""
        if entry.reads_back(core, partial(self._put_back, entry), partial(self._read_on, core, entry)):
            self._order.discard(entry)

    def _read_on(self, core: Engine, entry: WaitingReservation) -> None:
        """The shared store has answered. Nothing is read for one that has left, or where others wait for blocks now."""
        if entry not in self._deadlines:
            return
        if len(self._order) or not entry.reads_back(core, partial(self._put_back, entry), None):
            self._put_back(entry)

    def _put_back(self, entry: WaitingReservation) -> None:
        """Ends its time aside. Ignored for an entry that has left meanwhile."""
        if entry in self._deadlines:
            self._order.push(entry)
            self._tried_at = None

    def remove(self, request_id: str) -> bool:
        """Removes the entries of a request without a reply; returns whether there were any."""
        entries = list(self._by_id.get(request_id, ()))
        for entry in entries:
            self._forget(entry)
        return bool(entries)

    def ids_of(self, coordinator_id: str) -> list[str]:
        """Ids of the requests of one coordinator. Costs O(waiting)."""
        return [name for name, entries in self._by_id.items() if entries[0].coordinator_id == coordinator_id]

    def expire(self, now: float) -> None:
        """Removes the entries whose deadline has passed, with a DeadlineExceededError as reply."""
        while (first := self._deadlines.peek()) is not None and first[0] <= now:
            self._forget(first[1])
            message = "the deadline passed while waiting for KV blocks on the decode worker"
            first[1].reply(DeadlineExceededError(message))

    def grant(
        self, state: tuple[int, ...], now: float, try_reserve: Callable[[WaitingReservation], bool]
    ) -> None:
        """Tries the first entries in order, and removes those that `try_reserve` has served.

        Nothing is done in a `state` of the engine in which they were tried before: a try looks the prompt up in the
        prefix cache, which costs time and is useless while nothing was freed.
        """
        if not len(self._order) or state == self._tried_at:
            return
        self.expire(now)
        for entry in offer_in_order(
            self._first(MAX_LOOKS),
            lambda entry: Offer.TAKEN if try_reserve(entry) else Offer.MISFIT,
            max_bypasses=self._max_bypasses,
            max_looks=MAX_LOOKS,
        ):
            self._forget(entry)
        self._tried_at = state

    def _first(self, count: int) -> list[WaitingReservation]:
        first: list[WaitingReservation] = []
        while len(first) < count and (entry := self._order.pop()) is not None:
            first.append(entry)
        for entry in first:
            self._order.push(entry)
        return first

    def _forget(self, entry: WaitingReservation) -> None:
        self._order.discard(entry)
        self._deadlines.discard(entry)
        entries = self._by_id[entry.request.request_id]
        entries.remove(entry)
        if not entries:
            del self._by_id[entry.request.request_id]
