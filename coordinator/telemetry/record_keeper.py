"""Keeps the records of requests: running ones, the latest ones, and for longer slow and failed ones.

A request passes here at its arrival and its end, never per token. No other module of records is on its path.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from coordinator.request.inference_request import RequestTrace, names_of
from coordinator.request.state import AttemptRecord, RequestState
from coordinator.telemetry.request_record import AttemptFacts, RequestRecord
from coordinator.telemetry.request_stats import outcome_label, outcome_of
from coordinator.telemetry.spans import spans_of
from splitserve.config.coordinator import RecordsConfig
from splitserve.errors import (
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    SplitserveError,
)
from splitserve.logs import log_exception
from splitserve.tracing.context import SpanSink
from splitserve.v1 import prefill_pb2


@dataclass(frozen=True, slots=True)
class KvFlow:
    """The handoffs from a prefill to a decode worker within a window of time."""

    prefill_worker: str
    decode_worker: str
    handoffs: int
    written_bytes: int


class _Handoff(NamedTuple):
    """One handoff; `at_s` on the monotonic clock."""

    at_s: float
    prefill_worker: str
    decode_worker: str
    written_bytes: int


MAX_HANDOFFS = 4096
"""Number of latest handoffs that are kept for `kv_flows`."""
RUNNING, COMPLETED = "running", "completed"
MAX_MODEL_CHARACTERS = 128
"""Characters kept of the model name that the client wrote."""
REFUSALS = (InvalidArgumentError, NotFoundError, PermissionDeniedError, ResourceExhaustedError)

MAX_FAILURE_CHARACTERS = 300
"""Most characters of an error in an attempt's record."""
OnEnded = Callable[[RequestRecord, RequestState], None]
Kind = Literal["recent", "slow", "failed"]
"""Why a record is kept. Refused requests are among the failed ones."""


