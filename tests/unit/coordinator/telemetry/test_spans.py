"""A record as spans: times, parents, links, attributes and errors; nothing for what is not traced."""

from __future__ import annotations

import dataclasses
import time

import pytest

from coordinator.request.inference_request import RequestTrace
from coordinator.request.state import AttemptReport
from coordinator.telemetry.record_keeper import RecordKeeper
from coordinator.telemetry.request_record import AttemptFacts, RequestRecord, phases_of
from coordinator.telemetry.spans import spans_of
from splitserve.config.coordinator import RecordsConfig
from splitserve.errors import InvalidArgumentError
from splitserve.tracing.context import FinishedSpan, TraceContext

RECEIVED_S = 1_700_000_000.0
FAILURE = "WORKER_LOST: d0 is gone"


def report() -> AttemptReport:
    return AttemptReport(
        "p0", "d0", "nixl", queue_ms=13.0, reserve_ms=4.0, prefill_ms=20.0, transfer_ms=1.5, decode_admit_ms=0.5,
        transfer_bytes=3000, cached_prompt_tokens=16, worker_queue_ms=3.0,
    )  # fmt: skip


def attempt(number: int, trace: RequestTrace, *, failed: bool = False) -> AttemptFacts:
    at_ms = 5.0 if number == 1 else 45.0
    return AttemptFacts(
        number, "p0", "d0", False, (), report(), at_ms, at_ms + 1, at_ms + 5, None if failed else at_ms + 35,
        None if failed else at_ms + 40, at_ms + (30 if failed else 65), 0, "d0" if failed else "",
        FAILURE if failed else "", trace.attempt(),
    )  # fmt: skip


def record(trace: RequestTrace, *, failures: int = 0) -> RequestRecord:
    attempts = [attempt(n + 1, trace, failed=n < failures) for n in range(failures + 1)]
    began_ms = attempts[-1].began_ms
    return RequestRecord(
        "r", "alice", "public", "completed", RECEIVED_S, began_ms + 66, served_model="words", prompt_tokens=40,
        output_tokens=3, block_size_tokens=16, tokenized_ms=2.0, admitted_ms=4.0, first_token_ms=began_ms + 36,
        attempts=attempts, attempt_count=len(attempts), trace=trace,
    )  # fmt: skip


def traced(parent: str = "") -> RequestTrace:
    return RequestTrace(TraceContext.new(sampled=True), parent, "chat")


def ms(span: FinishedSpan) -> tuple[float, float]:
    return (span.start_s - RECEIVED_S) * 1e3, (span.end_s - RECEIVED_S) * 1e3


def test_each_phase_is_a_span_with_its_times() -> None:
    trace = traced("00f067aa0ba902b7")
    told = record(trace)
    root, *rest = spans_of(told, trace)
    assert (root.name, root.kind, root.context, root.parent_id) == (
        "chat words", "server", trace.context, "00f067aa0ba902b7",
    )  # fmt: skip
    assert ms(root) == pytest.approx((0, 71), abs=0.01)
    phases = {phase.name: (phase.start_ms, phase.end_ms) for phase in phases_of(told)}
    spans = {span.name: ms(span) for span in rest if span.name != "attempt"}
    assert spans.keys() == phases.keys()
    for name, times in phases.items():
        assert spans[name] == pytest.approx(times, abs=0.01), name
    ids = {span.context.span_id for span in (root, *rest)}
    assert len(ids) == 1 + len(rest)
    assert {span.context.trace_id for span in rest} == {trace.context.trace_id}


def test_phases_hang_under_their_attempt() -> None:
    trace = traced()
    told = record(trace)
    root, *rest = spans_of(told, trace)
    whole = next(span for span in rest if span.name == "attempt")
    assert whole.context == told.attempts[0].trace
    assert (whole.parent_id, whole.kind, whole.links) == (root.context.span_id, "client", ())
    assert ms(whole) == pytest.approx((4, 70), abs=0.01)
    parents = {span.name: span.parent_id for span in rest}
    for name in ("route", "reserve", "prefill_queue", "prefill_compute", "deliver", "transfer", "decode"):
        assert parents[name] == whole.context.span_id, name
    for name in ("tokenize", "admission", "end"):
        assert parents[name] == root.context.span_id, name


def test_attributes_follow_the_conventions() -> None:
    trace = traced()
    root, *rest = spans_of(record(trace), trace)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "splitserve",
        "gen_ai.request.model": "public",
        "gen_ai.response.model": "words",
        "gen_ai.response.id": "r",
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 3,
        "splitserve.tenant": "alice",
    }
    assert root.attributes.items() >= expected.items()
    whole = next(span for span in rest if span.name == "attempt")
    assert whole.attributes["splitserve.prefill_worker"] == "p0"
    assert whole.attributes["splitserve.written_bytes"] == 3000
    assert next(span for span in rest if span.name == "reserve").attributes == {"splitserve.worker": "d0"}


def test_a_new_attempt_links_to_the_one_before() -> None:
    trace = traced()
    told = record(trace, failures=2)
    attempts = [span for span in spans_of(told, trace) if span.name == "attempt"]
    assert [span.links for span in attempts] == [(), (told.attempts[0].trace,), (told.attempts[1].trace,)]
    assert [span.error for span in attempts] == [FAILURE, FAILURE, ""]


def test_a_resumed_request_links_to_where_it_began() -> None:
    earlier = TraceContext.new(sampled=True)
    trace = dataclasses.replace(traced(), resumed=earlier)
    assert spans_of(record(trace), trace)[0].links == (earlier,)


def test_a_refused_request_is_one_span_with_its_error() -> None:
    sent: list[FinishedSpan] = []
    keeper = RecordKeeper(RecordsConfig(max_recent_records=0, max_notable_records=0), sent.extend)
    assert keeper.enabled
    wrong = InvalidArgumentError("text is wrong: a secret", field="prompt.text")
    keeper.refused("r", "some model", "alice", time.monotonic() - 0.05, wrong, traced())
    root, *rest = sent
    assert (root.name, root.error) == ("chat", "INVALID_ARGUMENT: prompt.text")
    assert root.attributes["gen_ai.request.model"] == "some model"
    assert (root.end_s - root.start_s) * 1e3 == pytest.approx(50, abs=20)
    assert [span.name for span in rest] == ["tokenize"]
    assert "secret" not in str(sent)


def test_what_is_not_sampled_is_not_exported() -> None:
    sent: list[FinishedSpan] = []
    keeper = RecordKeeper(RecordsConfig(), sent.extend)
    error = InvalidArgumentError("wrong")
    unsampled = RequestTrace(TraceContext.new(sampled=False))
    for trace in (None, unsampled):
        keeper.refused("r", "m", "alice", time.monotonic(), error, trace)
    assert not sent
    found = keeper.find("r", None)
    assert found is not None
    assert found.trace == unsampled
