"""A request's record as spans: one for the request, one an attempt, one a phase. Pure but for new span ids.

The phases are those that `splitserve explain` shows. Names and attributes follow OpenTelemetry's conventions for
generative AI as far as these go; none of them holds text of a prompt or an answer.
"""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.request.inference_request import RequestTrace
from coordinator.telemetry.request_record import AttemptFacts, PhaseOfRequest, RequestRecord, phases_of
from splitserve.tracing.context import Attributes, FinishedSpan, TraceContext

PROVIDER = "splitserve"


def spans_of(record: RequestRecord, trace: RequestTrace) -> list[FinishedSpan]:
    """The spans of an ended request, its own first."""
    root = _request_span(record, trace)
    spans, phases = [root], phases_of(record)
    before: TraceContext | None = None
    for attempt in record.attempts:
        own = attempt.trace or trace.attempt()
        spans += _attempt_spans(record, root, attempt, own, before, phases)
        before = own
    numbers = {attempt.number for attempt in record.attempts}
    spans += (_phase_span(root, record, phase) for phase in phases if phase.attempt not in numbers)
    return spans


def _request_span(record: RequestRecord, trace: RequestTrace) -> FinishedSpan:
    served = record.served_model
    start_s = record.received_unix_s
    return FinishedSpan(
        # The name that a client wrote would make an unlimited number of span names.
        f"{trace.operation} {served}" if served else trace.operation,
        trace.context,
        trace.parent_id,
        start_s,
        start_s + record.ended_ms / 1e3,
        dict(_request_attributes(record, trace)),
        kind="server",
        links=(trace.resumed,) if trace.resumed is not None else (),
        error=record.failure,
    )


def _request_attributes(
    record: RequestRecord, trace: RequestTrace
) -> Iterator[tuple[str, str | int | float | bool]]:
    yield "gen_ai.operation.name", trace.operation
    yield "gen_ai.provider.name", PROVIDER
    yield "gen_ai.response.id", record.request_id
    if record.model:
        yield "gen_ai.request.model", record.model
    yield "splitserve.tenant", record.tenant
    yield "splitserve.outcome", record.outcome
    if not record.served_model:
        return
    yield "gen_ai.response.model", record.served_model
    yield "gen_ai.usage.input_tokens", record.prompt_tokens
    yield "gen_ai.usage.output_tokens", record.output_tokens
    yield "splitserve.attempts", record.attempt_count
    if record.first_token_ms is not None:
        yield "splitserve.ttft_ms", record.first_token_ms
        yield "splitserve.tpot_ms", record.tpot_ms


def _attempt_spans(
    record: RequestRecord,
    root: FinishedSpan,
    attempt: AttemptFacts,
    own: TraceContext,
    before: TraceContext | None,
    phases: list[PhaseOfRequest],
) -> Iterator[FinishedSpan]:
    """An attempt's span from its routing to its end, and the spans of its phases. It links to the attempt before."""
    mine = [phase for phase in phases if phase.attempt == attempt.number]
    start_ms = min([attempt.began_ms, *(phase.start_ms for phase in mine)])
    end_ms = max([attempt.ended_ms, *(phase.end_ms for phase in mine)])
    whole = FinishedSpan(
        "attempt",
        own,
        root.context.span_id,
        record.received_unix_s + start_ms / 1e3,
        record.received_unix_s + end_ms / 1e3,
        _attempt_attributes(attempt),
        kind="client",
        links=(before,) if before is not None else (),
        error=attempt.failure,
    )
    yield whole
    yield from (_phase_span(whole, record, phase) for phase in mine)


def _attempt_attributes(attempt: AttemptFacts) -> Attributes:
    report = attempt.report
    return {
        "splitserve.attempt": attempt.number,
        "splitserve.prefill_worker": attempt.prefill_worker,
        "splitserve.decode_worker": attempt.decode_worker,
        "splitserve.local_prefill": attempt.is_local,
        "splitserve.cached_tokens": report.cached_prompt_tokens,
        "splitserve.decode_cached_tokens": report.decode_cached_tokens,
        "splitserve.transport": report.transport,
        "splitserve.written_bytes": report.transfer_bytes,
    }


def _phase_span(parent: FinishedSpan, record: RequestRecord, phase: PhaseOfRequest) -> FinishedSpan:
    attributes = {"splitserve.worker": phase.worker} if phase.worker else None
    start_s, end_s = (record.received_unix_s + ms / 1e3 for ms in (phase.start_ms, phase.end_ms))
    return parent.part(phase.name, start_s, end_s, attributes)