class RecordKeeper:
    """Keeps records. Each kind has its own bound, so that many records of one kind do not displace another.

    `spans` takes the spans of traced requests; None: spans are not exported. The functions in `on_ended` get the record
    and the state of each valid request, also when no records are kept.
    """

    def __init__(
        self,
        config: RecordsConfig,
        spans: SpanSink | None = None,
        on_ended: Sequence[OnEnded] = (),
    ) -> None:
        self._config, self._spans, self._on_ended = config, spans, on_ended
        self.enabled = config.enabled or spans is not None or bool(on_ended)
        """Whether records are needed."""
        self._running: dict[int, RequestState] = {}
        """By identity: two clients may choose the same id."""
        self._recent: deque[RequestRecord] = deque(maxlen=config.max_recent_records)
        self._slow: deque[RequestRecord] = deque(maxlen=config.max_notable_records)
        self._failed: deque[RequestRecord] = deque(maxlen=config.max_notable_records)
        self._refused: deque[RequestRecord] = deque(maxlen=config.max_notable_records)
        self._handoffs: deque[_Handoff] = deque(maxlen=MAX_HANDOFFS)

    def arrived(self, state: RequestState) -> None:
        """Remembers a running request."""
        self._running[id(state)] = state

    def transferred(self, state: RequestState, handoff: prefill_pb2.HandoffDone) -> None:
        """Remembers a handoff for `kv_flows`."""
        prefill, decode = state.attempt.prefill, state.attempt.decode
        if decode is not None and handoff.written_bytes:
            pair = prefill.worker_id, decode.worker_id
            self._handoffs.append(_Handoff(time.monotonic(), *pair, handoff.written_bytes))

    def ended(self, state: RequestState, error: BaseException | None) -> None:
        """Makes the record of a request that has ended, with this error unless it has completed."""
        self._running.pop(id(state), None)
        if state.completed:
            record = _record_of(state, COMPLETED, None)
        else:
            record = _record_of(state, outcome_label(outcome_of(error)), error)
        for listener in self._on_ended:
            try:
                listener(record, state)
            except Exception as failure:  # the others have to know, too
                log_exception("record.failed", failure)
        self._keep(record)

    def refused(
        self,
        request_id: str,
        model: str,
        tenant: str,
        received_s: float,
        error: BaseException,
        trace: RequestTrace | None = None,
    ) -> None:
        """Keeps the record of a request that ended early: it was invalid, over a quota, or no worker had registered."""
        if not self.enabled:
            return
        ended_ms = (time.monotonic() - received_s) * 1e3
        self._keep(
            RequestRecord(
                request_id,
                tenant,
                model[:MAX_MODEL_CHARACTERS],
                outcome_label(outcome_of(error)),
                time.time() - ended_ms / 1e3,
                ended_ms,
                failure=failure_text(error),
                is_refusal=isinstance(error, REFUSALS),
                trace=trace,
            )
        )

    def find(self, request_id: str, tenant: str | None) -> RequestRecord | None:
        """The latest record of that id, also of a running request; `tenant` None: of any tenant."""
        for name in names_of(request_id):
            for state in reversed(self._running.values()):
                if state.request.request_id == name and tenant in (None, state.request.caller.tenant):
                    return _record_of(state, RUNNING, None)
            kept = self.kept(("recent", "slow", "failed"), tenant)
            if found := next((record for record in kept if record.request_id == name), None):
                return found
        return None

    def kept(self, kinds: Iterable[Kind], tenant: str | None) -> list[RequestRecord]:
        """The records of these kinds, the latest first; `tenant` None: of all tenants."""
        rings = {"recent": [self._recent], "slow": [self._slow], "failed": [self._failed, self._refused]}
        records = {
            id(record): record
            for kind in kinds
            for ring in rings[kind]
            for record in reversed(ring)
            if tenant in (None, record.tenant)
        }
        return sorted(records.values(), key=lambda record: record.received_unix_s, reverse=True)

    def kv_flows(self, window_s: float) -> list[KvFlow]:
        """The handoffs of the last `window_s` seconds by pair of workers, the largest sums of bytes first."""
        since_s = time.monotonic() - window_s
        sums: dict[tuple[str, str], tuple[int, int]] = {}
        for handoff in reversed(self._handoffs):
            if handoff.at_s < since_s:
                break
            pair = handoff.prefill_worker, handoff.decode_worker
            handoffs, written_bytes = sums.get(pair, (0, 0))
            sums[pair] = handoffs + 1, written_bytes + handoff.written_bytes
        flows = [KvFlow(*pair, *totals) for pair, totals in sums.items()]
        return sorted(flows, key=lambda flow: (-flow.written_bytes, flow.prefill_worker, flow.decode_worker))

    def why_kept(self, record: RequestRecord) -> list[str]:
        """Why a record is kept longer than the latest ones, one line a reason."""
        return [*self._why_slow(record), *_why_failed(record)]

    def _keep(self, record: RequestRecord) -> None:
        if self._spans is not None and record.trace is not None and record.trace.exported:
            self._spans(spans_of(record, record.trace))
        if record.is_refusal:
            self._refused.append(record)
            return
        self._recent.append(record)
        if self._why_slow(record):
            self._slow.append(record)
        if _why_failed(record):
            self._failed.append(record)

    def _why_slow(self, record: RequestRecord) -> list[str]:
        ttft_ms, limit_ms = record.first_token_ms, self._config.slow_ttft_s * 1e3
        reasons = []
        if record.outcome != RUNNING and (record.ended_ms if ttft_ms is None else ttft_ms) >= limit_ms:
            what = (
                f"no first token in {record.ended_ms:.0f} ms" if ttft_ms is None else f"TTFT {ttft_ms:.0f} ms"
            )
            reasons.append(f"slow: {what}, from {limit_ms:.0f} ms on")
        gap_ms, limit_ms = record.longest_gap_ms, self._config.slow_gap_s * 1e3
        if gap_ms >= limit_ms:
            position = record.longest_gap_position
            reasons.append(f"slow: {gap_ms:.0f} ms before token {position}, from {limit_ms:.0f} ms on")
        return reasons


