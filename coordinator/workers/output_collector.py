"""Collects what both workers send for one attempt, in order of arrival, and coalesces it under load.

Tokens leave at once while the event loop is idle, at intervals while it is busy: a message to a client costs far more
than a token in it. Under load, decode output therefore stays in its collectors until the interval ends, and everything
for one client goes out as one message. The interval, a few milliseconds at most, grows and shrinks with the load; see
docs/decisions/0011-output-is-coalesced-under-load.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from coordinator.workers.snapshot import WorkerKey
from splitserve.errors import SplitserveError
from splitserve.generation.output_delta import extend_output
from splitserve.v1 import decode_pb2, generation_pb2, prefill_pb2

BUSY, IDLE = 0.45, 0.3
"""Shares of a core used by the loop. Above the first the interval grows, below the second it shrinks. gRPC's threads
need about as much again, so a loop that shares its core with them rarely gets much more than half of it."""
LATE_S = 0.01
"""A loop whose timers fire this late counts as fully busy, even if another process holds the core."""
SMOOTHING = 0.4
FIRST_INTERVAL_S = 0.5e-3
MAX_WAITERS_PER_TURN = 32
"""Waiters woken in one turn of the loop; each then writes a message."""
GROW, SHRINK = 1.5, 0.8
MAX_CALL_WAIT_S = 2e-3
"""Calls to workers wait less than output does: two of them, one after the other, come before a first token."""


def next_interval_s(interval_s: float, load: float, max_interval_s: float) -> float:
    """The interval that follows `interval_s` at this loop load (0..1). Seconds; 0: no coalescing."""
    if load > BUSY:
        return min(max_interval_s, max(FIRST_INTERVAL_S, interval_s * GROW))
    if load < IDLE:
        return interval_s * SHRINK if interval_s > FIRST_INTERVAL_S else 0.0
    return interval_s


class OutputCoalescer:
    """Wakes readers of output at intervals. A `max_interval_s` of 0 turns coalescing off."""

    def __init__(self, max_interval_s: float = 0.0) -> None:
        self.interval_s = 0.0
        """How long output may be held back now. Seconds."""
        self.loop_load = 0.0
        """Smoothed load of the event loop, 0..1."""
        self._max_interval_s = max_interval_s
        self._waiters: dict[Callable[[], None], None] = {}

    def call_wait_s(self) -> float:
        """How long a call to a worker may wait for others now, to share a message. Seconds."""
        return min(self.interval_s, MAX_CALL_WAIT_S)

    def schedule(self, waiter: Callable[[], None]) -> None:
        """Calls `waiter` once when the interval ends, or in the loop's next turn if the interval is 0.

        Waiters beyond MAX_WAITERS_PER_TURN follow in later turns, so that the loop stays responsive.
        """
        if not self._waiters:
            asyncio.get_running_loop().call_later(self.interval_s, self._flush)
        self._waiters[waiter] = None

    def on_sample(self, busy: float, late_s: float) -> None:
        """Takes a sample of the loop: the share of time it computed, 0..1, and how late its timer fired, in seconds."""
        load = max(busy, min(1.0, late_s / LATE_S))
        self.loop_load += SMOOTHING * (load - self.loop_load)
        self.interval_s = next_interval_s(self.interval_s, self.loop_load, self._max_interval_s)

    def _flush(self) -> None:
        for waiter in list(islice(self._waiters, MAX_WAITERS_PER_TURN)):
            del self._waiters[waiter]
            waiter()
        if self._waiters:
            asyncio.get_running_loop().call_soon(self._flush)


MERGE_FROM = 16
"""Unread events from which on output is merged: a slow client gets it in one message anyway."""


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker failed the attempt, or was lost."""

    worker: WorkerKey
    error: SplitserveError


WorkerEvent = prefill_pb2.FirstToken | prefill_pb2.HandoffDone | decode_pb2.SequenceOutput | WorkerFailed


class OutputCollector:
    """A queue with one reader. It has no explicit bound, yet cannot grow without limit: it holds each token once, at
    most the request's `max_tokens`, and merges what a slow client leaves unread, so that a token takes little more
    than its text. A lower bound would let one slow client block the output stream that all requests share.
    """

    def __init__(self, on_finished: Callable[[], None] = lambda: None) -> None:
        self._events: list[WorkerEvent] = []
        self._readable = False
        """Whether the events may be taken now."""
        self._waiter: asyncio.Future[None] | None = None
        self._reader: Callable[[], bool] | None = None
        self._on_finished = on_finished
        self.next_position = 0
        """Position after the last token that has come from the decode worker; 0 before the first."""
        self.ended = False
        """Whether the decode worker's last output has come."""

    def put(self, event: WorkerEvent, coalescer: OutputCoalescer | None = None) -> None:
        """Adds an event; never blocks. Calls `on_finished` on the decode worker's last output.

        Output that has come before is dropped. Output between the first and the last may be held back by `coalescer`.
        """
        if not isinstance(event, decode_pb2.SequenceOutput):
            self._events.append(event)
            self._release()
            return
        delta = event.delta
        if not self._is_new(delta):
            return
        if not self._merged(event):
            self._events.append(event)
        if self.ended:
            self._on_finished()
        if coalescer is None or self.ended or delta.first_position == 0:
            self._release()
        else:
            coalescer.schedule(self._release)

    def _is_new(self, delta: generation_pb2.OutputDelta) -> bool:
        if self.ended:
            return False
        if count := len(delta.token_ids):
            first = delta.first_position
            if first < self.next_position:
                return False
            self.next_position = first + count
        self.ended = bool(delta.finish_reason)
        return True

    def _merged(self, event: decode_pb2.SequenceOutput) -> bool:
        if len(self._events) < MERGE_FROM:
            return False
        last = self._events[-1]
        return isinstance(last, decode_pb2.SequenceOutput) and extend_output(last, event)

    def take_all(self) -> list[WorkerEvent]:
        """All events since the last call, oldest first; none while the coalescer holds them back."""
        if not self._readable:
            return []
        events, self._events = self._events, []
        self._readable = False
        return events

    async def wait(self, reader: Callable[[], bool] | None = None) -> None:
        """Returns once there are events to take. Only one task may wait at a time.

        Meanwhile `reader` is called whenever there are any. Where it returns True, it has taken them and the wait goes
        on: waking a task costs more than most of what it would do. It must not raise.
        """
        if not self._readable:
            self._waiter, self._reader = asyncio.get_running_loop().create_future(), reader
            try:
                await self._waiter
            finally:
                self._reader = None  # which refers to its owner, and so to this

    def _release(self) -> None:
        self._readable = True
        if self._waiter is None or self._waiter.done():  # also where the waiting task is being cancelled
            return
        if self._reader is None or not self._reader():
            self._waiter.set_result(None)
