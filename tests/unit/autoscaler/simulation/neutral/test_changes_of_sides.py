"""Simulated neutral replicas change sides, by the coordinator's planner or an autoscaler's plan; in virtual time."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.decide import make_decide
from autoscaler.plan import Memory, PoolPlan, ScalingPlan
from autoscaler.policies.policy_file import ScalingPolicy, parse_policy
from autoscaler.simulation.cluster.cluster import Cluster
from autoscaler.simulation.cluster.neutral_replica import LEANS_AFTER_S
from autoscaler.simulation.cluster.replica import EventQueue, SimulatedRequest
from autoscaler.simulation.cluster_settings import ClusterSettings
from autoscaler.simulation.evaluation.baselines import static_replicas
from autoscaler.simulation.evaluation.comparison import bounds_of, run_baseline, run_policy
from autoscaler.simulation.outcome import Outcome, Slo
from autoscaler.simulation.preemptions import Preemptions
from autoscaler.simulation.scenario import Scenario
from autoscaler.simulation.simulator import Simulation
from autoscaler.simulation.traces.trace import Trace, TraceRequest
from autoscaler.sizing.engine_model import preset
from autoscaler.snapshot import POOLS, PoolName, Snapshot
from engine.pacing.token_clock import ServiceTargets
from splitserve.errors import InvalidArgumentError

ENGINE = replace(preset("simulated"), prefill_token_s=5e-4, step_s=10e-3, sequence_s=4e-3)
SLO = Slo(2.0, 0.1)
TURNS_S = 60.0
BY_STEPS = pytest.mark.parametrize("steps", [False, True])


def turning(tokens_a_second: float = 3.0, end_s: float = 100.0) -> Trace:
    """A minute of long prompts, then long answers."""
    prompts = [TraceRequest(0.25 * n, 600, 4) for n in range(int(TURNS_S / 0.25))]
    count = int((end_s - TURNS_S) * tokens_a_second)
    return Trace(
        "turn", [*prompts, *(TraceRequest(TURNS_S + n / tokens_a_second, 40, 150) for n in range(count))]
    )


def scenario(steps: bool, **counts: int) -> Scenario:
    """Of a policy with `workers: neutral`, `counts` by pool at the start."""
    initial: dict[PoolName, int] = {pool: counts.get(pool, 1) for pool in POOLS}
    return Scenario(turning(), ENGINE, SLO, initial=initial, steps=steps, hybrid=steps, cold_start_s=30.0)


def planned(where: Scenario) -> tuple[Outcome, list[tuple[float, PoolName]]]:
    """Without an autoscaler: the outcome, and when a replica changed sides."""
    assert where.initial is not None
    run = Simulation(replace(where, neutral=True), static_replicas(where.initial), 1.0, acts=False)
    outcome = run.run()
    assert run._observer is not None
    cluster = run._observer._cluster
    there = [*cluster.prefill, *cluster.decode]
    return outcome, sorted(change for one in there for change in one.changes)  # type: ignore[union-attr]


def policy(**rules: Any) -> ScalingPolicy:
    """The kind `slo` in both pools, with these targets."""
    pools = {
        "prefill": {"target_ms": 2000, "max_replicas": 3},
        "decode": {"target_ms": 100, "max_replicas": 3},
    }
    return parse_policy({"workers": "neutral", "interval_s": 5.0, **pools, **rules})


def turn(memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
    """A plan that has three prefill replicas in the first minute, and three decode replicas then."""
    early = snapshot.now_s < TURNS_S
    return ScalingPlan(PoolPlan(3 if early else 1), PoolPlan(1 if early else 3)), memory


def turned(where: Scenario, neutral: bool = True) -> Outcome:
    """Under this plan."""
    return Simulation(replace(where, neutral=neutral), turn, 5.0).run()


@BY_STEPS
def test_a_load_that_turns_from_prompts_to_tokens_is_followed_within_10_s(steps: bool) -> None:
    outcome, changes = planned(scenario(steps, prefill=2))
    assert [pool for _, pool in changes] == ["decode"]
    assert TURNS_S < changes[0][0] <= TURNS_S + 10.0
    assert outcome.leaning_changes == {"prefill": 0, "decode": 1}
    assert (outcome.attainment, outcome.failed_requests) == (1.0, 0)
    assert outcome.actions == {}


@BY_STEPS
def test_of_two_none_ever_moves(steps: bool) -> None:
    outcome, changes = planned(replace(scenario(steps), trace=turning(6.0)))
    assert changes == []
    assert outcome.attainment < 0.9, "though the load is more than one side can do"
    for moment in outcome.moments:
        assert [sum(moment.replicas[pool].values()) for pool in POOLS] == [1, 1]


def test_each_side_keeps_one_and_no_move_comes_back_within_30_s() -> None:
    where = scenario(False, prefill=3)
    outcome, changes = planned(replace(where, trace=turning(9.0)))
    assert [pool for _, pool in changes] == ["decode", "decode"]
    assert changes[1][0] - changes[0][0] >= 5.0
    assert all(sum(moment.replicas[pool].values()) for moment in outcome.moments for pool in POOLS)


@BY_STEPS
def test_all_on_one_side_serve_and_divide_themselves(steps: bool) -> None:
    outcome, changes = planned(scenario(steps, prefill=2, decode=0))
    assert changes[0] == (pytest.approx(1.1), "decode"), "two looks, and what a change takes"
    assert outcome.failed_requests == 0


@BY_STEPS
def test_a_plan_prefers_a_change_of_sides_to_a_cold_start(steps: bool) -> None:
    outcome = turned(scenario(steps, prefill=3))
    assert outcome.action_times == [(TURNS_S, "lean decode")] * 2
    assert outcome.leaning_changes == {"prefill": 0, "decode": 2}
    assert outcome.peak_replicas == 4
    assert outcome.attainment > 0.95
    pinned = turned(scenario(steps, prefill=3), neutral=False)
    assert pinned.leaning_changes is None
    assert pinned.actions["start"] == 1
    assert pinned.attainment < outcome.attainment
    assert pinned.peak_replicas > 4


@BY_STEPS
def test_the_planner_rests_while_a_plan_says_where_replicas_lean(steps: bool) -> None:
    """As it does live, where counts are binding: the plan wants two on prefill, and the load does not."""
    where = replace(scenario(steps, prefill=2), neutral=True)
    outcome = Simulation(where, static_replicas({"prefill": 2, "decode": 1}), 5.0).run()
    assert outcome.leaning_changes == {"prefill": 0, "decode": 0}


def under(rules: ScalingPolicy, binding: bool) -> Outcome:
    """The load that turns, at 3.5 answers a second, under a policy; or with all that it plans binding."""
    decide = make_decide(rules)

    def bound(memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        plan, memory = decide(memory, snapshot)
        return replace(plan, rooms={}), memory

    where = replace(scenario(False, prefill=2), neutral=True, trace=turning(3.5, 160.0))
    return Simulation(where, bound if binding else decide, 5.0, bounds_of(rules)).run()


def test_between_two_plans_of_a_policy_the_planner_follows_the_load() -> None:
    """The policy sees a minute late that fewer prompts come, and starts nothing within its budget."""
    free, bound = (under(policy(gpu_budget=3), binding) for binding in (False, True))
    assert free.leaning_changes == bound.leaning_changes == {"prefill": 0, "decode": 1}
    (early,) = (at for at, _ in sides_changed(free))
    (late,) = (at for at, _ in sides_changed(bound))
    assert early <= TURNS_S + 10.0 < late - 60.0
    assert (free.actions, bound.actions) == ({}, {"lean": 1})
    assert free.attainment > bound.attainment + 0.05


def sides_changed(outcome: Outcome) -> list[tuple[float, int]]:
    """The first moments that have another number of decode replicas than the moment before."""
    counts = [(moment.at_s, sum(moment.replicas["decode"].values())) for moment in outcome.moments]
    return [after for before, after in pairwise(counts) if before[1] != after[1]]


def test_hours_count_where_replicas_lean() -> None:
    outcome = turned(scenario(False, prefill=3))
    moved_s, end_s = TURNS_S + LEANS_AFTER_S, outcome.duration_s
    assert outcome.replica_hours["prefill"] * 3600 == pytest.approx(2 * moved_s + end_s)
    assert outcome.replica_hours["decode"] * 3600 == pytest.approx(2 * (end_s - moved_s) + end_s)


def test_work_goes_on_where_a_replica_turns_away_from_it() -> None:
    """Both parts are at work when it is asked; the latest of several orders counts."""
    events, ended = EventQueue(), list[SimulatedRequest]()
    cluster = Cluster(
        ClusterSettings(ENGINE, 1.0, neutral=True), events, lambda *_: None, lambda one, _: ended.append(one)
    )
    for pool in POOLS:
        cluster.order(pool, 2, 0.0, cold_start_s=0)
    for _ in range(8):
        cluster.arrive(SimulatedRequest(TraceRequest(0.0, 2000, 50)), 0.0)
    for at_s, pool in ((0.5, "decode"), (0.55, "prefill"), (0.58, "decode")):
        events.at(at_s, lambda now_s, pool=pool: cluster.ask_leaning("prefill-1", pool, now_s))  # type: ignore[misc]
    busy = 0
    while events.next_s < float("inf"):
        when_s, event = events.pop()
        event(when_s)
        if when_s == 0.58 + LEANS_AFTER_S:
            busy = next(one.load for one in cluster.decode if one.name == "prefill-1")
    assert busy > 0
    assert cluster.leaning_changes == {"prefill": 0, "decode": 1}
    assert len(ended) == 8
    assert not any(request.failed for request in ended)


@BY_STEPS
def test_the_same_seed_gives_the_same_result(steps: bool) -> None:
    first, second = (run_policy(scenario(steps, prefill=2), policy()).to_json() for _ in range(2))
    assert first | {"cpu_ms_per_request": 0} == second | {"cpu_ms_per_request": 0}


@pytest.mark.parametrize("workers", ["neutral", "pinned"])
def test_there_are_never_more_than_the_budget(workers: str) -> None:
    """Both pools want three; there are GPUs for four."""
    rules = policy(workers=workers, gpu_budget=4)
    outcome = run_policy(scenario(False, prefill=2, decode=2), rules)
    assert outcome.peak_replicas == 4


def test_a_baseline_has_the_planner_alone() -> None:
    where = replace(scenario(False), trace=turning(6.0))
    peak, neutral = (
        run_baseline(where, name, bounds_of(policy())) for name in ("static-peak", "static-neutral")
    )
    assert neutral.leaning_changes is not None
    assert (neutral.actions, peak.leaning_changes) == ({}, None)
    assert neutral.total_replica_hours == pytest.approx(peak.total_replica_hours)
    with pytest.raises(InvalidArgumentError) as refused:
        run_baseline(replace(where, steps=True), "static-neutral", bounds_of(policy()))
    assert refused.value.field == "hybrid"


def test_classes_have_a_speed_on_each_side() -> None:
    speeds = {"prefill": {"a": 1.0, "b": 4.0}, "decode": {"a": 1.0, "b": 2.0}}
    made = ClusterSettings(ENGINE, 1.0, neutral=True, speeds=speeds)  # type: ignore[arg-type]
    engine = made.engine_of("prefill", "b")
    assert engine == made.engine_of("decode", "b")
    assert engine.prefill_token_s == ENGINE.prefill_token_s / 4
    assert engine.max_running_requests == 2 * ENGINE.max_running_requests


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_every_request_ends_whoever_moves_ends_or_is_taken_away(seed: int) -> None:
    chance, events, ended = random.Random(seed), EventQueue(), list[SimulatedRequest]()
    engine = replace(
        preset("h100-8b"), kv_capacity_tokens=6_000, context_tokens=6_000, max_running_requests=4
    )
    made = ClusterSettings(
        engine,
        1.0,
        neutral=True,
        leaning_targets=ServiceTargets(0.02, 0.5),
        prefix_cache=chance.choice(["worker", "pool", "off"]),
        preemptions=Preemptions(notice_s=0.2),
    )
    cluster = Cluster(made, events, lambda *_: None, lambda request, _: ended.append(request))
    for pool in POOLS:
        cluster.order(pool, 3, 0.0, cold_start_s=0)
    requests = [
        SimulatedRequest(TraceRequest(n * 0.05, chance.randint(1, 5000), chance.randint(1, 60)))
        for n in range(40)
    ]
    for request in requests:
        events.at(request.arrival_s, lambda now, request=request: cluster.arrive(request, now))  # type: ignore[misc]
    names = [f"{pool}-{n}" for pool in POOLS for n in (1, 2, 3)]
    for _ in range(30):
        name, pool = chance.choice(names), chance.choice(POOLS)
        events.at(
            chance.uniform(0, 3), lambda now, name=name, pool=pool: cluster.ask_leaning(name, pool, now)
        )  # type: ignore[misc]
    doomed = cluster.prefill[0]
    events.at(chance.uniform(0, 3), lambda now: cluster.take_away(doomed, now))
    while events.next_s < float("inf"):
        when_s, event = events.pop()
        event(when_s)
    assert sorted(map(id, ended)) == sorted(map(id, requests))
    assert not any(request.failed for request in requests)
    assert len(cluster.prefill) + len(cluster.decode) == 5
    for one in (*cluster.prefill, *cluster.decode):
        assert (one.load, one.assigned, one.backlog_tokens) == (0, 0, 0)  # type: ignore[union-attr]
        assert one.context_tokens == 0  # type: ignore[union-attr]


class Restless:
    """Scales at random, so that replicas keep starting, moving, draining and ending."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def decide(self, memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        counts = [PoolPlan(self._chance.randint(1, 4), self._chance.randint(0, 1)) for _ in range(2)]
        return ScalingPlan(counts[0], counts[1]), memory


@BY_STEPS
def test_under_plans_that_change_all_the_time_every_request_ends(steps: bool) -> None:
    for seed in range(1 if steps else 10):
        where = replace(scenario(steps, prefill=2, decode=2), neutral=True, cold_start_s=4.0)
        outcome = Simulation(where, Restless(seed).decide, 5.0).run()
        assert outcome.failed_requests == 0
        assert all(request.finished_s is not None for request in outcome.requests)
        assert outcome.leaning_changes is not None
        assert sum(outcome.leaning_changes.values()) > 0
