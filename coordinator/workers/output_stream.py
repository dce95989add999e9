"""The workers' output for the attempts of this coordinator: one output stream a worker, one collector an attempt.

*Reading.* While the stream of a decode worker is broken, the worker goes on and keeps its output. The next stream
begins with the position that each attempt has received; the worker sends the rest, or reports the request as lost.
Attempts fail, and resume on other workers, only when the next stream takes too long.

*Collecting.* Tokens are sent at once while the event loop is idle, and at intervals while it is busy: a message to a
client costs far more than a token in it. Under load, decode output therefore stays in its collectors until the interval
ends, and all output for one client is one message. The interval, a few milliseconds at most, follows the load; see
docs/internals/design-notes/coalescing.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import grpc

from coordinator.workers.snapshot import Worker, WorkerKey
from splitserve.errors import SplitserveError, UnavailableError
from splitserve.generation.output_delta import News, TokenDelta, rows_of
from splitserve.logs import log_event, log_exception
from splitserve.rpc.credentials import Metadata
from splitserve.rpc.status import error_from_rpc, failure_error
from splitserve.v1 import decode_pb2, generation_pb2, prefill_pb2

if TYPE_CHECKING:
    from splitserve.v1.decode_pb2_grpc import DecodeServiceAsyncStub

BUSY, IDLE = 0.45, 0.3
"""Shares of a core used by the loop: above BUSY the interval grows, below IDLE it shrinks. gRPC's threads need about as
much, so a loop that shares its core with them rarely gets much more than half of it."""
LATE_S = 0.01
"""A loop whose timers fire this late counts as fully busy, even if another process holds the core."""
SMOOTHING = 0.4
FIRST_INTERVAL_S = 0.5e-3
MAX_WAITERS_PER_TURN = 32
"""Waiters woken in one turn of the loop; each then writes a message."""
GROW, SHRINK = 1.5, 0.8
MAX_CALL_WAIT_S = 2e-3
"""Longest wait of a call to a worker. It is short, because two consecutive calls come before a first token."""


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
"""Number of unread events from which on output is merged: a slow client gets it in one message anyway."""


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker failed the attempt, or was lost."""

    worker: WorkerKey
    error: SplitserveError


WorkerEvent = (
    TokenDelta | prefill_pb2.FirstToken | prefill_pb2.HandoffDone | decode_pb2.SequenceOutput | WorkerFailed
)


class OutputCollector:
    """A queue with one reader. It holds each token once, at most the request's `max_tokens`, and merges output that a
    slow client leaves unread, so that a token takes little more than its text. A bound on the queue would let one slow
    client block the output stream that all requests share.
    """

    def __init__(self, on_finished: Callable[[], None] = lambda: None) -> None:
        self._events: list[WorkerEvent] = []
        self._readable = False
        """Whether the events may be taken now."""
        self._waiter: asyncio.Future[None] | None = None
        self._reader: Callable[[], bool] | None = None
        self._on_finished = on_finished
        self.next_position = 0
        """Position after the last token received from the decode worker; 0 before the first."""
        self.ended = False
        """Whether the decode worker's last output was received."""

    def put(self, event: WorkerEvent, coalescer: OutputCoalescer | None = None) -> None:
        """Adds an event; never blocks. Calls `on_finished` on the decode worker's last output.

        Output that was received before is dropped. `coalescer` may hold back output between the first and the last.
        """
        if isinstance(event, TokenDelta):
            delta: TokenDelta | generation_pb2.OutputDelta = event
        elif isinstance(event, decode_pb2.SequenceOutput):
            delta = event.delta
        else:
            self._events.append(event)
            self._release()
            return
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

    def _is_new(self, delta: TokenDelta | generation_pb2.OutputDelta) -> bool:
        if self.ended:
            return False
        if count := len(delta.token_ids):
            first = delta.first_position
            if first < self.next_position:
                return False
            self.next_position = first + count
        self.ended = bool(delta.finish_reason)
        return True

    def _merged(self, event: News) -> bool:
        if len(self._events) < MERGE_FROM:
            return False
        last = self._events[-1]
        return isinstance(last, TokenDelta) and isinstance(event, TokenDelta) and last.extend(event)

    def take_all(self) -> list[WorkerEvent]:
        """All events since the last call, the oldest first; none while the coalescer holds them back."""
        if not self._readable:
            return []
        events, self._events = self._events, []
        self._readable = False
        return events

    async def wait(self, reader: Callable[[], bool] | None = None) -> None:
        """Returns once there are events to take. Only one task may wait at a time.

        Meanwhile `reader` is called whenever there are events. If it returns True, it has taken them and the wait goes
        on: waking a task costs more than most events do. It must not raise.
        """
        if not self._readable:
            self._waiter, self._reader = asyncio.get_running_loop().create_future(), reader
            try:
                await self._waiter
            finally:
                self._reader = None  # it refers to its owner, which refers to this collector

    def _release(self) -> None:
        self._readable = True
        if self._waiter is None or self._waiter.done():  # done also while the waiting task is being cancelled
            return
        if self._reader is None or not self._reader():
            self._waiter.set_result(None)


OPEN_TIMEOUT_S = 5.0
MAX_DETACHED_S = 5.0
"""How long attempts wait until a broken stream is open again; less if the worker's lease is shorter."""
ACKNOWLEDGE_S = 1.0
"""Time between two acknowledgements. The worker keeps the output that it sent in between."""
FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 1.0


