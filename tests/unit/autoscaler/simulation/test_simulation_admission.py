"""The coordinator's admission in the simulated cluster."""

from __future__ import annotations

import pytest

from autoscaler.plan import Memory, PoolPlan, ScalingPlan
from autoscaler.simulation.engine_model import EngineModel
from autoscaler.simulation.outcome import Outcome
from autoscaler.simulation.scenario import Scenario
from autoscaler.simulation.simulator import Simulation, static_replicas
from autoscaler.simulation.traces.synthetic import TraceShape, synthetic
from autoscaler.simulation.traces.trace import Trace, TraceRequest
from autoscaler.snapshot import Snapshot
from splitserve.config.coordinator import AdmissionConfig
from splitserve.roles import PoolName
from tests.support.scaling.engine_models import changed, engine_model

ENGINE = engine_model(prefill_token_s=1e-3, step_s=0.01, sequence_s=1e-3, max_step_tokens=512)
QUEUE = AdmissionConfig()
COUNTS: dict[PoolName, int] = {"prefill": 1, "decode": 1}


def run(
    trace: Trace,
    engine: EngineModel = ENGINE,
    admission: AdmissionConfig | None = QUEUE,
    interval_s: float = 0.05,
) -> tuple[Outcome, list[Snapshot]]:
    """One replica a pool, and snapshots."""
    seen: list[Snapshot] = []

    def decide(memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        seen.append(snapshot)
        return ScalingPlan(PoolPlan(1), PoolPlan(1)), memory

    scenario = Scenario(trace, engine, initial={"prefill": 1, "decode": 1}, admission=admission)
    return Simulation(scenario, decide, interval_s=interval_s).run(), seen


def burst(count: int, prompt_tokens: int, output_tokens: int) -> Trace:
    return Trace("burst", [TraceRequest(0.01 * n, prompt_tokens, output_tokens) for n in range(count)])


def test_with_capacity_nobody_waits() -> None:
    trace = synthetic(TraceShape("constant", rate=0.5, duration_s=120.0, prompt_tokens=200, output_tokens=30))
    admitted, _ = run(trace, interval_s=15.0)
    at_once, _ = run(trace, admission=None, interval_s=15.0)
    assert admitted.attainment == at_once.attainment
    assert admitted.phases()["ttft"]["p50"] == pytest.approx(at_once.phases()["ttft"]["p50"], rel=0.05)


def test_a_crowd_waits_at_the_coordinator_and_loses_nothing_by_it() -> None:
    trace = burst(40, 400, 4)
    admitted, seen = run(trace)
    at_once, _ = run(trace, admission=None)
    assert not admitted.failed_requests
    assert all(request.finished_s is not None for request in admitted.requests)
    assert admitted.duration_s == at_once.duration_s
    # The work that is sent ahead to a worker is bounded; the rest waits, and scaling sees it all the same.
    assert admitted.phases()["prefill_queue"]["p99"] < 1.0 < at_once.phases()["prefill_queue"]["p99"]
    assert max(snapshot.prefill.backlog_tokens for snapshot in seen) > 20 * 400
    assert max(request.ttft_s or 0.0 for request in admitted.requests) == pytest.approx(16.0, rel=0.1)


def test_who_would_miss_the_target_is_refused() -> None:
    trace = burst(40, 400, 4)
    outcome, _ = run(trace, admission=AdmissionConfig(ttft_slo_s=4.0, on_late="refuse"))
    served = [request for request in outcome.requests if not request.failed]
    assert 5 <= len(served) < 20
    assert outcome.failed_requests == len(trace.requests) - len(served)
    assert all((request.ttft_s or 0.0) < 5.0 for request in served)


def test_who_waits_for_kv_blocks_shows_as_demand_for_decode() -> None:
    engine = changed(ENGINE, kv_capacity_tokens=8_192, prefill_token_s=1e-5)
    outcome, seen = run(burst(30, 1000, 200), engine)
    assert not outcome.failed_requests
    assert max(snapshot.decode.waiting_reservations for snapshot in seen) > 10


def test_chats_find_the_room_that_decode_has() -> None:
    """A prompt of 200 tokens takes 13 blocks of 16, not one of 512, and admission sends as many as fit."""
    engine = changed(ENGINE, kv_capacity_tokens=20_000, prefill_token_s=1e-5, sequence_s=1e-5)
    admitted, seen = run(burst(60, 200, 60), engine)
    assert not any(snapshot.decode.waiting_reservations for snapshot in seen)
    assert all((request.reserved_s or 0.0) - request.arrival_s < 0.1 for request in admitted.requests)


def worst_s(seen: list[Snapshot]) -> float:
    """The highest 90th percentile of the time for which the prefill pool answers."""
    found = [one.prefill.latency for one in seen]
    return max((one.percentile(90) or 0.0 for one in found if one is not None), default=0.0)


def test_a_wait_at_the_coordinator_counts_for_the_pool_that_lacked_capacity() -> None:
    last = [TraceRequest(60.0, 10, 1)]  # decisions stop with it
    _, crowd = run(Trace("crowd", [*burst(40, 400, 4).requests, *last]), interval_s=0.5)
    assert worst_s(crowd) > 5.0
    engine = changed(ENGINE, kv_capacity_tokens=8_192, prefill_token_s=1e-5)
    _, full = run(Trace("full", [*burst(30, 1000, 200).requests, *last]), engine, interval_s=0.5)
    assert worst_s(full) < 1.0


def test_nobody_waits_for_prefill_workers_where_decode_workers_compute_all_prompts() -> None:
    scenario = Scenario(burst(20, 400, 4), ENGINE, initial=COUNTS, admission=QUEUE, local_prefill="always")
    outcome = Simulation(scenario, static_replicas(COUNTS)).run()
    assert all(request.held_s == 0.0 for request in outcome.requests)
