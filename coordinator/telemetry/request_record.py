"""The record of one request, without a token of prompt or answer; its phases and its cost. Pure.

`RecordKeeper` makes the record once, from the request's state; phases, decisions, spans and messages derive from it.
All times are in milliseconds since the request was received; None: not reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.request.inference_request import RequestTrace
from coordinator.request.state import NO_WAITS, AttemptReport, Candidate, Waits
from splitserve.generation.kv_blocks import blocks_for
from splitserve.tracing.context import TraceContext


@dataclass(frozen=True, slots=True)
class AttemptFacts:
    """One attempt."""

    number: int
    prefill_worker: str
    decode_worker: str
    """Empty if the answer needed no decode worker."""
    is_local: bool
    """Whether the decode worker computed the prompt itself."""
    candidates: tuple[Candidate, ...]
    """Of each pool the chosen worker, then the next best ones; empty if they are not known."""
    report: AttemptReport
    began_ms: float
    reserving_ms: float | None
    prefilling_ms: float | None
    prefilled_ms: float | None
    decode_began_ms: float | None
    ended_ms: float
    """For a running attempt: when the record was made."""
    first_position: int
    """Output tokens of earlier attempts."""
    failed_worker: str
    failure: str
    """Reason and message; empty unless the attempt failed."""
    trace: TraceContext | None = None
    """The attempt's span."""

    @property
    def decoding_ms(self) -> float | None:
        """When its second token could be computed."""
        return self.prefilled_ms if self.is_local else self.decode_began_ms


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, ended or running."""

    request_id: str
    tenant: str
    model: str
    """The model name that the client used."""
    outcome: str
    """A label of `splitserve_requests_ended_total`, or "running"."""
    received_unix_s: float
    ended_ms: float
    """For a running request: when the record was made."""
    failure: str = ""
    """Reason and message of the error that ended the request."""
    is_refusal: bool = False
    """Whether the request was refused, as invalid or for want of room."""
    served_model: str = ""
    """Empty for an invalid request; the later fields are missing then, too."""
    prompt_tokens: int = 0
    resumed_tokens: int = 0
    """Output tokens that another coordinator had sent."""
    output_tokens: int = 0
    block_size_tokens: int = 0
    """Tokens per KV block; 0: unknown."""
    tokenized_ms: float | None = None
    admitted_ms: float | None = None
    waits: Waits = NO_WAITS
    predicted_ttft_s: float = 0.0
    first_token_ms: float | None = None
    tpot_ms: float = 0.0
    longest_gap_ms: float = 0.0
    longest_gap_position: int = 0
    attempts: Sequence[AttemptFacts] = ()
    """At most MAX_PAST_ATTEMPTS, and a running one."""
    attempt_count: int = 0
    trace: RequestTrace | None = None

    @property
    def first_attempt(self) -> AttemptFacts | None:
        """The attempt with the first token."""
        if self.first_token_ms is None:
            return None
        return next((attempt for attempt in self.attempts if attempt.ended_ms >= self.first_token_ms), None)


@dataclass(frozen=True, slots=True)
class CostOfRequest:
    """Resources that a request used in all recorded attempts. Times in seconds."""

    prefill_s: float
    decode_s: float
    kv_block_s: float
    written_bytes: int

    def __add__(self, other: CostOfRequest) -> CostOfRequest:
        return CostOfRequest(
            self.prefill_s + other.prefill_s,
            self.decode_s + other.decode_s,
            self.kv_block_s + other.kv_block_s,
            self.written_bytes + other.written_bytes,
        )


NO_COST = CostOfRequest(0.0, 0.0, 0.0, 0)


def cost_of(record: RequestRecord) -> CostOfRequest:
    """The cost of a request.

    KV blocks count on the prefill worker while the prompt is computed and written. On the decode worker they count from
    the reservation to the end, growing evenly from the prompt's blocks to those of the whole context.
    """
    prefill_s = decode_s = block_s = 0.0
    written_bytes, size = 0, max(1, record.block_size_tokens)
    for attempt in record.attempts:
        report = attempt.report
        prompt = record.prompt_tokens + record.resumed_tokens + attempt.first_position
        blocks = blocks_for(prompt, size)
        prefill_s += report.prefill_ms / 1e3
        written_bytes += report.transfer_bytes
        if not attempt.is_local:
            block_s += blocks * (report.prefill_ms + report.transfer_ms) / 1e3
        if attempt.decoding_ms is not None:
            decode_s += (attempt.ended_ms - attempt.decoding_ms) / 1e3
        reserved_ms = attempt.prefilling_ms if not attempt.is_local else attempt.reserving_ms
        if attempt.decode_worker and reserved_ms is not None:
            whole = record.prompt_tokens + record.resumed_tokens + record.output_tokens
            mean = (blocks + max(blocks, blocks_for(whole, size))) / 2
            block_s += mean * (attempt.ended_ms - reserved_ms) / 1e3
    return CostOfRequest(prefill_s, decode_s, block_s, written_bytes)


LEAST_MS = 1e-6
"""Shorter phases are left out."""


@dataclass(frozen=True, slots=True)
class PhaseOfRequest:
    """A part of a request's time. Milliseconds since receipt."""

    name: str
    start_ms: float
    end_ms: float
    worker: str = ""
    """Empty: the coordinator itself."""
    attempt: int = 0
    """The attempt's number from 1; 0 before the first attempt."""


