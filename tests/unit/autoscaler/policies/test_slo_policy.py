"""The default policy: sized by arrivals, trimmed by latency, stable at a boundary, fast after a burst."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from autoscaler.decide import make_decide
from autoscaler.plan import Decide, ScalingPlan
from autoscaler.policies import demand
from autoscaler.policies.demand import Covered, measure
from autoscaler.policies.policy_file import SloTuning, parse_policy
from autoscaler.policies.slo.slo_prefill import erlang_c, replicas_for_wait, wait_exceeds
from autoscaler.snapshot import ArrivalBucket, LinkSignals, Snapshot
from splitserve.histograms import Histogram
from tests.support.scaling.snapshots import STEP, Load, arrivals, replicas, snapshot

POLICY = parse_policy(
    {"prefill": {"target_ms": 1000, "max_replicas": 32}, "decode": {"target_ms": 50, "max_replicas": 32}}
)


def settled(decide: Decide, seen: Snapshot, spans: int = 40) -> ScalingPlan:
    """The plan after repeated equal snapshots, ten seconds apart."""
    memory, plan = None, None
    for i in range(spans):
        later = tuple(replace(bucket, start_s=bucket.start_s + 10 * i) for bucket in seen.arrivals)
        plan, memory = decide(memory, replace(seen, now_s=seen.now_s + 10 * i, arrivals=later))
    assert plan is not None
    return plan


def one(seen: Snapshot) -> ScalingPlan:
    return make_decide(POLICY)(None, seen)[0]


def test_prefill_follows_the_tokens_that_arrive() -> None:
    # 10,000 tokens/s over 5,000 a replica, at utilization below one.
    assert one(snapshot(prefill=1)).prefill.desired == 3
    assert one(snapshot(prefill=1, load=Load(requests_per_s=40))).prefill.desired in (9, 10)


def test_a_slow_lane_bounds_a_prefill_replica() -> None:
    # 0.2 GB/s carry 2000 tokens/s of 100 kB: a replica is worth that, whatever it computes.
    plan = one(snapshot(prefill=1, link=LinkSignals(0.2, 100_000)))
    assert plan.prefill.desired >= 6
    assert "bound by its link" in plan.prefill.reason


def test_long_outputs_grow_decode_and_not_prefill() -> None:
    plan = one(snapshot(prefill=3, decode=1, load=Load(output_tokens=2000)))
    assert plan.prefill.desired == 3
    assert plan.decode.desired > 3


def test_decode_grows_for_kv_and_for_the_batch() -> None:
    short = one(snapshot(decode=1, load=Load(output_tokens=200))).decode.desired
    wide = snapshot(decode=1, load=Load(prompt_tokens=50_000, output_tokens=200))
    assert one(wide).decode.desired > short
    slow = replace(wide.decode, step=replace(wide.decode.step, base_s=0.045))  # type: ignore[arg-type]
    assert one(replace(snapshot(decode=1), decode=slow)).decode.desired > short


def test_unused_replicas_are_given_up_after_half_a_cold_start_at_once() -> None:
    decide, memory, counts = make_decide(POLICY), None, []
    for i in range(20):
        now = 1800.0 + 10 * i
        plan, memory = decide(memory, snapshot(now, prefill=10, decode=10))
        counts.append(plan.prefill.desired)
    assert counts[:3] == [10] * 3
    assert set(counts[4:]) == {3}


@pytest.mark.parametrize(
    "missing",
    [
        lambda seen: replace(seen, arrivals=()),
        lambda seen: replace(seen, complete=False),
        lambda seen: replace(
            seen, prefill=replace(seen.prefill, tokens_per_s=None), decode=replace(seen.decode, step=None)
        ),
        lambda seen: replace(
            seen, prefill=replace(seen.prefill, latency=None), decode=replace(seen.decode, tpot=None)
        ),
    ],
    ids=["arrivals", "a coordinator", "speeds", "latencies"],
)
def test_what_is_missing_never_scales_down(missing: Callable[[Snapshot], Snapshot]) -> None:
    plan = settled(make_decide(POLICY), missing(snapshot(prefill=10, decode=10)))
    assert (plan.prefill.desired, plan.decode.desired) == (10, 10)


def test_without_traffic_both_pools_shrink_to_their_minimum() -> None:
    seen = snapshot(prefill=5, decode=5, load=Load(requests_per_s=0), prefill_latency_s=None, tpot_s=None)
    plan = settled(make_decide(POLICY), seen)
    assert (plan.prefill.desired, plan.decode.desired) == (1, 1)


def test_a_prefill_pool_shrinks_where_decode_workers_compute_the_prompts() -> None:
    """Hardly anything is left to measure the latency of."""
    seen = snapshot(prefill=5, prefill_latency_s=None)
    few = tuple(replace(b, uncached_tokens=b.uncached_tokens // 20, local_requests=9) for b in seen.arrivals)
    assert settled(make_decide(POLICY), replace(seen, arrivals=few)).prefill.desired == 1


def test_a_long_prompt_in_ten_waits_for_its_like() -> None:
    """The mean prompt is that of prefill workers, not of all requests."""
    mixed = tuple(replace(b, uncached_tokens=10_000, local_requests=9) for b in snapshot().arrivals)
    counts = [
        one(replace(snapshot(prefill=1), arrivals=a)).prefill.desired for a in (mixed, snapshot().arrivals)
    ]
    assert counts[0] > counts[1]
    alike = tuple(replace(b, requests=1, local_requests=0) for b in mixed)
    assert one(replace(snapshot(prefill=1), arrivals=alike)).prefill.desired == counts[0]


def test_a_young_record_never_scales_down() -> None:
    assert one(snapshot(now_s=100.0, prefill=10)).prefill.desired == 10
    assert settled(make_decide(POLICY), snapshot(now_s=30.0, prefill=10), spans=15).prefill.desired == 10


def test_latency_near_the_target_holds_replicas() -> None:
    busy = Load(requests_per_s=26)
    assert (
        settled(make_decide(POLICY), snapshot(prefill=10, prefill_latency_s=0.93, load=busy)).prefill.desired
        == 10
    )
    assert (
        settled(make_decide(POLICY), snapshot(prefill=10, prefill_latency_s=0.3, load=busy)).prefill.desired
        < 10
    )


def test_slow_requests_of_an_idle_pool_neither_hold_nor_add_replicas() -> None:
    assert settled(make_decide(POLICY), snapshot(prefill=10, prefill_latency_s=3.0)).prefill.desired == 3


def test_an_unattainable_tpot_target_does_not_multiply_replicas() -> None:
    seen = snapshot(decode=4)
    slow = replace(seen.decode, step=replace(STEP, base_s=0.06))
    assert one(replace(seen, decode=slow)).decode.desired < 10


def test_demand_on_decode_waits_to_be_admitted_counts() -> None:
    seen = snapshot(decode=2)
    full = replace(seen.decode, context_tokens=600_000, running_requests=100, waiting_reservations=50)
    assert one(replace(seen, decode=full)).decode.desired >= 4


def test_latency_above_the_target_adds_one_replica_when_it_lasts() -> None:
    decide, memory, counts = make_decide(POLICY), None, []
    for i in range(20):
        plan, memory = decide(memory, snapshot(1800.0 + 10 * i, prefill=4, prefill_latency_s=1.5))
        counts.append(plan.prefill.desired)
        if plan.prefill.desired > 4:
            break
    assert counts[-1] == 5
    assert len(counts) == 13


def test_a_burst_is_answered_in_one_go_on_the_first_decision() -> None:
    decide = make_decide(POLICY)
    load = Load(bursts=((1800.0, 4000.0, 5.0),))
    _, memory = decide(None, snapshot(1800.0, prefill=3, load=load))
    seen = snapshot(1805.0, prefill=3, load=load)
    waiting = 5 * 10 * 5 * 1000 - 5 * 3 * 5000
    plan, memory = decide(memory, replace(seen, prefill=replace(seen.prefill, backlog_tokens=waiting)))
    assert plan.prefill.desired >= 5 * 10 * 1000 / 5000


def test_replicas_on_their_way_are_counted() -> None:
    decide = make_decide(POLICY)
    load = Load(bursts=((1800.0, 4000.0, 5.0),))
    _, memory = decide(None, snapshot(1800.0, prefill=3, load=load))
    wanted, backlog = [], 0.0
    for now in range(1805, 1856, 5):
        seen = snapshot(float(now), prefill=3, load=load)
        backlog += 5 * (50_000 - 15_000)
        starting = max(wanted, default=3) - 3
        pool = replace(
            seen.prefill,
            backlog_tokens=int(backlog),
            replicas=replicas("p", 3, starting=starting, since_s=1805.0),
        )
        plan, memory = decide(memory, replace(seen, prefill=pool))
        wanted.append(plan.prefill.desired)
    # No order is repeated while the first one is under way.
    assert len(set(wanted)) <= 3


@pytest.mark.parametrize("per_replica", [3900.0, 4100.0, 4300.0, 5200.0])
def test_constant_load_on_a_boundary_makes_at_most_one_action_in_half_an_hour(per_replica: float) -> None:
    rng = random.Random(7)
    record: list[ArrivalBucket] = []
    for second in range(3600):
        requests = round(rng.gauss(20, 20**0.5))
        tokens = sum(int(rng.expovariate(1 / 1000)) for _ in range(requests))
        record.append(ArrivalBucket(float(second), 1.0, requests, tokens, tokens, requests * 200.0))
    decide, memory, desired, actions = make_decide(POLICY), None, 6, 0
    base = snapshot(prefill=6, decode=8)
    for now in range(1800, 3600, 10):
        pool = replace(base.prefill, tokens_per_s=per_replica, replicas=replicas("p", desired))
        seen = replace(base, now_s=float(now), prefill=pool, arrivals=tuple(record[now - 1800 : now]))
        plan, memory = decide(memory, seen)
        actions += plan.prefill.desired != desired
        desired = plan.prefill.desired
    assert actions <= 1


def test_growth_beyond_noise_is_carried_over_the_cold_start() -> None:
    tuning = SloTuning()
    rising = tuple(ArrivalBucket(float(i), 1.0, 1, 0, 1000 + 5 * max(0, i - 480), 0.0) for i in range(600))
    steady = arrivals(Load(), 600.0)

    def amount(bucket: ArrivalBucket) -> float:
        return float(bucket.uncached_tokens)

    risen, flat = measure(rising, amount, 600.0, 60.0, tuning), measure(steady, amount, 600.0, 60.0, tuning)
    assert risen is not None
    assert flat is not None
    assert risen.growth == pytest.approx(1.2, abs=0.1)
    assert flat.growth == 1.0


def test_headroom_follows_what_forecasts_fell_short_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "DRIFT", 0.0)

    def covered(tokens: Callable[[int], int]) -> Covered:
        record = tuple(ArrivalBucket(float(i), 1.0, 1, 0, tokens(i), 0.0) for i in range(1200))
        found = measure(record, lambda bucket: float(bucket.uncached_tokens), 1200.0, 60.0, SloTuning())
        assert found is not None
        return found.covered_rate(20.0, 60.0, 0.95, 60.0)

    steady = covered(lambda _: 1000)
    assert (steady.expected, steady.with_headroom) == pytest.approx((1000, 1000))
    # A minute of load in every five: the trough is forecast near the mean, and the burst is covered all the time.
    bursts = covered(lambda second: 5000 if 100 <= second % 300 < 160 else 0)
    assert 0 < bursts.expected < 1500
    assert bursts.with_headroom == pytest.approx(5000, rel=0.15)
    # A steady rise is short by what it rises in a lead and half a window.
    rising = covered(lambda second: 1000 + second)
    assert rising.with_headroom == pytest.approx(2200 + 60, abs=80)


def test_headroom_grows_with_the_cold_start_where_the_record_is_quiet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def headroom(record_s: int, lead_s: float) -> float:
        record = tuple(ArrivalBucket(float(i), 1.0, 1, 0, 1000, 0.0) for i in range(record_s))
        measured = measure(record, lambda b: float(b.uncached_tokens), float(record_s), lead_s, SloTuning())
        assert measured is not None
        found = measured.covered_rate(40.0, lead_s, 0.9, 60.0)
        return found.with_headroom / found.expected - 1

    quick, slow, slowest = (headroom(1800, lead_s) for lead_s in (20.0, 180.0, 600.0))
    assert quick == pytest.approx(0.0)
    assert 0.02 < slow < 0.2 < slowest
    assert headroom(500, 180.0) > slow, "fewer errors are known"
    monkeypatch.setattr(demand, "DRIFT", 0.0)
    assert headroom(1800, 600.0) == pytest.approx(0.0)


@pytest.mark.parametrize("lead_s", [20.0, 240.0])
def test_a_backlog_is_cleared_in_half_a_window(lead_s: float) -> None:
    # 10,000 tokens/s are what two replicas compute; 300,000 wait: 10,000/s more in 30 s.
    seen = snapshot(prefill=2)
    waiting = replace(seen.prefill, backlog_tokens=300_000, cold_start_s=lead_s)
    plan = one(replace(seen, prefill=waiting))
    assert plan.prefill.desired == 4
    assert "catch up" in plan.prefill.reason


def test_erlang_c_against_a_table() -> None:
    # Erlang C for 2 servers at 1 erlang is 1/3; for one server it is the utilization.
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    assert wait_exceeds(3, 3.5, 1.0, 1.0) == 1.0
    assert replicas_for_wait(0.0, 0.0, 1.0, 0.95, 8) == 1
    assert Histogram.of([]).total == 0