@dataclass(eq=False)
class OutputReader:
    """The consecutive output streams of one boot of a decode worker."""

    worker: Worker
    stub: DecodeServiceAsyncStub
    coordinator_id: str
    metadata: Metadata
    collectors: Mapping[str, OutputCollector]
    """Of the attempts that this worker decodes, by attempt id."""
    numbers: Iterator[int]
    """The numbers of all output streams of this coordinator."""
    coalescer: OutputCoalescer | None
    is_open: bool = False
    attachment: int = 0
    """Number of the present or last stream."""
    _lease_s: float = 0.0
    """How long the worker keeps requests without a stream, as it said on the present or last stream."""
    _received: int = 0
    """Messages that the present stream brought."""
    _acknowledged: int = 0
    _giving_up: asyncio.TimerHandle | None = None

    async def run(self, on_open: Callable[[bool], None]) -> None:
        """Keeps the stream open until cancelled; tells `on_open` when it opens and when it breaks."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._acknowledge())
                await self._keep_open(on_open)
        finally:
            self._stop_waiting()

    def fail_all(self, error: SplitserveError) -> None:
        """Fails all attempts that this worker decodes."""
        for collector in self.collectors.values():
            collector.put(WorkerFailed(self.worker.key, error))

    async def _keep_open(self, on_open: Callable[[bool], None]) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                await self._read(on_open)
            except SplitserveError as error:
                log_event("outputs.broken", worker_id=self.worker.worker_id, reason=error.reason)
            except Exception as error:  # a wrong message of one worker must not end the streams of the others
                log_exception("outputs.broken", error, worker_id=self.worker.worker_id)
            if self.is_open:
                self.is_open = False
                backoff_s = FIRST_BACKOFF_S
                on_open(False)
                # The attempts wait for the next stream as long as the worker keeps them.
                wait_s = min(MAX_DETACHED_S, self._lease_s)
                self._giving_up = asyncio.get_running_loop().call_later(wait_s, self._give_up)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    async def _read(self, on_open: Callable[[bool], None]) -> None:
        number = next(self.numbers)
        request = decode_pb2.StreamOutputsRequest(
            coordinator_id=self.coordinator_id,
            attachment=number,
            requests=[
                decode_pb2.AttachedRequest(request_id=name, next_position=collector.next_position)
                for name, collector in self.collectors.items()
                if not collector.ended
            ],
        )
        call = self.stub.StreamOutputs(request, metadata=self.metadata)
        messages = aiter(call)
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                first = await anext(messages, None)
            if first is None:
                raise UnavailableError(f"{self.worker.name} closed its output stream", reason="WORKER_LOST")
            self._opened(number, first)
            on_open(True)
            async for message in messages:
                self._accept(message)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        except TimeoutError:
            raise UnavailableError(
                f"{self.worker.name} opens no output stream", reason="WORKER_LOST"
            ) from None
        finally:
            call.cancel()

    def _opened(self, number: int, first: decode_pb2.StreamOutputsResponse) -> None:
        if first.epoch != self.worker.epoch:
            # Another boot responds at this address; it will register under its own epoch.
            error = UnavailableError(f"{self.worker.name} was restarted", reason="WORKER_LOST")
            self.fail_all(error)
            raise error
        self._stop_waiting()
        self._lease_s = first.lease.ToNanoseconds() / 1e9
        self.attachment = number
        self._received = self._acknowledged = 0
        self.is_open = True
        log_event("outputs.open", worker_id=self.worker.worker_id, attempts=len(self.collectors))

    def _accept(self, message: decode_pb2.StreamOutputsResponse) -> None:
        for name in message.lost_request_ids:
            if (collector := self.collectors.get(name)) is not None:
                error = UnavailableError(f"{self.worker.name} has lost the request", reason="REQUEST_LOST")
                collector.put(WorkerFailed(self.worker.key, error))
        if message.outputs or message.HasField("tokens"):
            self._received += 1
        for name, news in rows_of(message):
            if (collector := self.collectors.get(name)) is not None:  # else the attempt was closed meanwhile
                event = news if isinstance(news, TokenDelta) else self._event_of(news)
                collector.put(event, self.coalescer)

    def _event_of(self, output: decode_pb2.SequenceOutput) -> WorkerEvent:
        if output.HasField("failure") or output.delta.finish_reason == generation_pb2.FINISH_REASON_ABORT:
            return WorkerFailed(self.worker.key, _failure(output, self.worker.name))
        return output

    async def _acknowledge(self) -> None:
        while True:
            await asyncio.sleep(ACKNOWLEDGE_S)
            received = self._received
            if not self.is_open or received == self._acknowledged:
                continue
            request = decode_pb2.AcknowledgeOutputsRequest(
                coordinator_id=self.coordinator_id, attachment=self.attachment, messages=received
            )
            try:
                await self.stub.AcknowledgeOutputs(request, timeout=OPEN_TIMEOUT_S, metadata=self.metadata)
            except grpc.aio.AioRpcError:
                continue  # the next acknowledgement includes this one
            if request.attachment == self.attachment:
                self._acknowledged = received

    def _give_up(self) -> None:
        self.fail_all(UnavailableError(f"{self.worker.name} went away", reason="WORKER_LOST"))

    def _stop_waiting(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None


def _failure(output: decode_pb2.SequenceOutput, who: str) -> SplitserveError:
    reason = output.failure.reason or "ABORTED"
    message = f"{who}: {output.failure.message or 'aborted the request'}"
    return failure_error(reason, message)
