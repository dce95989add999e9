"""A request on a decode worker, from its reservation to its end: it waits for blocks, takes its KV, and decodes.

The queue of reservations is the back-pressure of the whole system: a request reserves its decode blocks before its
prompt is computed, so a full decode worker stops prefill here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.core.engine import EngineRequest, FinishReason, RequestOutput
from engine.scheduling.waiting_queue import Precedence, WaitingQueue
from kv_transfer.handoff.messages import KvTicket
from splitserve.errors import DeadlineExceededError, ResourceExhaustedError, SplitserveError
from splitserve.generation.output_delta import News, TokenDelta, news_of
from splitserve.queues import LazyHeap, Offer, offer_in_order
from splitserve.tracing.context import Attributes, FinishedSpan, SpanSink, TraceContext, unix_offset_s
from splitserve.v1 import decode_pb2
from worker.messages import output_delta

MAX_LOOKS = 8
"""Maximum number of waiting reservations tried at a time, which bounds the cost however many wait."""


@dataclass(frozen=True, slots=True)
class Granted:
    """A granted reservation: its ticket (None if the prompt is computed here), and the seconds that it waited."""

    ticket: KvTicket | None
    wait_s: float


Reply = Callable[[Granted | SplitserveError], object]
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
    arrival: int = 0
    """The request's number in the order of arrival, set by the queue."""
    place: int = 0
    """The request's place in the order of service: `arrival`, until it trades places. Set by the queue."""

    @property
    def precedence(self) -> Precedence:
        """Where the request stands among others."""
        return self.request.precedence

    @property
    def due_s(self) -> float:
        """When the request's first token is due."""
        return self.request.first_due_s


class ReservationQueue:
    """Reservations that wait, in order of precedence. One that does not fit may be bypassed `max_bypasses` times.

    The cost per step does not depend on how many wait.
    """

    def __init__(self, *, max_waiting: int, max_bypasses: int) -> None:
        self._max_waiting = max_waiting
        self._max_bypasses = max_bypasses
        self._order: WaitingQueue[WaitingReservation] = WaitingQueue()
        self._deadlines: LazyHeap[float, WaitingReservation] = LazyHeap()
        self._by_id: dict[str, list[WaitingReservation]] = {}
        self._arrivals = 0
        self._tried_at: tuple[int, ...] | None = None
        """The state of the engine in which reservations were last tried; None if others have come since."""

    def __len__(self) -> int:
        return len(self._order)

    def add(self, entry: WaitingReservation) -> None:
        """Queues an entry. Raises ResourceExhaustedError (QUEUE_FULL) if too many wait."""
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

    def remove(self, request_id: str) -> bool:
        """Removes the entries of a request without a reply; returns whether there were any."""
        entries = list(self._by_id.get(request_id, ()))
        for entry in entries:
            self._forget(entry)
        return bool(entries)

    def ids_of(self, coordinator_id: str) -> list[str]:
        """Ids of the requests of one coordinator. Costs O(waiting)."""
        return [name for name, entries in self._by_id.items() if entries[0].coordinator_id == coordinator_id]

    def expire(self, now: float) -> list[str]:
        """Removes the entries whose deadline has passed, with a DeadlineExceededError as reply; returns the ids of
        their requests."""
        expired: list[str] = []
        while (first := self._deadlines.peek()) is not None and first[0] <= now:
            entry = first[1]
            self._forget(entry)
            message = "the deadline passed while waiting for KV blocks on the decode worker"
            entry.reply(DeadlineExceededError(message))
            expired.append(entry.request.request_id)
        return expired

    def grant(
        self, state: tuple[int, ...], now: float, try_reserve: Callable[[WaitingReservation], bool]
    ) -> None:
        """Tries the first entries in order, and removes those that `try_reserve` has served.

        Does nothing in a `state` of the engine in which the entries were tried before: a try looks the prompt up in
        the prefix cache, which costs time and is useless while nothing was freed.
        """
        if not len(self._order) or state == self._tried_at:
            return
        for entry in offer_in_order(
            self._first(),
            lambda entry: Offer.TAKEN if try_reserve(entry) else Offer.MISFIT,
            max_bypasses=self._max_bypasses,
            max_looks=MAX_LOOKS,
        ):
            self._forget(entry)
        self._tried_at = state

    def _first(self) -> list[WaitingReservation]:
        first: list[WaitingReservation] = []
        while len(first) < MAX_LOOKS and (entry := self._order.pop()) is not None:
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


