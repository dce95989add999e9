"""Neutral workers of several classes: what a policy must keep, decisions, changes of sides, and the budgets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from autoscaler.classes.class_actions import reconcile_classes
from autoscaler.classes.class_bill import pool_bill
from autoscaler.classes.class_shares import gpus_there, price_per_hour
from autoscaler.decide import make_decide
from autoscaler.plan import ClassShare, PoolPlan, ScalingPlan
from autoscaler.reconcile import Drain, Lean, ReplicaView, Start
from autoscaler.snapshot import POOLS, PoolName, ReplicaState, Snapshot
from splitserve.errors import ConfigError
from tests.support.classes.classed_pools import BOUNDS, counts, decided
from tests.support.classes.neutral_pools import (
    BIG,
    DECODE,
    PREFILL,
    SMALL,
    NeutralClusters,
    neutral_policy,
    worker,
)
from tests.support.scaling.snapshots import Load, snapshot

STARTING, DRAINING, STANDBY = ReplicaState.STARTING, ReplicaState.DRAINING, ReplicaState.STANDBY


@pytest.mark.parametrize(
    ("decode", "more", "error"),
    [
        (
            {"classes": []},
            {},
            "decode.classes of neutral workers must be those of prefill, .*: there are 2 and 0",
        ),
        ({"classes": [SMALL]}, {}, "there are 2 and 1"),
        (
            {"classes": [SMALL, {**BIG, "price_per_hour": 4}]},
            {},
            "decode.classes.1.price_per_hour of neutral workers must be that of prefill, 3, not 4",
        ),
        ({"classes": [SMALL, {**BIG, "name": "huge"}]}, {}, "decode.classes.1.name .* 'big', not 'huge'"),
        ({"classes": [SMALL, {**BIG, "spot": True}]}, {}, "decode.classes.1.spot .* False, not True"),
        ({"classes": [SMALL, {**BIG, "max_replicas": 3}]}, {}, r"decode.classes.1.max_replicas .* 20, not 3"),
        (
            {"classes": [SMALL, {**BIG, "gpus_per_replica": 2}]},
            {},
            "decode.classes.1.gpus_per_replica of neutral workers must be that of prefill, 1, not 2",
        ),
        (
            {"min_replicas": 2},
            {"budget_per_hour": 2.5},
            r"budget_per_hour \(2.5\) must hold min_replicas .*: 3",
        ),
        ({}, {"gpu_budget": 1}, r"gpu_budget \(1\) must hold min_replicas .*: 2"),
    ],
)
def test_what_both_price_lists_have_in_common(
    decode: dict[str, Any], more: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        neutral_policy(decode=decode, **more)


def at(load: float) -> Snapshot:
    """Under this load, with two small workers on each side."""
    there = NeutralClusters()
    for pool in POOLS:
        there.pools[pool] = [worker(f"{pool}-{n}", "small") for n in range(2)]
    return there.seen(load, 1800.0)


def both(plan: ScalingPlan) -> dict[PoolName, dict[str, int]]:
    return {pool: counts(plan, pool) for pool in POOLS}


def test_each_side_has_the_capacity_that_pinned_workers_would_have() -> None:
    for load in (2.0, 8.0, 30.0):
        plan = decided(neutral_policy(), at(load))
        assert plan.one_price_list
        for pool in POOLS:
            speeds = {share.name: share.speed for share in plan.pool(pool).mix}
            carried = sum(speeds[name] * count for name, count in counts(plan, pool).items())
            assert carried >= (plan.pool(pool).units or 0) - 1e-9
            assert "an hour" in plan.pool(pool).reason


def test_one_limit_of_a_class_is_for_both_sides() -> None:
    classes = (
        [SMALL, {**BIG, "speed": 5, "max_replicas": 2}],
        [SMALL, {**BIG, "speed": 3.5, "max_replicas": 2}],
    )
    plan = decided(neutral_policy({"classes": classes[0]}, {"classes": classes[1]}), at(60.0))
    assert sum(mix["big"] for mix in both(plan).values()) == 2


def test_where_the_classes_do_not_reach_both_get_a_share() -> None:
    few = {"max_replicas": 3}
    classes = (
        [{**SMALL, **few}, {**BIG, "speed": 5, **few}],
        [{**SMALL, **few}, {**BIG, "speed": 3.5, **few}],
    )
    plan = decided(neutral_policy({"classes": classes[0]}, {"classes": classes[1]}), at(90.0))
    assert {name: sum(mix[name] for mix in both(plan).values()) for name in ("small", "big")} == {
        "small": 3,
        "big": 3,
    }
    assert all(sum(mix.values()) for mix in both(plan).values())
    assert "bounds" in {plan.pool(pool).cause for pool in POOLS}


def test_a_class_that_is_short_on_one_side_is_so_on_the_other() -> None:
    seen = at(30.0)
    assert sum(mix["big"] for mix in both(decided(neutral_policy(), seen)).values()) > 0
    short = replace(seen, short=frozenset({("prefill", "big")}))
    assert sum(mix["big"] for mix in both(decided(neutral_policy(), short)).values()) == 0


def test_a_class_that_is_too_slow_for_prompts_may_decode() -> None:
    rules = neutral_policy({"longest_prompt_tokens": 6000})
    mixes = both(decided(rules, at(4.0)))
    assert mixes["prefill"]["small"] == 0
    assert mixes["decode"]["small"] > 0


def test_one_worker_for_both_sides_is_of_a_class_that_computes_prompts_in_time() -> None:
    least = {"min_replicas": 0}
    for tokens, kind in ((1000, "small"), (6000, "big")):
        rules = neutral_policy({**least, "longest_prompt_tokens": tokens}, least)
        there = NeutralClusters()
        there.pools["decode"] = [worker("d", "small")]
        mixes = both(decided(rules, there.seen(1.0, 1800.0)))
        assert mixes["prefill"] == {"small": 0, "big": 0}
        assert mixes["decode"] == {"small": 0, "big": 0, kind: 1}


def test_a_floor_on_each_side_is_not_of_spot_machines() -> None:
    classes = [SMALL, {**SMALL, "name": "spot", "price_per_hour": 0.3, "spot": True}]
    pool = {"classes": classes, "on_demand_floor": "50%"}
    plan = decided(neutral_policy(pool, pool), at(12.0))
    for side in POOLS:
        mix, units = counts(plan, side), plan.pool(side).units or 0
        assert mix["small"] >= units / 2
        assert mix["spot"] == units - mix["small"]


@pytest.mark.parametrize("load", [12.0, 20.0])
def test_a_budget_buys_the_floor_of_both_sides_before_anything_else(load: float) -> None:
    """Four of 3 an hour would hold the floors; the budget has two: fewer units, not spot machines."""
    classes = [
        {**SMALL, "price_per_hour": 3},
        {**SMALL, "name": "spot", "price_per_hour": 0.1, "spot": True},
    ]
    pool = {"classes": classes, "on_demand_floor": "50%"}
    there = NeutralClusters()
    for side in POOLS:
        there.pools[side] = [worker(f"{side}-0", "small")]
    plan = decided(neutral_policy(pool, pool, budget_per_hour=7), there.seen(load, 1800.0))
    for side in POOLS:
        mix, found = counts(plan, side), plan.pool(side)
        assert mix["small"] >= (found.units or 0) / 2 > 0
        assert "all that there are" not in found.reason
    assert plan.prefill.cause == "money_budget"
    assert "wanted, 2 within a budget of 7 an hour" in plan.prefill.reason


def test_a_floor_that_the_classes_do_not_give_is_carried_by_spot_machines() -> None:
    """With a budget as without: one of `small` on both sides, and a floor on each."""
    classes = [
        {**SMALL, "max_replicas": 1},
        {**SMALL, "name": "spot", "price_per_hour": 0.1, "spot": True},
    ]
    pool = {"classes": classes, "on_demand_floor": "50%"}
    for more in ({}, {"budget_per_hour": 50}):
        plan = decided(neutral_policy(pool, pool, **more), at(12.0))
        assert sum(mix["small"] for mix in both(plan).values()) == 1
        for side in POOLS:
            assert sum(counts(plan, side).values()) == plan.pool(side).units
        told = plan.prefill.reason + plan.decode.reason
        assert (
            "all that max_replicas of the classes give on both sides" in told or "all that there are" in told
        )
        assert "within a budget" not in told


def share(name: str, count: int, speed: float = 1.0, **more: Any) -> ClassShare:
    return ClassShare(name, count, speed, {"small": 1.0, "mid": 2.0}.get(name, 3.0), most=20, **more)


def planned(prefill: dict[str, int], decode: dict[str, int], **more: Any) -> ScalingPlan:
    """Units as these replicas carry: small 1, mid 2, big 4."""
    speeds, pools = {"small": 1.0, "mid": 2.0, "big": 4.0}, []
    for side in (prefill, decode):
        mix = tuple(share(name, side.get(name, 0), speed) for name, speed in speeds.items())
        units = sum(speeds[name] * count for name, count in side.items())
        pools.append(PoolPlan(sum(side.values()), units=units, mix=mix))
    return ScalingPlan(*pools, one_price_list=True, **more)


def acted(plan: ScalingPlan, prefill: list[ReplicaView], decode: list[ReplicaView], **more: Any) -> list[Any]:
    return list(reconcile_classes(plan, {"prefill": prefill, "decode": decode}, BOUNDS, **more))


def test_one_that_is_too_much_leans_to_the_side_that_lacks_it() -> None:
    there = [worker("a", "small", load=2), worker("b", "small", load=1)]
    plan = planned({"small": 2}, {"small": 1})
    assert acted(plan, [worker("p", "small")], there) == [Lean("prefill", "b")]
    assert acted(plan, [worker("p", "small"), there[1]], there[:1]) == []
    pinned = [replace(one, neutral=False) for one in there]
    assert acted(plan, [worker("p", "small")], pinned) == [
        Start("prefill", 1, "small", 1),
        Drain("decode", ("b",)),
    ]


def test_nobody_leaves_a_side_that_does_not_carry_without() -> None:
    """What replaces it there starts first, and nothing is started in its place here meanwhile."""
    plan = planned({"big": 1}, {"small": 4})
    decode = [worker("big", "big")]
    first = acted(plan, [], decode)
    assert first == [Start("decode", 4, "small", 1)]
    coming = [worker(f"s{n}", "small", STARTING) for n in range(4)]
    assert acted(plan, [], [*decode, *coming]) == []
    ready = [worker(f"s{n}", "small") for n in range(4)]
    assert acted(plan, [], [*decode, *ready]) == [Lean("prefill", "big")]


def test_sides_that_change_places_do_so_at_once() -> None:
    small = [worker(f"s{n}", "small") for n in range(4)]
    found = acted(planned({"small": 4}, {"big": 1}), [worker("big", "big")], small)
    assert sorted(found, key=str) == sorted(
        [*(Lean("prefill", one.name) for one in small), Lean("decode", "big")], key=str
    )
    # Not while one of them is missing: each side goes on with what it has.
    assert acted(planned({"small": 4}, {"big": 1}), [worker("big", "big")], small[:3]) == [
        Start("prefill", 1, "small", 1)
    ]


def test_what_starts_counts_on_either_side() -> None:
    there = [worker("a", "big", STARTING)]
    assert acted(planned({"big": 1}, {"small": 1}), [], [worker("s", "small"), *there]) == []


def test_one_that_is_too_much_helps_the_other_side_out_until_its_own_are_up() -> None:
    """Prefill lacks two of a class that decode has none of: the big one, which is to end, leans there meanwhile."""
    plan = planned({"small": 3}, {"small": 1})
    prefill, decode = [worker("p", "small")], [worker("d", "small"), worker("big", "big")]
    assert acted(plan, prefill, decode) == [Lean("prefill", "big"), Start("prefill", 2, "small", 1)]
    coming = [worker(f"n{n}", "small", STARTING) for n in range(2)]
    assert acted(plan, [*prefill, decode[1], *coming], decode[:1]) == []
    up = [worker(f"n{n}", "small") for n in range(2)]
    assert acted(plan, [*prefill, decode[1], *up], decode[:1]) == [Drain("prefill", ("big",))]


def test_workers_of_others_stay_where_they_lean() -> None:
    theirs = [replace(worker(f"o{n}", "small"), ours=False) for n in range(2)]
    assert acted(planned({"small": 1}, {}), [], theirs) == [Start("prefill", 1, "small", 1)]


def test_a_class_that_pauses_does_so_on_both_sides() -> None:
    assert acted(planned({"big": 1}, {"small": 1}), [], [], paused=[("decode", "big")]) == [
        Start("decode", 1, "small", 1)
    ]


def test_one_side_gives_what_the_other_waits_for() -> None:
    """No room for a mid one beside all that is there; prefill has a big one too many, and still serves without."""
    plan = planned({"small": 1}, {"mid": 2}, budget_per_hour=8.0)
    prefill, decode = [worker("b0", "big"), worker("b1", "big")], [worker("m", "mid")]
    found = acted(plan, prefill, decode)
    assert len([one for one in found if isinstance(one, Drain)]) == 1
    assert not [one for one in found if isinstance(one, Start)]


def test_a_floor_keeps_the_one_that_holds_it_on_its_side() -> None:
    """The on-demand one of decode is wanted in prefill, but decode's replacement for it is not up."""
    spot = [share("small", 1), share("spot", 1, spot=True)]
    units = PoolPlan(2, units=2, mix=tuple(spot), floor=neutral_policy({"on_demand_floor": 1}).prefill.floor)
    plan = ScalingPlan(units, units, one_price_list=True)
    prefill = [worker("s0", "spot"), worker("s1", "spot")]
    decode = [worker("d0", "small"), worker("d1", "small")]
    assert sorted(acted(plan, prefill, decode), key=str) == [Lean("decode", "s0"), Lean("prefill", "d0")]


