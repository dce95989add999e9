"""One attempt at a request on one pair of workers: reserve, prefill, and both workers' output in order.

The first token comes from the prefill worker and everything after it from the decode worker, on independent streams.
Decode output may therefore arrive before the first token (OVERTAKEN), or before the transfer report (DECODING).
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from contextvars import copy_context
from functools import partial
from types import MappingProxyType
from typing import Any

from coordinator.health.circuit_breakers import NO_FAILURES
from coordinator.request.inference_request import precedence_of
from coordinator.request.sending import Output
from coordinator.request_events import RequestEvents
from coordinator.workers.client import BackgroundTasks, WorkerClient
from coordinator.workers.output_stream import OutputCollector, WorkerEvent, WorkerFailed
from splitserve.errors import (
    CancelledByPeerError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    SplitserveError,
    UnavailableError,
)
from splitserve.generation.output_delta import TokenDelta, take_merged
from splitserve.runtime.waiting import wait_own_time
from splitserve.v1 import decode_pb2, generation_pb2, kv_transfer_pb2, prefill_pb2


class AttemptState(enum.StrEnum):
    """Progress of an attempt."""

    NEW = "new"
    """No worker has been called."""
    RESERVING = "reserving"
    """Reserve was called on the decode worker."""
    REFUSED = "refused"
    """The decode worker refused; it holds nothing for the attempt."""
    RESERVED = "reserved"
    """The decode worker returned a ticket."""
    LOCAL = "local"
    """The decode worker computes the prompt itself; all output comes from it."""
    PREFILLING = "prefilling"
    """Prefill was called; no first token yet."""
    OVERTAKEN = "overtaken"
    """The decode worker has the KV; the first token has not arrived yet."""
    TRANSFERRING = "transferring"
    """The first token has arrived; the KV is being transferred if there is a decode worker."""
    WRITTEN = "written"
    """The prefill worker has reported the last write; nothing from the decode worker yet."""
    DECODING = "decoding"
    """The decode worker has the KV; the transfer report is outstanding."""
    REPORTED = "reported"
    """The decode worker has the KV, and the prefill worker is done."""
    ENDED_AT_PREFILL = "ended at prefill"
    """The first token was also the last."""
    SETTLING = "settling"
    """The decode worker's last output was taken; the transfer report is outstanding."""
    FINISHED = "finished"
    """The decode worker's last output was taken; nothing is outstanding."""
    FAILED = "failed"
    """A worker failed the attempt, or was lost."""


class AttemptEvent(enum.StrEnum):
    """Inputs of the state machine."""

    ASK_DECODE = "ask decode"
    REFUSAL = "refusal"
    TICKET = "ticket"
    COMPUTES_LOCALLY = "computes locally"
    ASK_PREFILL = "ask prefill"
    FIRST_TOKEN = "first token"
    PREFILL_OVER = "prefill over"
    """The transfer report arrived, or the prefill worker failed when it was no longer needed."""
    DECODE_HAS_KV = "decode has kv"
    """The decode worker's first message: admission of the KV, or output."""
    LAST_TOKEN = "last token"
    """The first token was taken, and it ends the answer."""
    LAST_OUTPUT = "last output"
    """The decode worker's last output was taken."""
    FAILURE = "failure"


_S, _E = AttemptState, AttemptEvent
IN_FLIGHT = frozenset(
    {_S.LOCAL, _S.PREFILLING, _S.OVERTAKEN, _S.TRANSFERRING, _S.WRITTEN, _S.DECODING, _S.REPORTED}
)
"""States in which output is still expected, and in which a failure is possible."""