@dataclass(slots=True)
class LiveRequest:
    """One request. `engine_id` is unique in this worker, `public_id` is the coordinator's request id."""

    engine_id: str
    coordinator_id: str
    received_blocks: int = 0
    """How many blocks the writer writes."""
    admitted_s: float | None = None
    admit_ms: float | None = None
    is_local: bool = False
    """Whether the prompt is computed here."""
    cached_tokens: int = 0
    """Leading tokens of a local prompt that were in the prefix cache when it began."""
    local_reported: bool = False
    trace: TraceContext | None = None
    """The span of the request's attempt."""
    arrived_s: float = 0.0
    granted_s: float = 0.0
    began_s: float = 0.0
    """When the request's first step began; 0: it has not begun. On `time.monotonic`, like the two before."""
    public_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.public_id = public_id(self.engine_id)

    @classmethod
    def of(
        cls, entry: WaitingReservation, now: float, received_blocks: int = 0, *, is_local: bool = False
    ) -> LiveRequest:
        """The request of a reservation that is granted at `now`."""
        request = entry.request
        return cls(
            request.request_id,
            entry.coordinator_id,
            received_blocks,
            is_local=is_local,
            trace=request.trace,
            arrived_s=entry.arrived_s,
            granted_s=now,
        )

    def admitted(self) -> decode_pb2.SequenceOutput:
        """The message that the request's KV has arrived and the request decodes."""
        return decode_pb2.SequenceOutput(request_id=self.public_id, admitted=True)

    def progressed(self, output: RequestOutput, now: float) -> News:
        """A step's tokens, with the times that were not sent yet. Call it once per output."""
        has_times = self.admit_ms is not None or (self.is_local and not self.local_reported)
        if not has_times and output.is_plain:
            return TokenDelta(output.first_position, output.token_ids, output.text)
        message = decode_pb2.SequenceOutput(request_id=self.public_id, delta=output_delta(output))
        if self.admit_ms is not None:
            message.admit_ms, self.admit_ms = self.admit_ms, None
        if self.is_local and not self.local_reported:
            self.local_reported = True
            message.local_prefill.cached_tokens = self.cached_tokens
            message.local_prefill.queue_ms = max(0.0, self.began_s - self.arrived_s) * 1e3
            message.local_prefill.compute_ms = (now - self.began_s) * 1e3
        if output.failure is not None:
            message.failure.reason, message.failure.message = output.failure
        return news_of(message)

    def failed(self, reason: str, text: str) -> decode_pb2.SequenceOutput:
        """The message that the request has failed."""
        ended = RequestOutput(self.engine_id, 0, finish_reason=FinishReason.ABORT)
        message = decode_pb2.SequenceOutput(request_id=self.public_id, delta=output_delta(ended))
        message.failure.reason, message.failure.message = reason, text
        return message

    def spans(self, trace: TraceContext, ended_s: float, offset_s: float, failure: str) -> list[FinishedSpan]:
        """The whole decode, then its parts in order. `offset_s` is to add for seconds since 1970."""
        attributes: Attributes = {
            "splitserve.request_id": self.public_id,
            "splitserve.blocks": self.received_blocks,
            "splitserve.local_prefill": self.is_local,
        }
        start_s, end_s = self.arrived_s + offset_s, ended_s + offset_s
        own, parent = trace.child(), trace.span_id
        whole = FinishedSpan("decode", own, parent, start_s, end_s, attributes, "server", error=failure)
        received = [("receive", self.admitted_s or 0.0), ("admit", self.began_s)]
        waited = [("queue", self.began_s)] if self.is_local else received
        spans, begin_s = [whole], self.arrived_s
        for name, until_s in [("reserve", self.granted_s), *waited, ("generate", ended_s)]:
            spans.append(whole.part(name, begin_s + offset_s, (until_s or ended_s) + offset_s))
            begin_s = until_s
            if not until_s:
                break  # the request ended during this part
        return spans


class LiveRequests(dict[str, LiveRequest]):
    """The requests of a decode worker by engine id."""

    def __init__(self, sink: SpanSink | None) -> None:
        """`sink` takes the spans of traced requests; None: they are not exported."""
        super().__init__()
        self._sink = sink

    def end(self, engine_id: str, failure: str = "") -> LiveRequest | None:
        """Removes a request that has ended, and exports its spans if it is traced; None for an unknown id. `failure` is
        reason and message."""
        request = self.pop(engine_id, None)
        trace = request.trace if request is not None else None
        if request is not None and trace is not None and trace.sampled and self._sink is not None:
            self._sink(request.spans(trace, time.monotonic(), unix_offset_s(), failure))
        return request


def public_id(engine_id: str) -> str:
    """The coordinator's id of a request."""
    return engine_id.partition("/")[2]
