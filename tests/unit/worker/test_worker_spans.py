"""What prefill and decode workers export of a traced request: which spans, when, under which parent; once each."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from splitserve.errors import SplitserveError
from splitserve.tracing.context import FinishedSpan, TraceContext
from tests.support.engine.connector_pair import COORDINATOR, ConnectorPair, ticket_of

PROMPT = [n % 250 for n in range(100)]
ROUND_S = 0.010


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> ConnectorPair:
    made = ConnectorPair()
    monkeypatch.setattr(time, "monotonic", made.clock)
    return made


def rounds(pair: ConnectorPair, count: int) -> None:
    for _ in range(count):
        pair.clock.now += ROUND_S
        pair.round()


def names(spans: list[FinishedSpan]) -> list[str]:
    return [span.name for span in spans]


def assert_nested(spans: list[FinishedSpan], trace: TraceContext) -> None:
    whole, *parts = spans
    assert (whole.kind, whole.parent_id, whole.context.trace_id) == ("server", trace.span_id, trace.trace_id)
    for part in parts:
        assert (part.kind, part.parent_id) == ("internal", whole.context.span_id)
        assert whole.start_s <= part.start_s <= part.end_s <= whole.end_s
    assert len({span.context.span_id for span in spans}) == len(spans)


def test_a_handoff_is_seen_from_both_sides(pair: ConnectorPair) -> None:
    trace = TraceContext.new(sampled=True)
    ticket = ticket_of(pair.reserve("a", PROMPT, trace=trace))
    pair.clock.now += 0.5
    pair.start("a", PROMPT, ticket, trace=trace)
    rounds(pair, 40)
    assert len(pair.tokens("a")) == 12
    assert names(pair.prefill_spans) == ["prefill", "queue", "compute", "write", "write", "write", "write"]
    assert names(pair.decode_spans) == ["decode", "reserve", "receive", "admit", "generate"]
    for spans in (pair.prefill_spans, pair.decode_spans):
        assert_nested(spans, trace)
    written = [span.attributes["splitserve.blocks"] for span in pair.prefill_spans if span.name == "write"]
    assert written == [4, 4, 4, 1]
    assert pair.prefill_spans[0].attributes["splitserve.chunks"] == 4
    parts = pair.decode_spans[1:]
    assert all(one.end_s == pytest.approx(after.start_s) for one, after in pairwise(parts))
    received = next(span for span in parts if span.name == "receive")
    assert received.end_s - received.start_s == pytest.approx(0.5 + 4 * ROUND_S, abs=1.5 * ROUND_S)
    assert not any(span.error for span in (*pair.prefill_spans, *pair.decode_spans))
    pair.assert_empty()


def test_a_prompt_computed_on_the_decode_worker(pair: ConnectorPair) -> None:
    trace = TraceContext.new(sampled=True)
    pair.reserve("a", PROMPT, local_prefill_tokens=len(PROMPT), trace=trace)
    rounds(pair, 40)
    assert names(pair.decode_spans) == ["decode", "reserve", "queue", "generate"]
    assert pair.decode_spans[0].attributes["splitserve.local_prefill"] is True
    assert_nested(pair.decode_spans, trace)
    pair.assert_empty()


@pytest.mark.parametrize("rounds_before", range(8))
def test_an_aborted_request_is_exported_once_on_each_side(pair: ConnectorPair, rounds_before: int) -> None:
    trace = TraceContext.new(sampled=True)
    pair.start("a", PROMPT, ticket_of(pair.reserve("a", PROMPT, trace=trace)), trace=trace)
    rounds(pair, rounds_before)
    pair.producer.end(pair.prefill, "a", None, pair.clock.now)
    pair.consumer.abort(pair.decode, f"{COORDINATOR}/a", COORDINATOR, False, pair.clock.now)
    rounds(pair, 20)
    assert names(pair.prefill_spans).count("prefill") == 1
    assert names(pair.decode_spans).count("decode") == 1
    for spans in (pair.prefill_spans, pair.decode_spans):
        assert_nested(spans, trace)
    pair.assert_empty()


def test_a_failure_is_told_once(pair: ConnectorPair, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = TraceContext.new(sampled=True)

    def broken(*arguments: object) -> None:
        raise SplitserveError("no admission today", reason="BROKEN")

    monkeypatch.setattr(pair.decode, "admit", broken)
    pair.start("a", PROMPT, ticket_of(pair.reserve("a", PROMPT, trace=trace)), trace=trace)
    rounds(pair, 20)
    wholes = [span for span in pair.decode_spans if span.name == "decode"]
    assert [span.error for span in wholes] == ["BROKEN: no admission today"]


@pytest.mark.parametrize("trace", [None, TraceContext.new(sampled=False)])
def test_what_is_not_sampled_is_not_exported(pair: ConnectorPair, trace: TraceContext | None) -> None:
    pair.start("a", PROMPT, ticket_of(pair.reserve("a", PROMPT, trace=trace)), trace=trace)
    rounds(pair, 40)
    assert len(pair.tokens("a")) == 12
    assert not pair.prefill_spans
    assert not pair.decode_spans
