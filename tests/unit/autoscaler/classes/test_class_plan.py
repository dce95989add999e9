"""Decisions for pools with classes, and that their budget is never exceeded on the way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.classes.class_actions import reconcile_classes
from autoscaler.classes.class_bill import pool_bill
from autoscaler.classes.class_shares import price_per_hour
from autoscaler.classes.refused_classes import RefusedClasses
from autoscaler.decide import make_decide
from autoscaler.plan import ClassShare, PoolPlan, ScalingPlan
from autoscaler.policies.policy_file import parse_policy
from autoscaler.reconcile import Activate, Drain, ReplicaView, Start
from autoscaler.snapshot import POOLS, ReplicaState
from autoscaler.start_watch import SHORT_S
from splitserve.errors import (
    ConfigError,
    FailedPreconditionError,
    ResourceExhaustedError,
    UnavailableError,
)
from tests.support.classes.classed_pools import (
    BOUNDS,
    DRAINING,
    FAST,
    SLOW,
    STARTING,
    Clusters,
    classed,
    counts,
    decided,
    policy,
    view,
)
from tests.support.scaling.snapshots import Load, snapshot


def test_one_class_changes_no_count() -> None:
    given = snapshot(load=Load(20.0))
    plain = parse_policy({"prefill": {"target_ms": 1000}, "decode": {"target_ms": 60}})
    one = [{"name": "only", "price_per_hour": 2, "max_replicas": 100}]
    priced = parse_policy(
        {"prefill": {"target_ms": 1000, "classes": one}, "decode": {"target_ms": 60, "classes": one}}
    )
    before, after = decided(plain, given), decided(priced, classed(given, "only", "only"))
    for pool in POOLS:
        assert after.pool(pool).desired == before.pool(pool).desired
        assert after.pool(pool).price_per_hour == 2 * before.pool(pool).desired
    assert before.prefill.mix == ()
    assert before.prefill.price_per_hour is None


def test_the_cheapest_mix_is_wanted_with_its_price() -> None:
    plan = decided(policy(), classed(snapshot(load=Load(30.0), prefill=1)))
    units = plan.prefill.capacity
    assert units > 5, "30,000 tokens a second, 5000 a unit"
    mix = counts(plan)
    assert mix["fast"] >= units // 4
    assert plan.prefill.desired == sum(mix.values())
    assert f"{mix['fast']} fast" in plan.prefill.reason
    assert plan.prefill.price_per_hour == mix["slow"] + 3 * mix["fast"]


def test_a_class_that_misses_the_target_is_left_out_of_prefill() -> None:
    rules = policy({"longest_prompt_tokens": 6000})
    plan = decided(rules, classed(snapshot(load=Load(4.0), prefill=1)))
    assert counts(plan) == {"slow": 0, "fast": 1}
    assert "slow computes 6000 tokens in 1.20 s, beyond 1.00 s" in plan.prefill.reason


def test_replicas_of_others_count_and_are_not_paid() -> None:
    given = classed(snapshot(load=Load(12.0), prefill=4))
    alone = decided(policy(), given)
    replicas = tuple(replace(one, ours=False) for one in given.prefill.replicas)
    plan = decided(policy(), replace(given, prefill=replace(given.prefill, replicas=replicas)))
    assert plan.prefill.capacity == alone.prefill.capacity
    assert (plan.prefill.price_per_hour or 0) < (alone.prefill.price_per_hour or 0)


def test_a_budget_goes_where_it_saves_most() -> None:
    given = classed(snapshot(load=Load(30.0)))
    free = decided(policy(), given)
    wanted = sum(free.pool(pool).price_per_hour or 0 for pool in POOLS)
    tight = decided(policy(budget_per_hour=wanted - 2), given)
    spent = sum(tight.pool(pool).price_per_hour or 0 for pool in POOLS)
    assert spent <= wanted - 2
    assert "money_budget" in {tight.prefill.cause, tight.decode.cause}
    assert tight.budget_per_hour == wanted - 2
    rich = decided(policy(budget_per_hour=wanted), given)
    assert [counts(rich, pool) for pool in POOLS] == [counts(free, pool) for pool in POOLS]


@pytest.mark.parametrize(
    ("prefill", "more", "error"),
    [
        ({"classes": [SLOW, SLOW]}, {}, "prefill.classes must have different names: slow is there twice"),
        ({"classes": [FAST]}, {}, "prefill.classes must have one of speed 1"),
        ({"classes": [{**SLOW, "speed": 0.5}]}, {}, r"prefill.classes.0.speed: .* \(given: 0.5\)"),
        ({"classes": [{**SLOW, "name": "a b"}]}, {}, "prefill.classes.0.name"),
        (
            {"gpus_per_replica": 2, "classes": [{**SLOW, "gpu": "MIG 3g.40gb"}]},
            {},
            r"prefill.classes.0.gpus_per_replica \(2\) must be 1 with gpu 'MIG 3g.40gb'",
        ),
        ({"classes": [{**SLOW, "gpu": "H100;0"}]}, {}, r"prefill.classes.0.gpu: .* \(given: 'H100;0'\)"),
        (
            {"classes": []},
            {"gpu_budget": 8},
            r"gpu_budget \(8\) needs classes in both pools or in none: decode",
        ),
        (
            {"min_replicas": 8, "warm_standby": 4},
            {"gpu_budget": 3},
            r"gpu_budget \(3\) must hold min_replicas and warm_standby of both pools: 4",
        ),
        ({"warm_standby": 2}, {"budget_per_hour": 3}, "must hold min_replicas and warm_standby .*: 4"),
        ({"classes": []}, {"budget_per_hour": 3}, r"budget_per_hour \(3\) needs prefill.classes"),
        ({"min_replicas": 3}, {"budget_per_hour": 3}, r"budget_per_hour \(3\) must hold min_replicas .*: 4"),
    ],
)
def test_what_a_policy_must_keep(prefill: dict[str, Any], more: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        policy(prefill, **more)


def actions(plan: ScalingPlan, prefill: list[ReplicaView], **more: Any) -> list[Any]:
    found = reconcile_classes(plan, {"prefill": prefill, "decode": []}, BOUNDS, **more)
    return [one for one in found if one.pool == "prefill"]


def test_a_start_that_nobody_waits_for_any_more_ends() -> None:
    mix = (ClassShare("slow", 0, 1.0, 1.0),)
    starting = [view("s-0", "slow", ReplicaState.STARTING)]
    for cause, drained in (("to_zero", [Drain("prefill", ("s-0",))]), ("policy", [])):
        plan = ScalingPlan(PoolPlan(0, units=0, mix=mix, cause=cause), PoolPlan(0))  # type: ignore[arg-type]
        assert actions(plan, starting) == drained


def fast_for_four_slow(**more: Any) -> ScalingPlan:
    """One fast one shall take the place of four slow ones."""
    given = classed(snapshot(load=Load(8.0), prefill=4))
    plan = decided(policy({"payback_s": 86_400.0}, **more), given)
    assert counts(plan) == {"slow": 0, "fast": 1}
    return plan


def test_the_new_one_is_ready_before_the_old_ones_go() -> None:
    plan, old = fast_for_four_slow(), [view(f"s{n}", "slow", load=n) for n in range(4)]
    assert actions(plan, old) == [Start("prefill", 1, "fast", 1)]
    assert actions(plan, [*old, view("f", "fast", STARTING)]) == []
    assert actions(plan, [*old, view("f", "fast")]) == [Drain("prefill", ("s0",))]
    assert actions(plan, [*old[1:], view("s0", "slow", DRAINING), view("f", "fast")]) == []
    assert actions(plan, [view("f", "fast")]) == []


def test_one_whose_machine_is_taken_away_ends_once_it_has_nothing_left() -> None:
    plan = decided(policy(), classed(snapshot(load=Load(2.0), prefill=1)))
    taken = [view(f"s{n}", "slow", ReplicaState.PREEMPTED, load=n) for n in range(2)]
    found = actions(plan, taken)
    assert Drain("prefill", ("s0",)) in found
    assert any(isinstance(one, Start) for one in found)


def test_while_nothing_can_be_started_the_old_ones_stay() -> None:
    old = [view(f"s{n}", "slow") for n in range(4)]
    assert actions(fast_for_four_slow(), old, paused=[("prefill", "fast")]) == []


def test_a_class_that_pauses_holds_up_no_other() -> None:
    plan, paused = fast_for_four_slow(), [("prefill", "slow"), ("decode", "fast")]
    assert actions(plan, [], paused=paused) == [Start("prefill", 1, "fast", 1)]


def test_without_room_for_both_the_old_ones_go_first() -> None:
    plan, old = fast_for_four_slow(budget_per_hour=5.0), [view(f"s{n}", "slow") for n in range(4)]
    assert actions(plan, old) == [Drain("prefill", ("s0",))]
    assert actions(plan, old[2:]) == [Start("prefill", 1, "fast", 1)]


def test_the_last_that_serves_stays_where_its_replacement_has_no_room() -> None:
    mix = (ClassShare("slow", 0, price_per_hour=1.0), ClassShare("fast", 1, 8.0, price_per_hour=10.0))
    plan = ScalingPlan(PoolPlan(1, units=1, mix=mix), PoolPlan(0), budget_per_hour=10.0)
    assert actions(plan, [view("s", "slow")]) == []


def test_standbys_of_a_class_join_and_overdue_ones_are_replaced() -> None:
    plan = fast_for_four_slow()
    assert actions(plan, [view("f", "fast", ReplicaState.STANDBY)]) == [Activate("prefill", "f")]
    overdue = [view("f", "fast", ReplicaState.OVERDUE), view("s", "slow")]
    assert actions(plan, overdue) == [Drain("prefill", ("f",))]
    assert actions(plan, overdue, paused=[("prefill", "fast")]) == []


@settings(max_examples=15, deadline=None)
@given(
    st.data(), st.sampled_from([3.0, 7.5, 12.0, 30.0]), st.lists(st.floats(0.5, 60), min_size=4, max_size=12)
)
def test_no_moment_costs_more_than_the_budget(data: st.DataObject, budget: float, loads: list[float]) -> None:
    decide, memory, there = make_decide(policy(budget_per_hour=budget)), None, Clusters()
    for tick, load in enumerate(loads):
        plan, memory = decide(memory, there.seen(load, 2000.0 + 60 * tick))
        wanted = sum(plan.pool(pool).price_per_hour or 0 for pool in POOLS)
        assert wanted <= budget + 1e-6
        there.act(reconcile_classes(plan, there.pools, BOUNDS))
        assert sum(price_per_hour(plan.pool(pool), there.pools[pool]) for pool in POOLS) <= budget + 1e-6
        there.pass_time(data)


def test_the_bill_says_what_is_paid_and_what_a_unit_more_or_less_would_cost() -> None:
    plan = decided(policy(), classed(snapshot(load=Load(8.0), prefill=4)))
    bill = pool_bill(plan.prefill, [view("s0", "slow"), view("s1", "slow", DRAINING), view("x", "gone")])
    assert bill is not None
    assert [(one.name, one.there) for one in bill.classes] == [("slow", 3), ("fast", 0)]
    assert (bill.there_per_hour, bill.wanted_per_hour) == (3, plan.prefill.price_per_hour)
    assert bill.fewer_per_hour <= bill.wanted_per_hour <= bill.more_per_hour
    assert bill.more_per_hour - bill.wanted_per_hour <= 1
    assert pool_bill(PoolPlan(3), []) is None


def test_a_class_that_was_refused_is_left_out_for_a_while() -> None:
    """Others are started meanwhile, and what runs of it stays."""
    given = classed(snapshot(load=Load(30.0), prefill=1))
    rules = policy()
    assert counts(decided(rules, given))["fast"] > 0
    without = decided(rules, replace(given, short=frozenset({("prefill", "fast")})))
    assert counts(without)["fast"] == 0
    assert sum(counts(without).values()) >= without.prefill.capacity
    assert "no more of fast is to be had for now" in without.prefill.reason
    there = replace(given, short=frozenset({("prefill", "slow"), ("prefill", "fast")}))
    assert counts(decided(rules, there)) == counts(decided(rules, given)), "all were: all are tried again"


def test_what_is_remembered_as_refused() -> None:
    memory, start = RefusedClasses(), Start("prefill", 1, "fast", 1)
    cold = {"prefill": 10.0, "decode": 10.0}
    assert memory.at(100.0, cold) == frozenset()
    memory.note(start, ResourceExhaustedError("no GPU is free", reason="NO_GPU"))
    memory.note(Start("prefill", 1, "slow"), UnavailableError("no answer"))
    memory.note(Start("prefill", 1), ResourceExhaustedError("no GPU is free", reason="NO_GPU"))
    memory.note(Drain("prefill", ("x",)), FailedPreconditionError("no"))
    assert memory.at(101.0, cold) == {("prefill", "fast")}
    assert memory.at(100.0 + SHORT_S, cold) == frozenset()
    memory.at(300.0, {"prefill": SHORT_S, "decode": 10.0})
    memory.note(start, ResourceExhaustedError("no GPU is free", reason="NO_GPU"))
    assert memory.at(300.0 + SHORT_S, cold), "its replacement is to come up meanwhile"
    assert not memory.at(300.0 + 2 * SHORT_S, cold)