AWAITS_FIRST_TOKEN = frozenset({_S.PREFILLING, _S.OVERTAKEN})
"""States in which no output can be sent yet."""
AWAITS_DECODE = frozenset({_S.PREFILLING, _S.TRANSFERRING, _S.WRITTEN})
"""States in which the decode worker's first message tells that it has the KV."""
ONLY_DECODE_SENDS = frozenset({_S.LOCAL, _S.DECODING, _S.REPORTED})
"""States that output of the decode worker does not change, unless it is the last."""
AWAITS_REPORT = frozenset({_S.DECODING, _S.SETTLING})
"""States in which nothing but the transfer report is expected of the prefill worker."""
ENDED = frozenset({_S.ENDED_AT_PREFILL, _S.SETTLING, _S.FINISHED})
"""The last output was taken."""
PREFILL_NOT_NEEDED = ENDED | {_S.LOCAL, _S.WRITTEN, _S.DECODING, _S.REPORTED}
"""The first token has arrived and the KV is known to be on the decode worker, or prefill was never called."""
_DECODE_HOLDS_NOTHING = frozenset({_S.NEW, _S.REFUSED, _S.SETTLING, _S.FINISHED})

TRANSITIONS: Mapping[tuple[AttemptState, AttemptEvent], AttemptState] = MappingProxyType(
    {
        (_S.NEW, _E.ASK_DECODE): _S.RESERVING,
        (_S.NEW, _E.ASK_PREFILL): _S.PREFILLING,
        (_S.RESERVING, _E.REFUSAL): _S.REFUSED,
        (_S.RESERVING, _E.TICKET): _S.RESERVED,
        (_S.RESERVING, _E.COMPUTES_LOCALLY): _S.LOCAL,
        (_S.RESERVED, _E.ASK_PREFILL): _S.PREFILLING,
        (_S.PREFILLING, _E.FIRST_TOKEN): _S.TRANSFERRING,
        (_S.PREFILLING, _E.DECODE_HAS_KV): _S.OVERTAKEN,
        (_S.OVERTAKEN, _E.FIRST_TOKEN): _S.DECODING,
        (_S.TRANSFERRING, _E.PREFILL_OVER): _S.WRITTEN,
        (_S.TRANSFERRING, _E.DECODE_HAS_KV): _S.DECODING,
        (_S.WRITTEN, _E.DECODE_HAS_KV): _S.REPORTED,
        (_S.DECODING, _E.PREFILL_OVER): _S.REPORTED,
        (_S.TRANSFERRING, _E.LAST_TOKEN): _S.ENDED_AT_PREFILL,
        (_S.WRITTEN, _E.LAST_TOKEN): _S.ENDED_AT_PREFILL,
        (_S.DECODING, _E.LAST_TOKEN): _S.ENDED_AT_PREFILL,
        (_S.REPORTED, _E.LAST_TOKEN): _S.ENDED_AT_PREFILL,
        (_S.DECODING, _E.LAST_OUTPUT): _S.SETTLING,
        (_S.REPORTED, _E.LAST_OUTPUT): _S.FINISHED,
        (_S.LOCAL, _E.LAST_OUTPUT): _S.FINISHED,
        (_S.SETTLING, _E.PREFILL_OVER): _S.FINISHED,
        **{(state, _E.FAILURE): _S.FAILED for state in IN_FLIGHT},
    }
)

MAX_FRUITLESS_ATTEMPTS = 3
"""Attempts of one request that may fail in a row without a token. An answer that makes progress may lose any number of
workers; only its deadline bounds all its attempts."""


def fruitless_attempts(before: int, tokens: int, reason: str = "") -> int:
    """Failed attempts in a row without a token, after `before` of them and one more with `tokens` that ended for
    `reason`."""
    return 0 if tokens else before + (reason not in NO_FAILURES)


def after(state: AttemptState, event: AttemptEvent) -> AttemptState:
    """The state after an event. Raises SplitserveError (ILLEGAL_TRANSITION) for an event that the state cannot take."""
    next_state = TRANSITIONS.get((state, event))
    if next_state is None:
        message = f"an attempt that is {state.value} cannot take the event {event.value!r}"
        raise SplitserveError(message, reason="ILLEGAL_TRANSITION")
    return next_state


