"""Formulas of the baselines, the clairvoyant bound, and the default policy at constant load and after a burst."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autoscaler.plan import Decide
from autoscaler.policies.policy_file import PoolPolicy
from autoscaler.simulation.engine_model import preset
from autoscaler.simulation.scenario import Scenario, Slo
from autoscaler.simulation.simulator import NO_BOUNDS, Simulation, run_policy
from autoscaler.simulation.traces.synthetic import TraceShape, synthetic
from autoscaler.simulation.traces.trace import TraceRequest
from autoscaler.snapshot import ArrivalBucket, DecodeSignals, PrefillSignals, Replica, ReplicaState, Snapshot
from bench.autoscaling.attainment import actions_after, burst, constant_at_a_boundary
from bench.autoscaling.cases import default_policy
from bench.autoscaling.opponents.baselines import BASELINES, STATIC, RuleInputs, baseline, mean_work_s
from bench.autoscaling.opponents.clairvoyant import GRID_S, clairvoyant_bound, needs, schedule, scheduled
from bench.autoscaling.opponents.dynamo_baselines import SlaKnobs, dynamo_sla, dynamo_thresholds
from bench.autoscaling.opponents.hpa_baselines import (
    decode_rate,
    hpa_formula,
    hpa_p95_latency,
    hpa_utilization,
    keda_rate,
    llm_d_slo,
    token_backlog,
)
from bench.autoscaling.opponents.runs import run_baseline, static_peak
from bench.autoscaling.opponents.static_search import best_static
from bench.autoscaling.opponents.trend_filter import TrendFilter
from splitserve.histograms import Histogram
from splitserve.roles import POOLS
from tests.support.scaling.engine_models import changed

ENGINE = preset("h100-8b")
SLO = Slo(2.0, 0.1)
COLD_START_S = 60.0
"""The bench tries one of 180 s too."""


def replicas(pool: str, ready: int, starting: int = 0) -> tuple[Replica, ...]:
    states = [ReplicaState.READY] * ready + [ReplicaState.STARTING] * starting
    return tuple(Replica(f"{pool}-{n}", state, 0.0, 1.0) for n, state in enumerate(states))


def snapshot(prefill: int = 4, decode: int = 4, starting: int = 0, **changed: object) -> Snapshot:
    prefill_changes = {
        k: v for k, v in changed.items() if k in ("backlog_tokens", "ttft", "waiting_requests")
    }
    decode_changes = {
        k: v for k, v in changed.items() if k in ("context_tokens", "tpot", "waiting_reservations")
    }
    return Snapshot(
        now_s=100.0,
        prefill=replace(PrefillSignals(replicas("p", prefill, starting)), **prefill_changes),  # type: ignore[arg-type]
        decode=replace(DecodeSignals(replicas("d", decode)), **decode_changes),  # type: ignore[arg-type]
        arrivals=(ArrivalBucket(90.0, 5.0, 10, 10_000, 10_000, 1000.0),),
    )


def desired(decide: Decide, seen: Snapshot) -> tuple[int, int]:
    plan, _ = decide(None, seen)
    return plan.prefill.desired, plan.decode.desired


@pytest.mark.parametrize(
    ("ready", "value", "wanted"),
    [(4, 4.0, 8), (4, 2.1, 4), (4, 1.9, 4), (4, 0.5, 1), (3, 2.4, 4), (4, None, None)],
)
def test_hpa_formula(ready: int, value: float | None, wanted: int | None) -> None:
    assert hpa_formula(ready, value, 2.0) == wanted


def test_hpa_on_latency() -> None:
    decide = hpa_p95_latency(SLO, NO_BOUNDS)
    slow, quick = Histogram.of([4.0] * 100), Histogram.of([0.101] * 100)
    assert desired(decide, snapshot(ttft=slow, tpot=quick)) == (8, 4)
    assert desired(decide, snapshot()) == (4, 4)  # nothing measured, nothing changed
    assert desired(decide, snapshot(starting=8, ttft=slow)) == (12, 4)  # what starts is counted
    assert (
        desired(hpa_p95_latency(SLO, dict.fromkeys(POOLS, PoolPolicy(max_replicas=6))), snapshot(ttft=slow))[
            0
        ]
        == 6
    )


def test_hpa_scales_down_after_five_minutes() -> None:
    decide, memory, counts = hpa_p95_latency(SLO, NO_BOUNDS), None, []
    quick = snapshot(ttft=Histogram.of([0.2] * 100))
    busy = snapshot(ttft=Histogram.of([2.0] * 100))
    for step in range(30):
        seen = replace(busy if step == 0 else quick, now_s=15.0 * step)
        plan, memory = decide(memory, seen)
        counts.append(plan.prefill.desired)
    assert counts[:20] == [4] * 20
    assert counts[-1] == 1


def test_token_backlog_in_seconds_of_prefill() -> None:
    peak = ENGINE.max_step_tokens / ENGINE.prompt_s(ENGINE.max_step_tokens)
    threshold_s = 0.65 * (SLO.ttft_s - 1000 / peak)
    decide = token_backlog(SLO, ENGINE, NO_BOUNDS)
    backlog = int(7.5 * threshold_s * peak)
    kv = int(4.8 * ENGINE.kv_capacity_tokens * 0.8)
    assert desired(decide, snapshot(backlog_tokens=backlog, context_tokens=kv)) == (8, 5)


def test_dynamo_thresholds() -> None:
    decide = dynamo_thresholds(ENGINE, NO_BOUNDS)
    full = int(4 * 1.05 * ENGINE.kv_capacity_tokens)
    half = int(4 * 0.8 * ENGINE.kv_capacity_tokens)
    waiting = {"backlog_tokens": 4 * ENGINE.context_tokens, "waiting_requests": 4}
    assert desired(decide, snapshot(context_tokens=full, **waiting)) == (5, 5)
    assert desired(
        decide, snapshot(context_tokens=half, backlog_tokens=ENGINE.context_tokens, waiting_requests=4)
    ) == (4, 4)
    queued = 4 * ENGINE.kv_capacity_tokens * 0.3 / 1000  # each with a prompt of 1,000 tokens
    assert desired(decide, snapshot(context_tokens=half, waiting_reservations=int(queued))) == (3, 5)
    assert desired(decide, snapshot()) == (3, 3)
    assert desired(decide, snapshot(starting=1, **waiting)) == (5, 3)  # a change is on its way
    assert desired(decide, snapshot(prefill=1, decode=1)) == (1, 1)


def test_keda_divides_the_request_rate_by_what_a_replica_carries() -> None:
    decide = keda_rate({"prefill": 0.5, "decode": 1.0}, NO_BOUNDS, use=0.5, window_s=10.0)
    # 10 requests in 10 s; replicas carry 1 and 0.5 a second.
    assert desired(decide, snapshot(prefill=4, decode=4)) == (
        4,
        4,
    )  # down only after the stabilization window
    assert desired(decide, snapshot(prefill=1, decode=1)) == (1, 2)
    decide = keda_rate({"prefill": 5.0, "decode": 1.05}, NO_BOUNDS, use=0.5, window_s=10.0)
    assert desired(decide, snapshot(prefill=4, decode=3)) == (8, 3)  # 10 are wanted; an HPA doubles at most
    assert desired(decide, replace(snapshot(), arrivals=())) == (4, 4)


def test_hpa_on_utilization_is_the_kind_target() -> None:
    decide = hpa_utilization(NO_BOUNDS, target=0.5)
    full = int(4 * 0.8 * ENGINE.kv_capacity_tokens)
    seen = snapshot(context_tokens=full)
    seen = replace(seen, decode=replace(seen.decode, kv_capacity_tokens=ENGINE.kv_capacity_tokens))
    assert desired(decide, seen) == (4, 7)


def test_what_a_decode_replica_carries() -> None:
    engine = changed(ENGINE, step_s=0.01, sequence_s=1e-3, context_token_s=0.0, max_running_requests=512)
    assert decode_rate(engine, 1000, 100, 0.03) == pytest.approx(20 / (100 * 0.03))
    assert decode_rate(engine, 1000, 100, 0.001) == pytest.approx(1 / (100 * 0.011))
    full = changed(engine, kv_capacity_tokens=10_500)
    assert decode_rate(full, 1000, 100, 0.03) == pytest.approx(10 / (100 * 0.02))


def test_llm_d_keeps_mean_latencies() -> None:
    decide = llm_d_slo(SLO, ENGINE, NO_BOUNDS, share=0.1)
    prompt_s = ENGINE.prompt_s(1000)
    seen = snapshot(prefill=1, decode=1)
    wanted = 1.0 / ((1 - prompt_s / 0.2) / prompt_s)  # 10 requests in 10 s
    assert desired(decide, seen)[0] == max(1, math.ceil(wanted))
    busy = replace(seen, arrivals=(ArrivalBucket(90.0, 5.0, 200, 200_000, 200_000, 20_000.0),))
    assert desired(decide, busy)[0] >= 2


def test_dynamo_with_targets_by_predicted_throughput() -> None:
    decide = dynamo_sla(SLO, ENGINE, NO_BOUNDS, SlaKnobs(interval_s=10.0))
    busy = replace(snapshot(), arrivals=(ArrivalBucket(90.0, 5.0, 500, 500_000, 500_000, 500_000.0),))
    first, memory = decide(None, replace(busy, now_s=90.0))
    # As found, until the first interval is over.
    assert (first.prefill.desired, first.decode.desired) == (4, 4)
    plan, _ = decide(memory, busy)
    assert plan.prefill.desired == math.ceil(50 * ENGINE.prompt_s(1000))
    assert plan.decode.desired == math.ceil(50 / decode_rate(ENGINE, 1000, 1000, SLO.tpot_s) - 1e-9)


def test_dynamo_with_load_scaling_adds_one_where_all_would_miss() -> None:
    decide = dynamo_sla(SLO, ENGINE, NO_BOUNDS, SlaKnobs(load_scaling=True))
    late = {"backlog_tokens": 4 * 60_000, "waiting_requests": 4}
    assert desired(decide, snapshot(**late)) == (5, 3)
    assert desired(decide, snapshot(starting=1, **late)) == (5, 3)  # a change is on its way
    assert desired(decide, snapshot()) == (3, 3)
    some = {"backlog_tokens": 4 * 30_000, "waiting_requests": 4}
    assert desired(decide, snapshot(**some)) == (4, 3)  # the rest would be above 80% of the target


def test_the_trend_filter_follows_a_line() -> None:
    rising = TrendFilter()
    for value in range(0, 300, 10):
        rising = rising.observed(float(value))
    assert rising.forecast == pytest.approx(300, abs=1.0)
    assert TrendFilter().observed(5.0).forecast == 5.0


def test_the_best_static_cluster_attains_with_the_fewest_replicas() -> None:
    trace = synthetic(TraceShape("constant", rate=8, duration_s=90, prompt_tokens=2000, seed=2))
    scenario = Scenario(trace, ENGINE, SLO)
    best = best_static(scenario, 0.97, {"prefill": 4, "decode": 3})
    assert best.attainment >= 0.97
    counts = [(p, d) for p in range(1, 5) for d in range(1, 4)]
    attaining = []
    for prefill, decode in counts:
        initial = {"prefill": prefill, "decode": decode}
        run = run_baseline(
            replace(scenario, initial=initial),
            "static-peak",
            {"prefill": PoolPolicy(max_replicas=prefill), "decode": PoolPolicy(max_replicas=decode)},
        )
        if run.attainment >= 0.97:
            attaining.append(run.total_replica_hours)
    assert best.total_replica_hours == min(attaining)


def test_what_a_mean_request_costs_leaves_out_what_a_cache_has() -> None:
    fresh = [TraceRequest(0.0, 1024, 10, (1, 2)), TraceRequest(1.0, 1024, 10, (3, 4))]
    again = [fresh[0], replace(fresh[1], block_ids=(1, 5))]
    whole, part = (mean_work_s(requests, ENGINE, 0.1) for requests in (fresh, again))
    assert part["prefill"] == pytest.approx(whole["prefill"] * 0.75)
    assert part["decode"] == whole["decode"] > 0


def test_baselines_by_name() -> None:
    known = RuleInputs(SLO, ENGINE, NO_BOUNDS, {"prefill": 0.1, "decode": 0.1})
    for name in BASELINES:
        if name not in STATIC:
            plan, _ = baseline(name, known).decide(None, snapshot())
            assert min(plan.prefill.desired, plan.decode.desired) >= 1


def test_a_schedule_orders_one_cold_start_ahead_and_keeps_through_short_troughs() -> None:
    need = (
        needs(Scenario(synthetic(TraceShape("constant", rate=1, peak_rate=1, duration_s=300)), ENGINE))[
            "prefill"
        ]
        * 0
    )
    need[20:30] = 2.5
    need[40:50] = 2.5
    counts = schedule(need, headroom=0.0, cap=1.0, cold_start_s=60.0)
    first = 20 - round(60 / GRID_S) - 1
    assert counts[first - 1] == 1
    # The trough of 10 steps is shorter than a cold start of 12.
    assert set(counts[first:50]) == {3}
    assert counts[50] == 1
    assert max(schedule(need, 0.0, 0.5, 60.0)) == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_bound_attains_and_undercuts_what_attains() -> None:
    trace = synthetic(TraceShape("diurnal", rate=4, peak_rate=20, duration_s=300, prompt_tokens=2000, seed=1))
    scenario = Scenario(trace, ENGINE, SLO)
    bound = clairvoyant_bound(scenario, 0.97)
    assert bound.outcome.attainment >= 0.97
    policy = default_policy(SLO, 60.0)
    found = run_policy(scenario, policy)
    for outcome in (found, run_baseline(scenario, "static-peak", policy.pools)):
        if outcome.attainment >= 0.97:
            assert bound.replica_hours <= outcome.total_replica_hours
    assert found.attainment >= 0.97
    replayed = replace(scenario, initial={"prefill": bound.prefill[0], "decode": bound.decode[0]})
    again = Simulation(replayed, scheduled(bound.prefill, bound.decode), GRID_S).run()
    assert again.attainment == bound.outcome.attainment


def test_static_peak_attains() -> None:
    trace = synthetic(
        TraceShape("burst", rate=5, peak_rate=20, duration_s=600, burst_s=120, prompt_tokens=2000, seed=2)
    )
    scenario = Scenario(trace, ENGINE, SLO)
    outcome = run_baseline(scenario, "static-peak", NO_BOUNDS)
    assert outcome.attainment > 0.98
    assert sum(outcome.actions.values()) == 0
    assert outcome.replica_hours["prefill"] * 3600 == pytest.approx(
        static_peak(scenario)["prefill"] * outcome.duration_s
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_constant_load_on_a_boundary_then_at_most_one_action() -> None:
    outcome = constant_at_a_boundary(COLD_START_S)
    assert actions_after(outcome, 900.0) <= 1
    assert outcome.attainment > 0.97


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_after_a_burst_the_targets_are_met_again_half_a_minute_after_the_cold_start() -> None:
    outcome, took_s = burst(COLD_START_S)
    assert took_s <= COLD_START_S + 30
    assert outcome.failed_requests == 0
