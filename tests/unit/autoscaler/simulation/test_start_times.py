"""Cold starts by chance: their distribution, starts that fail, and what the policy sees of them."""

from __future__ import annotations

from dataclasses import replace
from statistics import median, quantiles

import pytest

from autoscaler.plan import Decide, Memory, PoolPlan, ScalingPlan
from autoscaler.policies.policy_file import PoolPolicy, parse_policy
from autoscaler.simulation.engine_model import preset
from autoscaler.simulation.outcome import Outcome
from autoscaler.simulation.scenario import Scenario, Slo, StartTimes
from autoscaler.simulation.simulator import Simulation, run_policy
from autoscaler.simulation.traces.synthetic import TraceShape, synthetic
from autoscaler.snapshot import ReplicaState, Snapshot
from bench.autoscaling.opponents.clairvoyant import clairvoyant_bound
from splitserve.errors import InvalidArgumentError
from splitserve.roles import POOLS

ENGINE = preset("h100-8b")
TRACE = synthetic(TraceShape("constant", rate=2, duration_s=600, prompt_tokens=500, output_tokens=20))
POLICY = dict.fromkeys(POOLS, PoolPolicy(cold_start_s=20.0))


def started(starts: StartTimes, decide: Decide, watch_starts: bool = False) -> tuple[Outcome, list[Snapshot]]:
    """One replica a pool at first; the run, and what the policy saw."""
    seen: list[Snapshot] = []

    def watched(memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        seen.append(snapshot)
        return decide(memory, snapshot)

    scenario = Scenario(TRACE, ENGINE, Slo(), starts, initial={"prefill": 1, "decode": 1})
    return Simulation(scenario, watched, 5.0, POLICY, watch_starts=watch_starts).run(), seen


def wants(prefill: int) -> Decide:
    plan = ScalingPlan(PoolPlan(prefill), PoolPlan(1))
    return lambda memory, snapshot: (plan, memory)


def test_starts_have_the_given_percentiles_and_the_given_share_fails() -> None:
    starts = StartTimes(60.0, 180.0, failing=0.1, seed=3)
    drawn = [starts.of(f"prefill-{n}") for n in range(4_000)]
    took_s = [start.took_s for start in drawn]
    assert median(took_s) == pytest.approx(60.0, rel=0.05)
    assert quantiles(took_s, n=20)[-1] == pytest.approx(180.0, rel=0.08)
    assert sum(took_s) / len(took_s) == pytest.approx(starts.mean_s, rel=0.05)
    assert sum(start.fails for start in drawn) / len(drawn) == pytest.approx(0.1, abs=0.015)


def test_a_start_depends_on_the_seed_and_its_name_alone() -> None:
    starts = StartTimes(60.0, 180.0, 0.5, seed=1)
    assert starts.of("decode-2") == starts.of("decode-2")
    assert starts.of("decode-2") != starts.of("decode-3")
    assert starts.of("decode-2") != replace(starts, seed=2).of("decode-2")
    assert StartTimes(60.0).of("decode-2").took_s == 60.0


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"median_s": -1.0}, "cold_start"),
        ({"median_s": float("nan")}, "cold_start"),
        ({"p95_s": 59.0}, "cold_start_p95"),
        ({"median_s": 0.0, "p95_s": 1.0}, "cold_start_p95"),
        ({"failing": 1.0}, "failed_starts"),
    ],
)
def test_what_cannot_be_is_refused_by_name(wrong: dict[str, float], field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        StartTimes(**wrong)  # type: ignore[arg-type]


def test_the_policy_sees_the_median_of_observed_starts_and_nothing_before() -> None:
    starts = StartTimes(20.0, 60.0, seed=5)
    outcome, seen = started(starts, wants(4))
    took_s = [starts.of(f"prefill-{n}").took_s for n in (2, 3, 4)]
    assert [s for s in seen if s.now_s < min(took_s)][-1].prefill.cold_start_s is None
    assert seen[-1].prefill.cold_start_s == pytest.approx(median(took_s))
    assert outcome.attainment == 1.0


def test_a_failed_start_is_ordered_again_and_costs_what_it_took() -> None:
    starts = StartTimes(20.0, failing=0.5, seed=2)
    outcome, seen = started(starts, wants(6))
    lost = 0
    names = {replica.name for snapshot in seen for replica in snapshot.prefill.replicas}
    for name in names - {"prefill-1"}:
        lost += starts.of(name).fails
    assert lost > 0
    ready = [sum(r.state is ReplicaState.READY for r in snapshot.prefill.replicas) for snapshot in seen]
    assert ready[-1] == 6
    assert len(names) == 6 + lost
    # No gap: what failed was paid for, and ordered again at the next decision.
    assert outcome.replica_hours["prefill"] * 3600 == pytest.approx(6 * outcome.duration_s)


def test_the_watch_pauses_after_failed_starts_and_replaces_overdue_ones() -> None:
    hopeless = StartTimes(20.0, failing=0.99, seed=0)
    _, unwatched = started(hopeless, wants(2))
    _, watched = started(hopeless, wants(2), watch_starts=True)

    def orders(seen: list[Snapshot]) -> int:
        return len({replica.name for snapshot in seen for replica in snapshot.prefill.replicas})

    assert orders(watched) < orders(unwatched) / 1.5
    slow = StartTimes(400.0)
    _, seen = started(slow, wants(2), watch_starts=True)
    states = {replica.state for snapshot in seen for replica in snapshot.prefill.replicas}
    assert ReplicaState.OVERDUE in states


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run() -> None:
    policy = parse_policy({"prefill": {"target_ms": 2000}, "decode": {"target_ms": 100}})
    trace = synthetic(
        TraceShape("burst", rate=4, peak_rate=20, duration_s=200, burst_s=100, prompt_tokens=2000, seed=1)
    )
    runs = []
    for seed in (0, 0, 1):
        starts = StartTimes(30.0, 90.0, 0.2, seed)
        scenario = Scenario(trace, ENGINE, Slo(), starts)
        runs.append(run_policy(scenario, policy))
    figures = [(run.attainment, run.total_replica_hours, tuple(run.action_times)) for run in runs]
    assert figures[0] == figures[1] != figures[2]


def test_the_bound_knows_how_long_each_start_takes() -> None:
    trace = synthetic(TraceShape("constant", rate=3, duration_s=60, prompt_tokens=500, output_tokens=20))
    starts = StartTimes(30.0, 90.0, 0.5)
    bound = clairvoyant_bound(Scenario(trace, ENGINE, Slo(), starts))
    known = clairvoyant_bound(Scenario(trace, ENGINE, Slo(), StartTimes(starts.mean_s)))
    assert bound.replica_hours == known.replica_hours
    assert bound.outcome.attainment >= 0.97
