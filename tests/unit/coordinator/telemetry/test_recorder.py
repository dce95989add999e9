"""What requests leave in the statistics: demand at arrival, phases, cold samples, outcomes."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest

from coordinator.admission.queue import Held
from coordinator.request.inference_request import ANYONE, InferenceRequest
from coordinator.request.state import (
    DEFAULT_OUTPUT_TOKENS,
    Estimates,
    RequestEstimate,
    RequestState,
    Stage,
    Waits,
)
from coordinator.request_events import COLD_REQUESTS, RequestEvents
from coordinator.telemetry.request_stats import (
    PHASES,
    REFUSALS_KEPT_S,
    ModelStats,
    RefusedRequests,
    RequestStats,
    summed,
)
from coordinator.workers.registration import checked_worker
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker
from splitserve.errors import DeadlineExceededError, ResourceExhaustedError, UnavailableError
from splitserve.v1 import generation_pb2, prefill_pb2, registry_pb2, scaling_pb2
from tests.support.clients.inference_requests import inference_request
from tests.support.cluster.registrations import registration

COMPLETED, CANCELLED = scaling_pb2.OUTCOME_COMPLETED, scaling_pb2.OUTCOME_CANCELLED


def some_worker(pool: registry_pb2.Role.ValueType, served: int = COLD_REQUESTS) -> Worker:
    return replace(checked_worker(registration("w", pool)), total_requests=served)


PREFILL, DECODE = some_worker(registry_pb2.ROLE_PREFILL), some_worker(registry_pb2.ROLE_DECODE)
COLD_PREFILL = some_worker(registry_pb2.ROLE_PREFILL, COLD_REQUESTS - 1)
COLD_DECODE = some_worker(registry_pb2.ROLE_DECODE, 0)


def asked(prompt: int = 10, max_tokens: int = 5, **fields: Any) -> InferenceRequest:
    return inference_request(prompt, max_tokens, **fields)


def first(cached: int = 0) -> prefill_pb2.FirstToken:
    return prefill_pb2.FirstToken(cached_tokens=cached, queue_ms=30, compute_ms=70)


def events_of(
    request: InferenceRequest | None = None, estimate: RequestEstimate | None = None
) -> RequestEvents:
    request = request or asked()
    estimate = estimate or RequestEstimate(request.max_tokens, len(request.prompt))
    return RequestEvents(RequestState(request, estimate))


def route(events: RequestEvents, prefill: Worker = PREFILL, decode: Worker = DECODE) -> None:
    events.routed(prefill, decode, 0, time.monotonic())


def run(
    stats: RequestStats, prefill: Worker = PREFILL, decode: Worker = DECODE, attempts: int = 1
) -> RequestEvents:
    """A whole request of two tokens."""
    with events_of() as events:
        events.arrived(stats)
        for _ in range(attempts):
            route(events, prefill, decode)
            events.reserving(time.monotonic())
            events.reserve_ended(0.2)
            events.prefilling(time.monotonic())
        events.prefilled(first())
        events.transferred(prefill_pb2.HandoffDone(written_bytes=1, transfer_ms=5))
        events.decode_began(2.0)
        for position in range(2):
            delta = generation_pb2.OutputDelta(first_position=position, token_ids=[1])
            events.sent(delta, events.state.request.received_s + 0.1 + position * 0.02)
        events.completed()
    return events


@pytest.fixture
def stats() -> RequestStats:
    return RequestStats()


def test_admission_waits_count_in_the_phase_of_the_pool(stats: RequestStats) -> None:
    with events_of() as events:
        events.arrived(stats)
        events.state.waits = Waits(prefill_s=100.0, decode_s=200.0)
        route(events)
        events.reserve_ended(0.1)
        events.prefilled(first())
    phases = stats.of("words").phases
    assert phases[scaling_pb2.PHASE_PREFILL].warm.sum_s > 100
    assert phases[scaling_pb2.PHASE_PREFILL_QUEUE].warm.sum_s > 100
    assert phases[scaling_pb2.PHASE_RESERVE].warm.sum_s > 200
    assert phases[scaling_pb2.PHASE_ADMIT].warm.sum_s == 0


def test_queued_requests_count_for_the_pool_without_capacity() -> None:
    stats = RequestStats().of("m")
    stats.in_stage[Stage.ADMITTING], stats.prefilling_tokens = 5, 10.0
    stats.held = Held(3, 300.0, "prefill")
    assert (stats.stages[Stage.ADMITTING], stats.stages[Stage.PREFILLING]) == (2, 3)
    assert stats.backlog_tokens == 310
    stats.held = Held(3, 300.0, "decode")
    assert (stats.stages[Stage.ADMITTING], stats.stages[Stage.RESERVING]) == (2, 3)
    assert stats.backlog_tokens == 10


def samples(stats: RequestStats, phase: scaling_pb2.Phase.ValueType) -> tuple[int, int]:
    """Warm and cold ones."""
    counts = stats.of("words").phases[phase]
    return counts.warm.total, counts.cold.total


def test_every_phase_is_stamped_once() -> None:
    stats = RequestStats(long_prompt_tokens=10)
    run(stats)
    phases = stats.of("words").phases
    local = scaling_pb2.PHASE_LOCAL_PREFILL
    assert {phase: counts.warm.total for phase, counts in phases.items()} == {
        phase: int(phase != local) for phase in phases
    }
    assert phases[scaling_pb2.PHASE_PREFILL].warm.sum_s == pytest.approx(0.1)
    assert phases[scaling_pb2.PHASE_RESERVE].warm.sum_s == pytest.approx(0.2)
    assert phases[scaling_pb2.PHASE_TTFT].warm.sum_s == pytest.approx(0.1)
    assert phases[scaling_pb2.PHASE_TPOT].warm.sum_s == pytest.approx(0.02)
    assert stats.of("words").outcomes[COMPLETED] == 1
    assert set(stats.of("words").in_stage.values()) == {0}


def test_long_prompts_count_apart_too() -> None:
    long, short = RequestStats(long_prompt_tokens=10), RequestStats(long_prompt_tokens=11)
    run(long)
    run(short, decode=COLD_DECODE)
    assert (samples(long, scaling_pb2.PHASE_TTFT), samples(long, scaling_pb2.PHASE_TTFT_LONG)) == (
        (1, 0),
        (1, 0),
    )
    assert (samples(short, scaling_pb2.PHASE_TTFT), samples(short, scaling_pb2.PHASE_TTFT_LONG)) == (
        (0, 1),
        (0, 0),
    )
    total = summed([long.of("words"), short.of("words")])
    assert (total.short_ttft.warm.total, total.short_ttft.cold.total) == (0, 1)
    assert total.phases[scaling_pb2.PHASE_TTFT_LONG].warm.total == 1


def test_samples_of_a_new_worker_are_cold_where_they_depend_on_it(stats: RequestStats) -> None:
    run(stats, prefill=COLD_PREFILL)
    assert samples(stats, scaling_pb2.PHASE_PREFILL) == (0, 1)
    assert samples(stats, scaling_pb2.PHASE_TTFT) == (0, 1)
    assert samples(stats, scaling_pb2.PHASE_TPOT) == (1, 0)
    run(stats, decode=COLD_DECODE)
    assert samples(stats, scaling_pb2.PHASE_PREFILL) == (1, 1)
    assert samples(stats, scaling_pb2.PHASE_TTFT) == (0, 2)
    assert samples(stats, scaling_pb2.PHASE_TPOT) == (1, 1)
    assert samples(stats, scaling_pb2.PHASE_RESERVE) == (1, 1)


def test_retried_requests_measure_a_fault(stats: RequestStats) -> None:
    run(stats, attempts=2)
    assert samples(stats, scaling_pb2.PHASE_TTFT) == (0, 1)
    assert samples(stats, scaling_pb2.PHASE_TPOT) == (0, 1)
    assert stats.of("words").requests == 1


def test_demand_is_counted_at_arrival_by_what_was_learned() -> None:
    stats, estimates = RequestStats(), Estimates(Registry(1.0))

    def arriving(prompt: int, max_tokens: int) -> RequestEvents:
        request = inference_request(prompt, max_tokens)
        return events_of(request, estimate=estimates.of(request, 0.0))

    for _ in range(3):
        with arriving(prompt=100, max_tokens=1000) as events:
            events.arrived(stats)
            route(events)
            events.prefilled(first(cached=50))
        estimates.of_model("words").cached_share.add(0.5)
    model = stats.of("words")
    assert (model.requests, model.prompt_tokens) == (3, 300)
    assert model.uncached_tokens == pytest.approx(100 + 50 + 50)
    assert model.output_tokens == pytest.approx(3 * DEFAULT_OUTPUT_TOKENS)
    estimates.learn(run(stats).state)
    assert estimates.of_model("words").output_tokens.value == 2
    with arriving(prompt=1, max_tokens=1) as events:
        events.arrived(stats)
    assert model.output_tokens == pytest.approx(3 * DEFAULT_OUTPUT_TOKENS + 5 + 1), "max_tokens at most"


def test_what_decode_workers_compute_is_counted_once(stats: RequestStats) -> None:

    def computed_by(decode: Worker, attempts: int = 1, *, relieves_prefill: bool = False) -> None:
        with events_of(asked(prompt=40)) as events:
            events.state.relieves_prefill = relieves_prefill
            events.arrived(stats)
            for _ in range(attempts):
                route(events, PREFILL, decode)
                events.prefilling_locally()

    computed_by(DECODE)
    computed_by(DECODE, attempts=2)
    computed_by(some_worker(registry_pb2.ROLE_BOTH))  # it is in the prefill pool, too
    computed_by(DECODE, relieves_prefill=True)  # it is demand of a pool that is too small
    run(stats)
    model = stats.of("words")
    assert (model.local_requests, model.local_tokens) == (2, 80)
    assert (model.requests, model.uncached_tokens) == (5, 170)


def test_the_backlog_is_what_prefill_has_before_it(stats: RequestStats) -> None:
    with events_of(asked(prompt=40)) as events:
        events.arrived(stats)
        route(events)
        events.reserving(time.monotonic())
        model = stats.of("words")
        assert model.prefilling_tokens == 0, "what waits for KV blocks is not the prefill pool's"
        events.prefilling(time.monotonic())
        assert (model.in_stage[Stage.PREFILLING], model.prefilling_tokens) == (1, 40)
        events.prefilled(first())
        assert (model.in_stage[Stage.DECODING], model.prefilling_tokens) == (1, 0)
    assert set(model.in_stage.values()) == {0}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (asyncio.CancelledError(), CANCELLED),
        (DeadlineExceededError("late"), scaling_pb2.OUTCOME_TIMED_OUT),
        (ResourceExhaustedError("full"), scaling_pb2.OUTCOME_REJECTED),
        (UnavailableError("gone"), scaling_pb2.OUTCOME_FAILED),
    ],
)
def test_outcomes_are_counted_by_kind(
    error: BaseException, outcome: scaling_pb2.Outcome.ValueType, stats: RequestStats
) -> None:

    def failing() -> None:
        with events_of() as events:
            events.arrived(stats)
            route(events)
            raise error

    with pytest.raises(type(error)):
        failing()
    assert stats.of("words").outcomes[outcome] == 1
    late = outcome == scaling_pb2.OUTCOME_TIMED_OUT
    assert samples(stats, scaling_pb2.PHASE_TTFT) == (int(late), 0), "who waited in vain has waited, too"


def test_clients_cannot_create_series(stats: RequestStats) -> None:
    with pytest.raises(UnavailableError), events_of():
        raise UnavailableError("before it had arrived")
    stats.count_rejected("made up")
    assert stats.models() == {}
    stats.of("words")
    stats.count_rejected("")
    stats.count_rejected("words")
    stats.count_rejected("made up")
    assert stats.models()["words"].outcomes[scaling_pb2.OUTCOME_REJECTED] == 2
    assert list(stats.models()) == ["words"]


def refused_once(stats: RequestStats, *requests: InferenceRequest) -> None:
    """These requests arrive together, and all of them are refused."""
    with suppress(ResourceExhaustedError), ExitStack() as stack:
        for request in requests:
            stack.enter_context(events_of(request)).arrived(stats)
        raise ResourceExhaustedError("full", reason="QUEUE_FULL", retry_after_s=1.0)


def test_a_refused_request_that_comes_again_is_no_new_demand(stats: RequestStats) -> None:
    for _ in range(5):
        refused_once(stats, asked(prompt=10))
    with events_of(asked(prompt=10)) as events:
        events.arrived(stats)
    of = stats.of("words")
    assert (of.requests, of.prompt_tokens, of.outcomes[scaling_pb2.OUTCOME_REJECTED]) == (1, 10, 5)


def test_two_refused_requests_with_one_prompt_are_two(stats: RequestStats) -> None:
    refused_once(stats, asked(), asked())
    for _ in range(3):
        with events_of() as events:
            events.arrived(stats)
    assert stats.of("words").requests == 3, "two that repeat, and one more"


def test_what_others_ask_for_is_demand(stats: RequestStats) -> None:
    refused_once(stats, asked())
    elsewhere = asked(caller=replace(ANYONE, tenant="other"))
    for request in (
        asked(prompt=11),
        asked(max_tokens=6),
        elsewhere,
    ):
        with events_of(request) as events:
            events.arrived(stats)
    assert stats.of("words").requests == 4


def test_refusals_are_forgotten_in_time_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = RefusedRequests()
    refused.add("a", 0.0)
    assert not refused.take("a", REFUSALS_KEPT_S + 1)
    monkeypatch.setattr("coordinator.telemetry.request_stats.MAX_REFUSALS_KEPT", 2)
    for prompt in (1, 2, 3):
        refused.add(prompt, 0.0)
    assert [refused.take(prompt, 1.0) for prompt in (1, 2, 3)] == [False, True, True]


def test_a_model_and_its_adapters_as_one() -> None:
    base, red = ModelStats(held=Held(2, 30.0, "prefill")), ModelStats()
    assert summed([base]) is base
    for number, stats in enumerate((base, red), start=1):
        stats.arrived(10 * number, 5.0, 7.0)
        stats.local_requests, stats.local_tokens = number, 4.0
        stats.phases[PHASES[0]].add(0.1 * number, cold=False)
        stats.outcomes[COMPLETED] += number
        stats.in_stage[Stage.DECODING] += 1
        stats.prefilling_tokens += number
    total = summed([base, red])
    assert (total.requests, total.prompt_tokens, total.uncached_tokens, total.output_tokens) == (
        2,
        30,
        10,
        14,
    )
    assert (total.local_requests, total.local_tokens) == (3, 8)
    assert total.phases[PHASES[0]].warm.total == 2
    assert total.phases[PHASES[0]].warm.sum_s == pytest.approx(0.3)
    assert total.outcomes[COMPLETED] == 3
    assert total.in_stage[Stage.DECODING] == 2
    assert (total.prefilling_tokens, total.held.requests) == (3, 2)
    assert base.requests == 1
