"""One attempt at a request on one pair of workers: reserve, prefill, and both workers' output in order."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from contextvars import copy_context
from functools import partial

from coordinator.attempt_state import (
    AWAITS_DECODE,
    AWAITS_FIRST_TOKEN,
    AWAITS_REPORT,
    ENDED,
    ONLY_DECODE_SENDS,
    PREFILL_NOT_NEEDED,
    AttemptEvent,
    AttemptState,
    DecodeRelease,
    after,
    release_of,
)
from coordinator.background_tasks import BackgroundTasks
from coordinator.request.caller import precedence_of
from coordinator.request.observer import RequestEvents, RequestObserver
from coordinator.request.sending import DirectSend
from coordinator.workers.client import WorkerClient
from coordinator.workers.output_collector import OutputCollector, WorkerEvent, WorkerFailed
from coordinator.workers.prefix_index.tier_reads import read_back_speed
from splitserve.errors import (
    CancelledByPeerError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    SplitserveError,
    UnavailableError,
)
from splitserve.generation.output_delta import take_merged
from splitserve.logs import log_event
from splitserve.runtime.own_clock import wait_own_time
from splitserve.v1 import decode_pb2, generation_pb2, kv_transfer_pb2, prefill_pb2

ADMIT_WAIT_S = 5.0
"""How long the decode worker may take to acknowledge the completion after the last write, while this process runs. The
completion arrives with that write, so the limit covers many decode steps."""
HANDOFF_REPORT_WAIT_S = 2.0
"""How long a finished answer waits for the prefill worker's transfer report, while this process runs."""
MAX_MERGED_TOKENS = 1024
"""Keeps a merged delta, logprobs included, far below the gRPC message limit."""

RETRYABLE = (UnavailableError, FailedPreconditionError, CancelledByPeerError)
"""Errors that another pair may not hit. All others end the request."""