def phases_of(record: RequestRecord) -> list[PhaseOfRequest]:
    """The phases of a request in order of their beginning."""
    row = _Row(record.ended_ms)
    row.until("tokenize", record.tokenized_ms)
    row.until("admission", record.admitted_ms)
    first = record.first_attempt
    after: list[PhaseOfRequest] = []
    for attempt in record.attempts:
        delivered_ms = record.first_token_ms if attempt is first else attempt.prefilled_ms
        _add_attempt(row, attempt, delivered_ms)
        if delivered_ms is not None:
            after += _after_first_token(attempt, delivered_ms)
            row.at_ms = attempt.ended_ms
    row.until("end" if record.attempts else "route", record.ended_ms)
    return sorted([*row.phases, *after], key=lambda phase: phase.start_ms)


class _Row:
    """Consecutive phases."""

    def __init__(self, ended_ms: float) -> None:
        self.phases: list[PhaseOfRequest] = []
        self.at_ms = 0.0
        self._ended_ms = ended_ms

    def until(self, name: str, end_ms: float | None, worker: str = "", attempt: int = 0) -> None:
        """Adds the next phase, up to `end_ms` (None: the end of the request), unless it has no length."""
        end_ms = self._ended_ms if end_ms is None else end_ms
        if end_ms - self.at_ms > LEAST_MS:
            self.phases.append(PhaseOfRequest(name, self.at_ms, end_ms, worker, attempt))
            self.at_ms = end_ms

    def lasting(self, name: str, took_ms: float, most_ms: float, worker: str, attempt: int) -> None:
        """Adds the next phase, by its duration, but not beyond `most_ms`."""
        self.until(name, min(self.at_ms + took_ms, most_ms), worker, attempt)


def _add_attempt(row: _Row, attempt: AttemptFacts, delivered_ms: float | None) -> None:
    """The phases of an attempt up to its first token, or to its end without one."""
    report, number = attempt.report, attempt.number
    prompt_sent_ms = attempt.prefilling_ms
    if attempt.is_local:
        # The decode worker computes from the reservation on, and answers it when it has begun.
        prompt_sent_ms = attempt.reserving_ms
        row.until("route", prompt_sent_ms, attempt=number)
    elif prompt_sent_ms is not None:
        row.until("route", prompt_sent_ms - report.reserve_ms, attempt=number)
        row.until("reserve", prompt_sent_ms, attempt.decode_worker, number)
    elif attempt.reserving_ms is not None:
        row.until("route", attempt.reserving_ms, attempt=number)
        row.until("reserve", attempt.ended_ms, attempt.decode_worker, number)
    if prompt_sent_ms is None:
        row.until("route", attempt.ended_ms, attempt=number)
        return
    worker = attempt.decode_worker if attempt.is_local else attempt.prefill_worker
    if delivered_ms is None:
        row.until("prefill", attempt.ended_ms, worker, number)
        return
    row.lasting("prefill_queue", report.worker_queue_ms, delivered_ms, worker, number)
    row.lasting("prefill_compute", report.prefill_ms, delivered_ms, worker, number)
    row.until("deliver", delivered_ms, attempt=number)


def _after_first_token(attempt: AttemptFacts, delivered_ms: float) -> list[PhaseOfRequest]:
    """The handoff and decoding of an attempt. Phases that may begin before the first token are shown from it on."""
    report, number = attempt.report, attempt.number
    phases = []
    if report.transfer_bytes:
        end_ms = delivered_ms + report.transfer_ms
        phases.append(PhaseOfRequest("transfer", delivered_ms, end_ms, attempt.prefill_worker, number))
    began_ms = attempt.decoding_ms
    if began_ms is not None:
        began_ms = max(began_ms, delivered_ms)
        if not attempt.is_local:
            start_ms = max(delivered_ms, began_ms - report.decode_admit_ms)
            end_ms = start_ms + report.decode_admit_ms
            phases.append(PhaseOfRequest("decode_admit", start_ms, end_ms, attempt.decode_worker, number))
        end_ms = max(began_ms, attempt.ended_ms)
        phases.append(PhaseOfRequest("decode", began_ms, end_ms, attempt.decode_worker, number))
    return phases
