"""Which requests are traced: the client's decision, the drawn share, and the bound on what clients ask for."""

from __future__ import annotations

import pytest

from coordinator.entrypoints.inference_api import TraceSampler
from splitserve.config.tracing import RequestTracingConfig
from splitserve.tracing.context import TraceContext

ENDPOINT = "http://localhost:4317"


def sampler(**settings: float) -> TraceSampler:
    return TraceSampler(RequestTracingConfig(endpoint=ENDPOINT, **settings))


def client(*, sampled: bool = True) -> TraceContext:
    return TraceContext.new(sampled=sampled)


def test_a_share_of_the_requests_is_drawn() -> None:
    tenth = sampler(sample_ratio=0.1)
    traces = [tenth.begin(None, "chat", 0.0) for _ in range(20_000)]
    assert 1_700 < sum(trace is not None and trace.exported for trace in traces) < 2_300
    assert len({trace.context.trace_id for trace in traces if trace is not None}) == 20_000
    for ratio, expected in ((0.0, False), (1.0, True)):
        trace = sampler(sample_ratio=ratio).begin(None, "chat", 0.0)
        assert trace is not None
        assert (trace.exported, trace.parent_id) == (expected, "")


@pytest.mark.parametrize("sampled", [True, False])
def test_the_client_decides(sampled: bool) -> None:
    parent = client(sampled=sampled)
    trace = sampler(sample_ratio=0.0 if sampled else 1.0).begin(parent, "chat", 5.0)
    assert trace is not None
    assert trace.exported is sampled
    assert (trace.context.trace_id, trace.parent_id) == (parent.trace_id, parent.span_id)
    assert trace.context.span_id != parent.span_id


def test_clients_get_no_more_than_the_bound() -> None:
    bounded = sampler(sample_ratio=0.0, max_client_traces_per_s=5)

    def exported(now: float) -> int:
        traces = [bounded.begin(client(), "chat", now) for _ in range(100)]
        return sum(trace is not None and trace.exported for trace in traces)

    assert (exported(1.0), exported(1.0), exported(1.4), exported(100.0)) == (5, 0, 2, 5)


@pytest.mark.parametrize(("ratio", "expected"), [(0.0, False), (1.0, True)])
def test_beyond_the_bound_it_is_drawn(ratio: float, expected: bool) -> None:
    trace = sampler(sample_ratio=ratio, max_client_traces_per_s=0).begin(client(), "chat", 1.0)
    assert trace is not None
    assert trace.exported is expected


def test_without_an_endpoint_a_clients_context_is_passed_on_unsampled() -> None:
    off = TraceSampler(RequestTracingConfig())
    assert not off.enabled
    assert off.begin(None, "chat", 0.0) is None
    parent = client()
    trace = off.begin(parent, "chat", 0.0)
    assert trace is not None
    assert (trace.exported, trace.context.trace_id) == (False, parent.trace_id)
    assert trace.attempt() == trace.context
    assert not trace.context.sampled


def test_a_resumed_answer_goes_on_in_its_trace() -> None:
    earlier = client()
    trace = sampler().begin(None, "chat", 1.0, earlier)
    assert trace is not None
    assert (trace.context.trace_id, trace.parent_id, trace.resumed) == (
        earlier.trace_id,
        earlier.span_id,
        earlier,
    )
    mine = client()
    trace = sampler().begin(mine, "chat", 1.0, earlier)
    assert trace is not None
    assert (trace.context.trace_id, trace.resumed) == (mine.trace_id, earlier)