class Attempt:
    """Call `reserve`, `start_prefill`, `next_delta` until it returns None, `settle`; `close` in any case.

    Worker failures are raised as SplitserveError; `events.state.attempt.suspect` then names the worker at fault.
    `local_prefill_tokens` is how many prompt tokens, at most, the decode worker may compute itself; `targets` is what
    both are to serve the request with, from now on. `direct` gets what comes from decode while `next_delta` waits, as
    long as it is ready and nothing but tokens comes; these deltas count as sent and are not returned.
    """

    def __init__(
        self,
        events: RequestEvents,
        prefill: WorkerClient,
        decode: WorkerClient | None,
        background: BackgroundTasks,
        local_prefill_tokens: int = 0,
        targets: generation_pb2.ServiceTargets | None = None,
        direct: DirectSend | None = None,
    ) -> None:
        state = events.state
        self.state = AttemptState.NEW
        self.attempt_id = state.attempt.attempt_id
        self._events, self._record, self._request = events, state.attempt, state.request
        self._token_ids = (*state.request.prompt, *state.token_ids)
        self._prior = len(state.token_ids)
        self._prefill, self._decode, self._background = prefill, decode, background
        self._local_prefill_tokens, self._targets = local_prefill_tokens, targets
        self._ticket: kv_transfer_pb2.KvTicket | None = None
        self._collector = OutputCollector(lambda: events.emit(RequestObserver.decoded))
        self._prefill_task: asyncio.Task[None] | None = None
        self._pending: deque[generation_pb2.OutputDelta] = deque()
        self._decodes = False
        """Whether the decode worker has sent output, after which its outputs change nothing here."""
        self._written = False
        """Whether the transfer report has come."""
        self._direct = direct
        self._reader = None if direct is None else partial(copy_context().run, self._pass_on)
        self._broken: Exception | None = None
        """What `_pass_on` has raised; `next_delta` raises it."""
        self._failure: WorkerFailed | None = None
        """Raised once all output that arrived before it has been taken."""
        self._attached = ExitStack()
        for client in dict.fromkeys((prefill, decode)):
            if client is not None:
                here = client.attached(self.attempt_id, self._collector, decodes=client is decode)
                self._attached.enter_context(here)

    async def reserve(self) -> None:
        """Reserves KV blocks on the decode worker, if the answer needs one, and keeps the ticket.

        A response without a ticket means that the decode worker computes the prompt itself.
        """
        if self._decode is None:
            return
        self._record.suspect = self._decode.worker.key
        self._enter(AttemptEvent.ASK_DECODE)
        started_s, left_s = time.monotonic(), self._left_s()
        request = decode_pb2.ReserveRequest(
            request_id=self.attempt_id,
            token_ids=self._token_ids,
            prior_output_tokens=self._prior,
            sampling=self._request.sampling,
            stop=self._request.stop,
            precedence=self._precedence(),
            cache_salt=self._request.caller.cache_salt,
            trace=self._trace(),
            adapter=self._adapter(),
            writer_agent_id=self._prefill.worker.agent_id,
            local_prefill_tokens=self._local_prefill_tokens,
            targets=self._targets,
            lane_gb_per_second=read_back_speed(self._record.prefill, self._record.decode),
        )
        request.timeout.FromNanoseconds(int(left_s * 1e9))
        self._events.reserving(started_s)
        try:
            response = await self._decode.reserve(request, left_s)
        except (ResourceExhaustedError, FailedPreconditionError, InvalidArgumentError) as error:
            self._enter(AttemptEvent.REFUSAL)
            if isinstance(error, ResourceExhaustedError):
                self._events.emit(RequestObserver.reserve_ended, time.monotonic() - started_s)
            raise
        except (asyncio.CancelledError, DeadlineExceededError):
            self._events.emit(RequestObserver.reserve_ended, time.monotonic() - started_s)
            raise
        reserve_s = time.monotonic() - started_s
        report = self._record.report
        report.reserve_ms, report.reserve_wait_ms = reserve_s * 1e3, response.wait_ms
        # A local prefill's wait is in its own figure, with that for its first step.
        self._events.emit(RequestObserver.reserve_ended, reserve_s if response.HasField("ticket") else 0.0)
        if response.HasField("ticket"):
            self._enter(AttemptEvent.TICKET)
            self._ticket = response.ticket
            report.decode_cached_tokens = response.ticket.cached_tokens
            report.reserved_blocks = len(response.ticket.block_indices)
            return
        self._enter(AttemptEvent.COMPUTES_LOCALLY)
        report.prefill_worker = ""

    def start_prefill(self) -> None:
        """Starts the Prefill call with the ticket, if any; does nothing if the decode worker computes the prompt."""
        report, now = self._record.report, time.monotonic()
        report.queue_ms = (now - self._request.received_s) * 1e3
        if self.state is AttemptState.LOCAL:
            self._events.prefilling_locally()
            # Reserve returned while the prompt was already being computed.
            report.queue_ms -= report.reserve_ms
            report.reserve_ms = 0.0
            return
        self._enter(AttemptEvent.ASK_PREFILL)
        self._events.prefilling(now)
        left_s = self._left_s()
        request = prefill_pb2.PrefillRequest(
            request_id=self.attempt_id,
            token_ids=self._token_ids,
            prior_output_tokens=self._prior,
            sampling=self._request.sampling,
            stop=self._request.stop,
            ticket=self._ticket,
            trace=self._trace(),
            precedence=self._precedence(),
            cache_salt=self._request.caller.cache_salt,
            adapter=self._adapter(),
            targets=self._targets,
        )
        if request.targets.ttft_ms:
            request.targets.ttft_left_ms -= report.reserve_ms
        request.timeout.FromNanoseconds(int(left_s * 1e9))
        self._prefill_task = self._background.start(self._prefill.prefill(request, left_s, self._collector))

    async def next_delta(self) -> generation_pb2.OutputDelta | None:
        """The next delta, or None after the last one.

        The first token comes from prefill; decode output that arrives earlier is held back until then. Deltas that
        accumulated while the client was slow are merged.
        """
        while self.state not in ENDED:
            if self._broken is not None:
                raise self._broken
            self._accept(self._collector.take_all())
            if self._pending and self.state not in AWAITS_FIRST_TOKEN:
                delta = _next_delta(self._pending)
                if delta.finish_reason != generation_pb2.FINISH_REASON_UNSPECIFIED:
                    by_decode = bool(self._record.report.decode_worker)
                    self._enter(AttemptEvent.LAST_OUTPUT if by_decode else AttemptEvent.LAST_TOKEN)
                return delta
            if self._failure is not None:
                self._enter(AttemptEvent.FAILURE)
                self._record.suspect = self._failure.worker
                raise self._failure.error
            await self._wait()
        return None

    async def settle(self) -> None:
        """Waits up to HANDOFF_REPORT_WAIT_S for an outstanding transfer report. Call after the last delta."""
        if self.state is AttemptState.SETTLING:  # the answer is complete without it, too
            await wait_own_time(self._reported, HANDOFF_REPORT_WAIT_S)

    async def _reported(self) -> None:
        while self.state is AttemptState.SETTLING and self._failure is None:
            await self._collector.wait()
            self._accept(self._collector.take_all())

    def close(self) -> None:
        """Cancels the attempt on both workers unless they have finished with it. Never blocks."""
        self._attached.close()
        self._reader = None  # refers to this attempt, which would be garbage in a cycle
        if self._prefill_task is not None:
            self._prefill_task.cancel()
        release = release_of(self.state, prefill_called=self._prefill_task is not None, written=self._written)
        if self._decode is not None and release is not DecodeRelease.NOTHING:
            no_writer, deadline_s = release is DecodeRelease.NO_WRITER, self._request.deadline_s
            self._background.start(self._decode.abort(self.attempt_id, no_writer, deadline_s))

    def _precedence(self) -> generation_pb2.Precedence:
        caller = self._request.caller
        return precedence_of(caller.tenant, caller.priority_class, self._request.priority)

    def _trace(self) -> generation_pb2.TraceContext | None:
        return self._record.trace.to_proto() if self._record.trace is not None else None

    def _adapter(self) -> generation_pb2.AdapterRef | None:
        adapter = self._request.model.adapter
        return generation_pb2.AdapterRef(**adapter._asdict()) if adapter else None

    def _enter(self, event: AttemptEvent) -> None:
        before, self.state = self.state, after(self.state, event)
        log_event(
            "attempt.state",
            level=logging.DEBUG,
            attempt_id=self.attempt_id,
            before=before.value,
            after=self.state.value,
            trigger=event.value,
        )

    def _left_s(self) -> float:
        return max(1e-3, self._request.deadline_s - time.monotonic())

    async def _wait(self) -> None:
        """Waits for an event. A completion that the decode worker does not acknowledge in time is a failure."""
        if self.state is not AttemptState.WRITTEN or self._decode is None:
            await self._collector.wait(self._reader if self.state in ONLY_DECODE_SENDS else None)
            return
        if not await wait_own_time(self._collector.wait, ADMIT_WAIT_S):
            name = self._decode.worker.worker_id
            message = f"decode worker {name} did not get the completion of a handoff in {ADMIT_WAIT_S:g} s"
            error = UnavailableError(message, reason="COMPLETION_LOST")
            self._failure = WorkerFailed(self._decode.worker.key, error)

    def _pass_on(self) -> bool:
        """Sends what has come without waking the task that waits in `next_delta`. False: that has to go on."""
        direct, before, pending = self._direct, self.state, self._pending
        assert direct is not None
        try:
            self._accept(self._collector.take_all())
            while pending:
                is_plain = self.state is before and self._failure is None
                if not is_plain or self._events.state.first_token_s is None or not direct.is_ready():
                    return False
                delta = _next_delta(pending)
                if delta.finish_reason:
                    pending.appendleft(delta)
                    return False
                self._events.sent(delta, time.monotonic())
                direct.send(delta)
        except Exception as error:  # fails this request, not the stream that all requests of the worker share
            self._broken = error
            return False
        return self.state is before and self._failure is None

    def _accept(self, events: Iterable[WorkerEvent]) -> None:
        for event in events:
            match event:
                case decode_pb2.SequenceOutput():  # first because it is by far the most frequent
                    self._accept_output(event)
                case prefill_pb2.FirstToken():
                    self._enter(AttemptEvent.FIRST_TOKEN)
                    self._pending.appendleft(event.delta)
                    self._events.prefilled(event)
                case prefill_pb2.HandoffDone():
                    self._enter(AttemptEvent.PREFILL_OVER)
                    self._written = True
                    self._events.transferred(event)
                case WorkerFailed():
                    self._accept_failure(event)

    def _accept_output(self, output: decode_pb2.SequenceOutput) -> None:
        if self._decodes and not output.admitted:  # nothing but tokens follows the first output
            self._pending.append(output.delta)
            return
        if self.state in AWAITS_DECODE:
            self._enter(AttemptEvent.DECODE_HAS_KV)
        if output.admitted:
            return
        self._decodes = self.state in ONLY_DECODE_SENDS
        if self._decode is not None:
            self._record.report.decode_worker = self._decode.worker.worker_id
        self._pending.append(output.delta)
        if output.HasField("admit_ms"):
            self._events.decode_began(output.admit_ms)
        if output.HasField("local_prefill"):
            self._events.prefilled_locally(output.local_prefill)

    def _accept_failure(self, event: WorkerFailed) -> None:
        by_prefill = event.worker == self._prefill.worker.key and self._prefill is not self._decode
        if by_prefill and self.state in PREFILL_NOT_NEEDED:
            if self.state in AWAITS_REPORT:
                self._enter(AttemptEvent.PREFILL_OVER)
        elif self._failure is None:
            suspect = event.worker
            if event.error.reason == "TRANSFER_FAILED" and self._decode is not None:
                suspect = self._decode.worker.key  # the target of the write
            self._failure = WorkerFailed(suspect, event.error)


def is_retryable(error: SplitserveError) -> bool:
    """Whether another pair of workers may succeed."""
    return isinstance(error, RETRYABLE)


def _next_delta(pending: deque[generation_pb2.OutputDelta]) -> generation_pb2.OutputDelta:
    """The next delta, with those that follow it."""
    return pending.popleft() if len(pending) == 1 else take_merged(pending, MAX_MERGED_TOKENS)
