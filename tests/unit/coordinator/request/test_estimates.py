"""Estimates: output length by session, tenant and model, in bounded memory; the cached prefix."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.request.inference_request import Caller, InferenceRequest
from coordinator.request.state import DEFAULT_OUTPUT_TOKENS, Estimates, RequestState
from coordinator.request_events import RequestEvents
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Model
from splitserve.v1 import generation_pb2, prefill_pb2, registry_pb2
from tests.support.clients.inference_requests import inference_request
from tests.support.cluster.registrations import registration

BLOCK = 16


def request_of(
    tenant: str = "a", session: str = "", max_tokens: int = 1000, prompt: int = 1
) -> InferenceRequest:
    model = Model("m", "m", 4096, 100, (BLOCK,))
    return inference_request(prompt, max_tokens, model=model, caller=Caller(tenant), session_id=session)


@pytest.fixture
def registry() -> Registry:
    return Registry(1.0)


@pytest.fixture
def estimates(registry: Registry) -> Estimates:
    return Estimates(registry)


def events_of(estimates: Estimates, request: InferenceRequest) -> RequestEvents:
    return RequestEvents(RequestState(request, estimates.of(request, 0.0)))


def complete(estimates: Estimates, request: InferenceRequest, output_tokens: int) -> None:
    events = events_of(estimates, request)
    events.sent(generation_pb2.OutputDelta(token_ids=[1] * output_tokens), 0.0)
    estimates.learn(events.state)


def expected(estimates: Estimates, request: InferenceRequest) -> float:
    return estimates.of(request, 0.0).output_tokens


def test_the_narrowest_known_key_counts(estimates: Estimates) -> None:
    assert expected(estimates, request_of()) == DEFAULT_OUTPUT_TOKENS
    complete(estimates, request_of("a"), 10)
    complete(estimates, request_of("b", session="s"), 400)
    assert expected(estimates, request_of("a")) == 10
    assert expected(estimates, request_of("b", session="s")) == 400
    assert expected(estimates, request_of("b")) == 400
    assert expected(estimates, request_of("c", session="s")) == 205


def test_no_more_than_was_asked_for(estimates: Estimates) -> None:
    assert expected(estimates, request_of(max_tokens=5)) == 5


def test_the_table_is_bounded_and_keeps_what_is_used(registry: Registry) -> None:
    estimates = Estimates(registry, max_length_keys=10)
    for number in range(1, 101):
        complete(estimates, request_of("a", session=f"s{number}"), number)
    assert expected(estimates, request_of("a", session="s100")) == 100
    assert expected(estimates, request_of("a", session="s1")) == expected(estimates, request_of("a"))


def prefilled(estimates: Estimates, prompt: int, cached: int, attempts: int = 1) -> None:
    events = events_of(estimates, request_of(prompt=prompt))
    worker = Registry(1.0).register(registration("p", registry_pb2.ROLE_PREFILL), 0.0)
    for _ in range(attempts):
        events.routed(worker, None, 0, 0.0)
        events.prefilled(prefill_pb2.FirstToken(cached_tokens=cached, compute_ms=1))
        events.attempt_ended()
    estimates.learn(events.state)


def test_without_an_index_the_cached_share_is_learned(estimates: Estimates) -> None:
    request = request_of(prompt=100)
    assert estimates.of(request, 0.0).uncached_tokens == 100
    prefilled(estimates, 10, 5)
    assert estimates.of(request, 0.0).uncached_tokens == pytest.approx(50)
    prefilled(estimates, 10, 10, attempts=2)
    assert estimates.of(request, 0.0).uncached_tokens == pytest.approx(50), (
        "a retry finds what the first left"
    )
    assert estimates.of(request, 0.0).hits is None


def join(registry: Registry, name: str, pool: registry_pb2.Role.ValueType, keys: list[int]) -> None:
    """A worker that holds the blocks of these keys."""
    worker = registry.register(registration(name, pool), 0.0)
    report = registry_pb2.ReportRequest(worker_id=worker.worker_id, epoch=worker.epoch)
    report.cache_events.CopyFrom(registry_pb2.CacheEvents(sequence=1, cleared=True))
    registry.report(report, 0.0)
    registry.prefixes.expect([worker.key], keys, 0.0)


def test_the_index_gives_what_prefill_workers_hold(registry: Registry, estimates: Estimates) -> None:
    keys = list(range(1, 7))
    request = request_of(prompt=6 * BLOCK)
    model = replace(request.model, block_size_tokens=BLOCK)
    request = replace(request, model=model, block_keys=tuple(keys))
    prefilled(estimates, 10, 5)
    assert estimates.of(request, 0.0).uncached_tokens == 3 * BLOCK, "no prefill worker has reported its cache"
    join(registry, "decode", registry_pb2.ROLE_DECODE, keys)
    assert estimates.of(request, 0.0).uncached_tokens == 3 * BLOCK
    join(registry, "few", registry_pb2.ROLE_PREFILL, keys[:2])
    assert estimates.of(request, 0.0).uncached_tokens == 4 * BLOCK
    assert estimates.of(request, 0.0).hits
    join(registry, "all", registry_pb2.ROLE_PREFILL, keys)
    assert estimates.of(request, 0.0).uncached_tokens == 1, "the last token is always computed"
    registry.drop(next(w.key for w in registry.snapshot().workers if w.worker_id == "all"), "gone")
    assert estimates.of(request, 0.0).uncached_tokens == 4 * BLOCK