def _why_failed(record: RequestRecord) -> list[str]:
    if record.is_refusal:
        return [f"refused: {record.failure}"]
    if record.outcome in ("failed", "timed_out", "rejected"):
        return [f"{record.outcome}: {record.failure}"]
    failed = next((attempt for attempt in record.attempts if attempt.failure), None)
    return [f"resumed: {failed.failed_worker}: {failed.failure}"] if failed is not None else []


def failure_text(error: BaseException | None) -> str:
    """Reason and message of an error, for a record; empty if the client has left. An invalid field is named instead of
    the message, which may repeat the field's content."""
    match error:
        case None | asyncio.CancelledError():
            return ""
        case InvalidArgumentError():
            return f"{error.reason}: {error.field or 'the request'}"[:MAX_FAILURE_CHARACTERS]
        case SplitserveError():
            return f"{error.reason}: {error.message}"[:MAX_FAILURE_CHARACTERS]
    return type(error).__name__


def _record_of(state: RequestState, outcome: str, error: BaseException | None) -> RequestRecord:
    request, now = state.request, time.monotonic()
    received_s = request.received_s
    past = state.past
    if state.current is not None and state.current.ended_s is None:
        past = [*past, state.current]
    return RequestRecord(
        request_id=request.request_id,
        tenant=request.caller.tenant,
        model=request.public_name or request.model.name,
        outcome=outcome,
        received_unix_s=time.time() - (now - received_s),
        ended_ms=(now - received_s) * 1e3,
        failure=failure_text(error),
        is_refusal=isinstance(error, REFUSALS),
        served_model=request.model.name,
        prompt_tokens=len(request.prompt),
        resumed_tokens=len(request.resumed),
        output_tokens=state.sent_tokens,
        block_size_tokens=request.model.block_size_tokens,
        tokenized_ms=max(0.0, (state.tokenized_s - received_s) * 1e3),
        admitted_ms=_since(received_s, state.admitted_s),
        waits=state.waits,
        predicted_ttft_s=state.predicted_ttft_s,
        first_token_ms=_since(received_s, state.first_token_s),
        tpot_ms=state.tpot_s * 1e3,
        longest_gap_ms=state.longest_gap_s * 1e3,
        longest_gap_position=state.longest_gap_position,
        attempts=[_facts(attempt, received_s, now) for attempt in past],
        attempt_count=state.attempts,
        trace=request.trace,
    )


def _facts(attempt: AttemptRecord, received_s: float, now: float) -> AttemptFacts:
    return AttemptFacts(
        number=attempt.number,
        prefill_worker=attempt.prefill.worker_id,
        decode_worker=attempt.decode.worker_id if attempt.decode is not None else "",
        is_local=attempt.is_local,
        candidates=attempt.candidates,
        # A running attempt goes on with its own.
        report=attempt.report if attempt.ended_s is not None else dataclasses.replace(attempt.report),
        began_ms=(attempt.began_s - received_s) * 1e3,
        reserving_ms=_since(received_s, attempt.reserving_s),
        prefilling_ms=_since(received_s, attempt.prefilling_s),
        prefilled_ms=_since(received_s, attempt.prefilled_s),
        decode_began_ms=_since(received_s, attempt.decode_began_s),
        ended_ms=((now if attempt.ended_s is None else attempt.ended_s) - received_s) * 1e3,
        first_position=attempt.first_position,
        failed_worker=attempt.suspect[0] if attempt.failure else "",
        failure=attempt.failure,
        trace=attempt.trace,
    )


def _since(received_s: float, moment_s: float | None) -> float | None:
    return None if moment_s is None else (moment_s - received_s) * 1e3