class DecodeRelease(enum.Enum):
    """What to tell the decode worker when an attempt is closed."""

    NOTHING = "nothing"
    """The worker holds nothing for the attempt."""
    WITH_WRITER = "with writer"
    """A prefill worker may write: quarantine the blocks."""
    NO_WRITER = "no writer"
    """The ticket was never handed out, or its last write was reported: nobody writes."""


def release_of(state: AttemptState, *, prefill_called: bool, written: bool) -> DecodeRelease:
    """What to tell the decode worker of an attempt that is closed in `state`.

    `prefill_called`: the ticket has left for a prefill worker. `written`: the transfer report has arrived.
    """
    if state in _DECODE_HOLDS_NOTHING:
        return DecodeRelease.NOTHING
    return DecodeRelease.WITH_WRITER if prefill_called and not written else DecodeRelease.NO_WRITER


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
    `local_prefill_tokens`: the most prompt tokens that the decode worker may compute itself. `targets`: the targets of
    the request from now on, for both workers. While `next_delta` waits, deltas from the decode worker go directly to
    `output`, as long as it is ready and the worker sends only tokens; these deltas count as sent and are not returned.
    """

    def __init__(
        self,
        events: RequestEvents,
        prefill: WorkerClient,
        decode: WorkerClient | None,
        background: BackgroundTasks,
        local_prefill_tokens: int = 0,
        targets: generation_pb2.ServiceTargets | None = None,
        output: Output | None = None,
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
        self._collector = OutputCollector(events.decoded)
        self._cancel_prefill: Callable[[], object] | None = None
        """Set once Prefill was called."""
        self._pending: deque[TokenDelta] = deque()
        self._decodes = False
        """Whether the decode worker has sent output. Its later outputs do not change the state, unless they end it."""
        self._written = False
        """Whether the transfer report has come."""
        self._output = output
        self._reader = None if output is None else partial(copy_context().run, self._pass_on)
        self._broken: Exception | None = None
        """The error of `_pass_on`; `next_delta` raises it."""
        self._failure: WorkerFailed | None = None
        """Raised once all output that arrived before it has been taken."""
        self._attached = ExitStack()
        for client in dict.fromkeys((prefill, decode)):
            if client is not None:
                attached = client.attached(self.attempt_id, self._collector, decodes=client is decode)
                self._attached.enter_context(attached)

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
            writer_agent_id=self._prefill.worker.agent_id,
            local_prefill_tokens=self._local_prefill_tokens,
            **self._fields(),
        )
        request.timeout.FromNanoseconds(int(left_s * 1e9))
        self._events.reserving(started_s)
        try:
            response = await self._decode.reserve(request, left_s)
        except (ResourceExhaustedError, FailedPreconditionError, InvalidArgumentError) as error:
            self._enter(AttemptEvent.REFUSAL)
            if isinstance(error, ResourceExhaustedError):
                self._events.reserve_ended(time.monotonic() - started_s)
            raise
        except (asyncio.CancelledError, DeadlineExceededError):
            self._events.reserve_ended(time.monotonic() - started_s)
            raise
        reserve_s = time.monotonic() - started_s
        report = self._record.report
        report.reserve_ms = reserve_s * 1e3
        # The wait of a local prefill is in its own figure, together with the wait for its first step.
        self._events.reserve_ended(reserve_s if response.HasField("ticket") else 0.0)
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
        asked = self._request
        request = prefill_pb2.PrefillRequest(
            ticket=self._ticket, pooling=asked.pooling, second_begins=asked.second_begins, **self._fields()
        )
        if request.targets.ttft_ms:
            request.targets.ttft_left_ms -= report.reserve_ms
        request.timeout.FromNanoseconds(int(left_s * 1e9))
        self._cancel_prefill = self._prefill.prefill(request, left_s, self._collector, self._background)

    async def next_delta(self) -> TokenDelta | None:
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
        if self.state is AttemptState.SETTLING:  # the answer is complete even without the report
            await wait_own_time(self._reported, HANDOFF_REPORT_WAIT_S)

    async def _reported(self) -> None:
        while self.state is AttemptState.SETTLING and self._failure is None:
            await self._collector.wait()
            self._accept(self._collector.take_all())

    def close(self) -> None:
        """Cancels the attempt on both workers unless they have finished with it. Never blocks."""
        self._attached.close()
        self._reader = None  # it refers to this attempt, which would form a reference cycle
        if self._cancel_prefill is not None:
            self._cancel_prefill()
        release = release_of(
            self.state, prefill_called=self._cancel_prefill is not None, written=self._written
        )
        if self._decode is not None and release is not DecodeRelease.NOTHING:
            no_writer, deadline_s = release is DecodeRelease.NO_WRITER, self._request.deadline_s
            self._background.start(self._decode.abort(self.attempt_id, no_writer, deadline_s))

    def _fields(self) -> dict[str, Any]:
        """What both workers are told of the request."""
        request, trace = self._request, self._record.trace
        caller, adapter = request.caller, request.model.adapter
        return {
            "request_id": self.attempt_id,
            "token_ids": self._token_ids,
            "prior_output_tokens": self._prior,
            "sampling": request.sampling,
            "stop": request.stop,
            "precedence": precedence_of(caller.tenant, caller.priority_class, request.priority),
            "cache_salt": caller.cache_salt,
            "trace": trace.to_proto() if trace is not None else None,
            "adapter": generation_pb2.AdapterRef(**adapter._asdict()) if adapter else None,
            "targets": self._targets,
        }

    def _enter(self, event: AttemptEvent) -> None:
        self.state = after(self.state, event)

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
        """Sends new output without waking the task that waits in `next_delta`. False: the task has to go on."""
        output, before, pending = self._output, self.state, self._pending
        assert output is not None
        try:
            self._accept(self._collector.take_all())
            while pending:
                is_plain = self.state is before and self._failure is None
                if not is_plain or self._events.state.first_token_s is None or not output.takes_now():
                    return False
                delta = _next_delta(pending)
                if delta.finish_reason:
                    pending.appendleft(delta)
                    return False
                self._events.sent(delta, time.monotonic())
                output.send_now(delta)
        except Exception as error:  # fails this request, not the stream that all requests of the worker share
            self._broken = error
            return False
        return self.state is before and self._failure is None

    def _accept(self, events: Iterable[WorkerEvent]) -> None:
        for event in events:
            match event:
                case TokenDelta():  # first because it is by far the most frequent
                    if not self._decodes:
                        self._decode_has_begun()
                    self._pending.append(event)
                case decode_pb2.SequenceOutput():
                    self._accept_output(event)
                case prefill_pb2.FirstToken():
                    self._enter(AttemptEvent.FIRST_TOKEN)
                    self._pending.appendleft(TokenDelta.of(event.delta))
                    self._events.prefilled(event)
                case prefill_pb2.HandoffDone():
                    self._enter(AttemptEvent.PREFILL_OVER)
                    self._written = True
                    self._events.transferred(event)
                case WorkerFailed():
                    self._accept_failure(event)

    def _accept_output(self, output: decode_pb2.SequenceOutput) -> None:
        if output.admitted:
            if self.state in AWAITS_DECODE:
                self._enter(AttemptEvent.DECODE_HAS_KV)
            return
        self._decode_has_begun()
        self._pending.append(TokenDelta.of(output.delta))
        if output.HasField("admit_ms"):
            self._events.decode_began(output.admit_ms)
        if output.HasField("local_prefill"):
            self._events.prefilled_locally(output.local_prefill)

    def _decode_has_begun(self) -> None:
        """The decode worker has sent tokens, so it has the KV."""
        if self.state in AWAITS_DECODE:
            self._enter(AttemptEvent.DECODE_HAS_KV)
        self._decodes = self.state in ONLY_DECODE_SENDS
        if self._decode is not None:
            self._record.report.decode_worker = self._decode.worker.worker_id

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


def _next_delta(pending: deque[TokenDelta]) -> TokenDelta:
    """The next delta, with those that follow it."""
    return pending.popleft() if len(pending) == 1 else take_merged(pending, MAX_MERGED_TOKENS)
