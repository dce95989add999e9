"""Warm standbys of pools with classes: which class, when they join, and what they may take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoscaler.classes.class_actions import reconcile_classes
from autoscaler.classes.class_bill import pool_bill
from autoscaler.classes.class_plan import in_units
from autoscaler.decide import make_decide, status_of
from autoscaler.plan import ClassShare, PoolPlan, ScalingPlan
from autoscaler.reconcile import Activate, Drain, ReplicaView, Rest, Start
from autoscaler.sharing.claims.shared_view import SharedView
from autoscaler.sharing.claims.shares import GPUS, MONEY, of_class
from autoscaler.snapshot import PoolName, ReplicaState
from tests.support.classes.classed_pools import (
    BOUNDS,
    READY,
    STARTING,
    Clusters,
    classed,
    counts,
    decided,
    policy,
    view,
)
from tests.support.scaling.snapshots import Load, snapshot

STANDBY = ReplicaState.STANDBY


def standbys(plan: ScalingPlan, pool: PoolName = "prefill") -> dict[str, int]:
    return {share.name: share.standby for share in plan.pool(pool).mix if share.standby}


@pytest.mark.parametrize(
    ("units", "rest"), [(1, {"slow": 1}), (2, {"slow": 2}), (4, {"fast": 1}), (5, {"slow": 1, "fast": 1})]
)
def test_they_are_the_cheapest_that_carry_so_many_units(units: int, rest: dict[str, int]) -> None:
    given = classed(snapshot(load=Load(8.0), prefill=1))
    plain, plan = decided(policy(), given), decided(policy({"warm_standby": units}), given)
    assert standbys(plan) == rest
    assert plan.prefill.standby == sum(rest.values())
    assert counts(plan) == counts(plain), "beside what is in rotation"
    assert "on standby" in plan.prefill.reason
    price = rest.get("slow", 0) + 3 * rest.get("fast", 0)
    assert plan.prefill.price_per_hour == (plain.prefill.price_per_hour or 0) + price


def test_none_of_a_class_that_is_not_to_be_had_or_misses_the_target() -> None:
    given = classed(snapshot(load=Load(4.0), prefill=1))
    short = replace(classed(given, "fast"), short=frozenset({("prefill", "slow")}))
    assert standbys(decided(policy({"warm_standby": 1}), short)) == {"fast": 1}
    slow = policy({"warm_standby": 1, "longest_prompt_tokens": 6000})
    assert standbys(decided(slow, given)) == {"fast": 1}


def test_at_zero_they_are_all_that_is_kept() -> None:
    rules = policy({"warm_standby": 1, "min_replicas": 0, "sleep": True}, {"min_replicas": 0}, idle_s=60)
    idle = replace(classed(snapshot(load=Load(0.0), prefill=1)), in_progress=0)
    decide, memory = make_decide(rules), None
    plan, memory = decide(memory, idle)
    plan, memory = decide(memory, replace(idle, now_s=idle.now_s + 600, wall_s=idle.wall_s + 600))
    assert (plan.prefill.desired, plan.prefill.standby, plan.decode.standby) == (0, 1, 0)
    assert plan.prefill.sleep
    assert actions(plan, [view("s", "slow", STANDBY)]) == []


def mixed(slow: int, fast: int, resting: int, units: float, **more: Any) -> ScalingPlan:
    """So many in rotation, and `resting` slow ones on standby."""
    mix = (
        ClassShare("slow", slow, 1.0, 1.0, standby=resting),
        ClassShare("fast", fast, 4.0, 3.0, gpus=2, gpu="H100"),
    )
    return ScalingPlan(PoolPlan(slow + fast, resting, units=units, mix=mix), PoolPlan(0), **more)


def actions(plan: ScalingPlan, there: list[ReplicaView]) -> list[Any]:
    found = reconcile_classes(plan, {"prefill": there, "decode": []}, BOUNDS)
    return [one for one in found if one.pool == "prefill"]


def test_a_new_standby_is_started_and_rests_once_it_is_up() -> None:
    plan, fast = mixed(0, 1, 1, 4), view("f", "fast")
    assert actions(plan, [fast]) == [Start("prefill", 1, "slow", 1)]
    assert actions(plan, [fast, view("s", "slow", STARTING)]) == []
    assert actions(plan, [fast, view("s", "slow")]) == [Rest("prefill", "s")]
    assert actions(plan, [fast, view("s", "slow", STANDBY)]) == []


def test_one_of_any_class_joins_while_those_in_rotation_do_not_carry_it() -> None:
    plan, standby = mixed(0, 1, 1, 4), view("s", "slow", STANDBY)
    starting = view("f", "fast", STARTING)
    assert actions(plan, [standby]) == [Activate("prefill", "s"), Start("prefill", 1, "fast", 2, "H100")]
    assert actions(plan, [starting, standby]) == [Activate("prefill", "s")]
    assert actions(plan, [starting, view("s", "slow")]) == [], "it stays until the fast one is up"
    assert actions(plan, [view("f", "fast"), view("s", "slow")]) == [Rest("prefill", "s")]


def test_one_of_its_own_class_takes_the_place_of_a_lost_one() -> None:
    plan = mixed(2, 0, 1, 2)
    there = [view("a", "slow"), view("b", "slow", STANDBY)]
    assert actions(plan, there) == [Activate("prefill", "b"), Start("prefill", 1, "slow", 1)]


def test_what_is_too_much_goes_and_the_standbys_stay() -> None:
    plan, resting = mixed(1, 0, 1, 1), view("r", "slow", STANDBY)
    many = [view("a", "slow"), view("b", "slow", load=2.0), resting]
    assert actions(plan, many) == [Drain("prefill", ("a",))]
    two = [view("a", "slow"), resting, view("q", "slow", STANDBY)]
    assert actions(plan, two) == [Drain("prefill", ("q",))]
    none = [view("a", "slow"), view("b", "slow", load=2.0), view("c", "slow", load=3.0)]
    assert actions(plan, none) == [Rest("prefill", "a"), Drain("prefill", ("b",))]


def test_what_is_wanted_in_rotation_is_ordered_before_standbys() -> None:
    plan = mixed(2, 0, 2, 2, budget_per_hour=3.0)
    assert actions(plan, []) == [Start("prefill", 3, "slow", 1)]
    plan = mixed(0, 2, 2, 8, budget_per_hour=7.0)
    assert actions(plan, []) == [Start("prefill", 1, "slow", 1), Start("prefill", 2, "fast", 2, "H100")]


def test_a_standby_without_room_ends_nothing_that_serves() -> None:
    plan = mixed(1, 0, 1, 1, budget_per_hour=2.0)
    there = [view("a", "slow"), view("f", "slow", ReplicaState.OVERDUE)]
    assert actions(plan, there) == [Drain("prefill", ("f",))]
    assert actions(plan, [view("a", "slow"), view("x", "slow", ReplicaState.DRAINING)]) == []


def change(budget: float, **more: Any) -> ScalingPlan:
    """From x to y, of which one costs 10, with z (5) on standby."""
    mix = (
        ClassShare("x", 0, 1.0, 10.0),
        ClassShare("y", 1, 1.0, 10.0),
        ClassShare("z", 0, 1.0, 5.0, standby=1),
    )
    return ScalingPlan(PoolPlan(1, 1, units=1, mix=mix), PoolPlan(0), budget_per_hour=budget, **more)


def test_a_standby_ends_so_that_what_is_wanted_in_rotation_can_start() -> None:
    plan, old, standby = change(20.0), view("x", "x"), view("z", "z", STANDBY)
    assert actions(plan, [old, standby]) == [Drain("prefill", ("z",))]
    going = view("z", "z", ReplicaState.DRAINING)
    assert actions(plan, [old, going]) == [], "no other one instead"
    assert actions(plan, [old]) == [Start("prefill", 1, "y", 1)]
    assert actions(plan, [old, view("y", "y")]) == [Drain("prefill", ("x",))]
    assert actions(plan, [view("y", "y")]) == [Start("prefill", 1, "z", 1)]


def test_it_stays_where_its_end_is_not_enough_and_serves_meanwhile() -> None:
    plan, old = change(17.0), view("x", "x")
    assert actions(plan, [old]) == [Start("prefill", 1, "z", 1)]
    serves = [Drain("prefill", ("x",))]
    assert actions(plan, [old, view("z", "z")]) == serves, "it does not rest now"
    assert actions(plan, [old, view("z", "z", STANDBY)]) == [Activate("prefill", "z"), *serves]
    dearer = replace(change(14.0).prefill, units=2)
    assert actions(replace(plan, prefill=dearer), [view("z", "z", STANDBY)]) == [
        Activate("prefill", "z"),
        Start("prefill", 1, "y", 1),
    ]


def test_at_zero_no_standby_takes_the_place_of_the_last() -> None:
    mix = (ClassShare("slow", 0, standby=1),)
    plan = ScalingPlan(PoolPlan(0, 1, units=0, mix=mix), PoolPlan(0))
    assert actions(plan, [view("a", "slow"), view("s", "slow", STANDBY)]) == [Drain("prefill", ("a",))]


def test_a_standby_of_the_other_pool_ends_too_and_only_one() -> None:
    mix = (ClassShare("x", 0, 1.0, 10.0), ClassShare("y", 1, 1.0, 10.0), ClassShare("z", 0, 1.0, 5.0))
    prefill = PoolPlan(1, units=1, mix=mix)
    decode = PoolPlan(1, 2, units=1, mix=(ClassShare("d", 1, 1.0, 5.0, standby=2),))
    plan = ScalingPlan(prefill, decode, budget_per_hour=30.0)
    resting = [view(name, "d", STANDBY) for name in ("e", "f")]
    there = {"prefill": [view("x", "x")], "decode": [view("d", "d"), *resting]}
    assert reconcile_classes(plan, there, BOUNDS) == (Drain("decode", ("e",)),)
    there["decode"][1] = view("e", "d", ReplicaState.DRAINING)
    assert reconcile_classes(plan, there, BOUNDS) == ()
    del there["decode"][1]
    assert reconcile_classes(plan, there, BOUNDS) == (Start("prefill", 1, "y", 1),)


def test_standbys_of_one_pool_take_no_room_of_what_the_other_serves_with() -> None:
    shares = ClassShare("z", 1, 1.0, 5.0, standby=1)
    pool = PoolPlan(1, 1, units=1, mix=(shares,))
    plan = ScalingPlan(pool, pool, budget_per_hour=10.0)
    found = reconcile_classes(plan, {"prefill": [view("p", "z")], "decode": []}, BOUNDS)
    assert found == (Start("decode", 1, "", 1),)


@pytest.mark.parametrize(("warm", "current"), [(0, 8), (1, 1), (3, 1)])
def test_after_a_restart_a_fast_standby_counts_as_no_more_than_that(warm: int, current: int) -> None:
    fast = {"name": "fast", "price_per_hour": 1, "speed": 7}
    slow = {"name": "slow", "price_per_hour": 9}
    rules = policy({"warm_standby": warm, "classes": [fast, slow]})
    seen = classed(snapshot(prefill=2))
    serves, rests = seen.prefill.replicas
    replicas = (serves, replace(rests, state=STANDBY, replica_class="fast"))
    seen = in_units(rules, replace(seen, prefill=replace(seen.prefill, replicas=replicas)))
    assert status_of(rules.prefill, "prefill", None, seen).current == current


def test_a_model_tells_others_its_standbys() -> None:
    view_ = SharedView("a", {of_class("slow"): 9.0}, {"a": {}})
    seen = replace(classed(snapshot(load=Load(4.0), prefill=1)), shared=view_)
    claim = decided(policy({"warm_standby": 1}), seen).claims["prefill"]
    assert claim.standbys == {MONEY: 1.0, of_class("slow"): 1.0, of_class("fast"): 0.0}
    assert claim.wanted is not None
    told = [claim.wanted, *(rung.uses for rung in claim.rungs)]
    assert not any(GPUS in uses for uses in told), "they are of several kinds"


def test_a_budget_gives_up_standbys_first() -> None:
    given = classed(snapshot(load=Load(8.0), prefill=1))
    rules = {"warm_standby": 2}
    plain = decided(policy(), given)
    wanted = sum(plain.pool(pool).price_per_hour or 0 for pool in ("prefill", "decode"))
    tight = decided(policy(rules, budget_per_hour=max(4.0, wanted + 1)), given)
    assert counts(tight) == counts(plain)
    assert standbys(tight) == {"slow": 1}
    assert tight.prefill.cause == plain.prefill.cause


def test_the_bill_tells_them_apart() -> None:
    plan = mixed(0, 1, 1, 4)
    bill = pool_bill(plan.prefill, [view("f", "fast"), view("s", "slow", STANDBY)])
    assert bill is not None
    assert [(one.wanted, one.standby, one.there) for one in bill.classes] == [(0, 1, 1), (1, 0, 1)]
    assert (bill.wanted_per_hour, bill.there_per_hour) == (4.0, 4.0)
    assert (bill.wanted_gpus, bill.there_gpus) == (3, 3)


@pytest.mark.parametrize("load", [2.0, 8.0, 20.0])
def test_a_steady_pool_comes_to_rest(load: float) -> None:
    """Whatever is there at first, and nothing moves from then on."""
    decide, memory, there = make_decide(policy({"warm_standby": 2, "max_replicas": 8})), None, Clusters()
    there.pools["prefill"] = [view("old", "fast", STANDBY), view("older", "slow"), view("x", "slow", STANDBY)]
    found: tuple[Any, ...] = ()
    for tick in range(60):
        plan, memory = decide(memory, there.seen(load, 2000.0 + 60 * tick))
        found = reconcile_classes(plan, there.pools, BOUNDS)
        there.act(found)
        for pool, members in there.pools.items():
            kept = [one for one in members if one.state is not ReplicaState.DRAINING]
            there.pools[pool] = [replace(one, state=READY) if one.state is STARTING else one for one in kept]
    assert found == ()
    resting = [one.replica_class for one in there.pools["prefill"] if one.state is STANDBY]
    assert sorted(resting) == sorted(name for name, n in standbys(plan).items() for _ in range(n))
    assert len(resting) == 2 or "fast" in resting
