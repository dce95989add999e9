"""A budget of GPUs over classes: each replica counts the GPUs of its class."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.classes.class_actions import reconcile_classes
from autoscaler.classes.class_shares import gpus_there, price_per_hour
from autoscaler.decide import make_decide
from autoscaler.plan import ClassShare, PoolPlan, ScalingPlan
from autoscaler.policies.policy_file import ScalingPolicy, parse_policy
from autoscaler.reconcile import Drain, Start
from autoscaler.snapshot import POOLS, Snapshot
from splitserve.errors import ConfigError
from tests.support.classes.classed_pools import (
    BOUNDS,
    Clusters,
    classed,
    counts,
    decided,
    policy,
    view,
)
from tests.support.scaling.snapshots import Load, snapshot

SLOW = {"name": "slow", "gpu": "L40S", "price_per_hour": 1, "max_replicas": 20}
FAST = {"name": "fast", "gpu": "H100", "price_per_hour": 5, "speed": 4, "max_replicas": 20}
BOTH = {"classes": [SLOW, FAST]}
"""For a unit the slow class is the cheaper one, and the fast one takes fewer GPUs."""


def rules(budget: int | None = None, prefill: dict[str, Any] | None = None, **more: Any) -> ScalingPolicy:
    limit = {} if budget is None else {"gpu_budget": budget}
    return policy(BOTH | (prefill or {}), BOTH, **limit, **more)


def gpus(plan: ScalingPlan) -> int:
    return sum((one.count + one.standby) * one.gpus for pool in POOLS for one in plan.pool(pool).mix)


def seen(load: float, prefill: int = 1) -> Snapshot:
    return classed(snapshot(load=Load(load), prefill=prefill))


def test_where_gpus_are_short_classes_with_fewer_are_taken() -> None:
    """The same capacity for more money, before any capacity is given up."""
    free = decided(rules(), seen(8.0))
    tight = decided(rules(gpus(free) - 2), seen(8.0))
    assert counts(free) == {"slow": counts(free)["slow"], "fast": 0}
    assert gpus(tight) <= gpus(free) - 2
    for pool in POOLS:
        assert tight.pool(pool).capacity == free.pool(pool).capacity
        assert tight.pool(pool).cause == free.pool(pool).cause
    assert sum(counts(tight, pool)["fast"] for pool in POOLS) > 0
    assert tight.gpu_budget == gpus(free) - 2


def test_then_less_is_wanted_and_the_reason_says_so() -> None:
    plan = decided(rules(3), seen(60.0))
    assert gpus(plan) == 3
    assert "gpu_budget" in {plan.prefill.cause, plan.decode.cause}
    assert "within a budget of 3 GPUs" in plan.prefill.reason + plan.decode.reason


def test_standbys_have_what_is_left() -> None:
    free = decided(rules(), seen(4.0))
    left = decided(rules(max(3, gpus(free) + 1), {"warm_standby": 2}), seen(4.0))
    assert counts(left) == counts(free)
    assert left.prefill.standby == max(3, gpus(free) + 1) - gpus(free)


def test_replicas_of_others_take_theirs() -> None:
    given_ = seen(60.0, 2)
    replicas = tuple(replace(one, ours=False) for one in given_.prefill.replicas)
    foreign = replace(given_, prefill=replace(given_.prefill, replicas=replicas))
    assert decided(rules(6), foreign).gpu_budget == 4
    assert gpus(decided(rules(6), foreign)) <= 4


def test_money_and_gpus_together() -> None:
    plan = decided(rules(6, budget_per_hour=14.0), seen(60.0))
    assert gpus(plan) <= 6
    assert sum(plan.pool(pool).price_per_hour or 0 for pool in POOLS) <= 14.0


def test_a_replacement_waits_for_the_gpus_of_the_old_ones() -> None:
    slow, fast = ClassShare("slow", 0, gpus=1), ClassShare("fast", 1, 4.0, gpus=2, gpu="H100")
    mix = (slow, fast)
    plan = ScalingPlan(PoolPlan(1, units=4, mix=mix), PoolPlan(0, units=0, mix=(slow,)), gpu_budget=4)
    old = [view(f"s{n}", "slow") for n in range(4)]
    assert reconcile_classes(plan, {"prefill": old, "decode": []}, BOUNDS) == (Drain("prefill", ("s0",)),)
    found = reconcile_classes(plan, {"prefill": old[:2], "decode": []}, BOUNDS)
    assert found == (Start("prefill", 1, "fast", 2, "H100"),)


def test_one_pool_without_classes_has_no_gpus_to_count() -> None:
    with pytest.raises(ConfigError, match=r"gpu_budget .* needs classes in both pools or in none"):
        parse_policy({"gpu_budget": 4, "prefill": {"target_ms": 1, **BOTH}, "decode": {"target_ms": 1}})


@settings(max_examples=12, deadline=None)
@given(
    st.data(),
    st.sampled_from([4, 6, 12]),
    st.sampled_from([None, 9.0, 25.0]),
    st.lists(st.floats(0.5, 60), min_size=4, max_size=10),
)
def test_no_moment_takes_more_than_the_budgets(
    data: st.DataObject, budget: int, money: float | None, loads: list[float]
) -> None:
    more = {} if money is None else {"budget_per_hour": money}
    decide, memory, there = make_decide(rules(budget, {"warm_standby": 1}, **more)), None, Clusters()
    for tick, load in enumerate(loads):
        plan, memory = decide(memory, there.seen(load, 2000.0 + 60 * tick))
        assert gpus(plan) <= budget
        there.act(reconcile_classes(plan, there.pools, BOUNDS))
        assert sum(gpus_there(plan.pool(pool), there.pools[pool]) for pool in POOLS) <= budget
        if money is not None:
            spent = sum(price_per_hour(plan.pool(pool), there.pools[pool]) for pool in POOLS)
            assert spent <= money + 1e-6
        there.pass_time(data)