def test_the_bill_of_one_side_has_no_more_of_a_class_than_the_other_leaves() -> None:
    """Both big ones are taken: one unit more is not to be had, whatever it would cost."""
    mix = (ClassShare("big", 1, 4.0, 3.0, most=2),)
    side = PoolPlan(1, units=4, mix=mix)
    alone, beside = pool_bill(side, []), pool_bill(side, [], side)
    assert alone is not None
    assert beside is not None
    assert (alone.more_per_hour, beside.more_per_hour) == (6.0, 3.0)
    held = pool_bill(side, [], replace(side, mix=(replace(mix[0], count=0, standby=1),)))
    assert held is not None
    assert held.more_per_hour == 3.0


LOADS = st.lists(st.floats(0.5, 60), min_size=4, max_size=10)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, phases=[Phase.generate])
@given(st.data(), st.sampled_from([4.0, 7.5, 12.0, 30.0]), st.sampled_from([None, 4, 7]), LOADS)
def test_no_moment_exceeds_a_budget(
    data: st.DataObject, budget: float, gpus: int | None, loads: list[float]
) -> None:
    """Nor the limit of a class. Nobody leans away from a side that has nobody else; somebody serves at all times."""
    limited = [{**one, "max_replicas": 5} for one in (*PREFILL, *DECODE)]
    rules = neutral_policy(
        {"classes": limited[:2], "payback_s": 600, "warm_standby": 1},
        {"classes": limited[2:], "payback_s": 600},
        budget_per_hour=budget,
        **({} if gpus is None else {"gpu_budget": gpus}),
    )
    decide, memory, there = make_decide(rules), None, NeutralClusters()
    for tick, load in enumerate(loads):
        plan, memory = decide(memory, there.seen(load, 2000.0 + 60 * tick))
        assert sum(plan.pool(pool).price_per_hour or 0 for pool in POOLS) <= budget + 1e-6
        served = [pool for pool in POOLS if there.serving(pool)]
        before = {kind: there.of_class(kind) for kind in ("small", "big")}
        there.carry_out(plan)
        assert sum(price_per_hour(plan.pool(pool), there.pools[pool]) for pool in POOLS) <= budget + 1e-6
        if gpus is not None:
            assert sum(gpus_there(plan.pool(pool), there.pools[pool]) for pool in POOLS) <= gpus
        for kind, count in before.items():
            assert there.of_class(kind) <= max(5, count)
        assert any(there.serving(pool) for pool in POOLS) or not served
        there.pass_time(data)
        if data.draw(st.integers(0, 3)) == 0:
            there.take_away(data)


@pytest.mark.slow
@settings(max_examples=6, deadline=None, phases=[Phase.generate])
@given(LOADS, st.sampled_from([None, 12.0]))
def test_under_a_steady_load_everything_comes_to_rest(loads: list[float], budget: float | None) -> None:
    """Nobody changes sides for ever, and nothing is started and ended in turns."""
    money = {} if budget is None else {"budget_per_hour": budget}
    decide, memory, there = make_decide(neutral_policy(**money)), None, NeutralClusters()
    now_s = 2000.0
    for load in loads[:3]:
        quiet = 0
        for _ in range(25):
            plan, memory = decide(memory, there.seen(load, now_s))
            quiet = 0 if there.carry_out(plan) else quiet + 1
            there.all_come_up()
            now_s += 30.0
        assert quiet > 3, (load, there.pools, plan)


def test_a_plain_snapshot_of_neutral_workers_without_classes_is_decided_as_before() -> None:
    rules = neutral_policy({"classes": []}, {"classes": []})
    plan = decided(rules, snapshot(load=Load(8.0)))
    assert not plan.one_price_list
    assert plan.prefill.mix == ()
