"""A limit by kind of GPU over classes of different sizes: one of one GPU and one of four share the H100s."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.classes.class_actions import reconcile_classes
from autoscaler.classes.class_shares import gpus_there
from autoscaler.decide import make_decide
from autoscaler.plan import ClassShare, PoolPlan, ScalingPlan
from autoscaler.policies.first_workers import first_workers
from autoscaler.policies.policy_file import ScalingPolicy
from autoscaler.reconcile import Drain, Start
from autoscaler.sharing.claims.shares import counted_in, of_kind
from autoscaler.snapshot import POOLS, Snapshot
from splitserve.errors import ConfigError
from tests.support.classes.classed_pools import BOUNDS, Clusters, classed, decided, policy, view
from tests.support.classes.neutral_pools import NeutralClusters
from tests.support.scaling.snapshots import Load, snapshot

H100 = of_kind("H100")
ONE = {"name": "slow", "gpu": "H100", "price_per_hour": 2, "max_replicas": 30}
FOUR = {
    "name": "fast",
    "gpu": "NVIDIA H100 80GB",
    "gpus_per_replica": 4,
    "price_per_hour": 7,
    "speed": 4,
    "max_replicas": 30,
}
OLD = {"name": "old", "gpu": "L40S", "price_per_hour": 3, "max_replicas": 30}
ALL = {"classes": [ONE, FOUR, OLD]}


def rules(limit: int | None = 8, **more: Any) -> ScalingPolicy:
    limits = {} if limit is None else {"gpu_limits": {"H100": limit}}
    return policy(ALL, ALL, **limits, **more)


def seen(load: float) -> Snapshot:
    return classed(snapshot(load=Load(load)))


def of_h100(plan: ScalingPlan) -> int:
    mixes = [one for pool in POOLS for one in plan.pool(pool).mix if H100 in one.kinds]
    return sum((one.count + one.standby) * one.gpus for one in mixes)


def test_which_classes_count() -> None:
    names = [H100, of_kind("80gb H100"), of_kind("L40"), "gpus", "class H100"]
    assert counted_in("NVIDIA H100 80GB HBM3", names) == (H100, of_kind("80gb H100"))
    assert counted_in("H100", names) == (H100,)
    assert counted_in("L40S", names) == ()
    assert counted_in("", names) == (), "of no kind"
    assert counted_in("H100 MIG 3g.40gb", names) == (), "a slice is no whole GPU"


@pytest.mark.parametrize("workers", ["pinned", "neutral"])
def test_both_sizes_share_the_limit_and_others_do_what_is_left(workers: str) -> None:
    free = decided(rules(None, workers=workers), seen(30.0))
    assert sum(one.count * one.gpus for pool in POOLS for one in free.pool(pool).mix) > 8
    plan = decided(rules(8, workers=workers), seen(30.0))
    assert 4 < of_h100(plan) <= 8
    old = sum(one.count for pool in POOLS for one in plan.pool(pool).mix if one.name == "old")
    assert old > 0
    for pool in POOLS:
        assert plan.pool(pool).capacity == free.pool(pool).capacity


@pytest.mark.parametrize("workers", ["pinned", "neutral"])
def test_where_there_is_nothing_else_less_is_wanted_and_the_reason_says_so(workers: str) -> None:
    two = {"classes": [ONE, FOUR]}
    plan = decided(policy(two, two, gpu_limits={"H100": 8}, workers=workers), seen(60.0))
    assert of_h100(plan) == 8
    assert "within 8 GPUs of kind H100" in plan.prefill.reason + plan.decode.reason
    assert "gpu_budget" in {plan.prefill.cause, plan.decode.cause}


def test_a_replacement_waits_for_the_gpus_of_its_kind() -> None:
    small, big = ClassShare("slow", 0, kinds=(H100,)), ClassShare("fast", 1, 4.0, gpus=4, kinds=(H100,))
    plan = ScalingPlan(
        PoolPlan(1, units=4, mix=(small, big)), PoolPlan(0, units=0, mix=(small,)), gpu_limits={H100: 8}
    )
    old = [view(f"s{n}", "slow") for n in range(5)]
    assert reconcile_classes(plan, {"prefill": old, "decode": []}, BOUNDS) == (Drain("prefill", ("s0",)),)
    found = reconcile_classes(plan, {"prefill": old[:4], "decode": []}, BOUNDS)
    assert found == (Start("prefill", 1, "fast", 4),)


@pytest.mark.parametrize(
    ("limits", "more", "error"),
    [
        ({"A100": 8}, {}, "gpu_limits names A100, which is the gpu of no class"),
        ({"H100": 2}, {"classes": [FOUR | {"speed": 1}]}, "gpu_limits must hold min_replicas of prefill: 1"),
        ({"H100": 8}, {"classes": []}, "gpu_limits need prefill.classes"),
        ({"H100": 0}, {}, "gpu_limits.H100: Input should be greater than or equal to 1"),
        ({"MIG; rm": 1}, {}, "gpu_limits"),
        ({f"k{n}": 1 for n in range(17)}, {}, "gpu_limits"),
    ],
)
def test_what_limits_must_keep(limits: dict[str, int], more: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        policy(ALL | more, ALL, gpu_limits=limits)


def test_the_first_workers_are_within_the_limit() -> None:
    least = {"min_replicas": 3}
    found = first_workers(policy(ALL | least, ALL | least, gpu_limits={"H100": 3}, workers="neutral"), {})
    assert sum({"slow": 1, "fast": 4, "old": 0}[name] for name in found["worker"]) <= 3
    with pytest.raises(ConfigError, match="more than gpu_limits has"):
        first_workers(policy(ALL, ALL, gpu_limits={"H100": 3}), {"prefill": 4})


@settings(max_examples=12, deadline=None)
@given(
    st.data(),
    st.sampled_from([4, 6, 13]),
    st.booleans(),
    st.lists(st.floats(0.5, 60), min_size=4, max_size=10),
)
def test_no_moment_takes_more_of_the_kind(
    data: st.DataObject, limit: int, neutral: bool, loads: list[float]
) -> None:
    """Also where another limit binds, and while old and new replicas are there together."""
    there = NeutralClusters() if neutral else Clusters()
    workers = "neutral" if neutral else "pinned"
    decide, memory = make_decide(rules(limit, workers=workers, gpu_budget=limit + 6)), None
    for tick, load in enumerate(loads):
        given_ = there.seen(load, 2000.0 + 60 * tick)
        plan, memory = decide(memory, given_)
        assert of_h100(plan) <= limit
        if isinstance(there, NeutralClusters):
            there.carry_out(plan)
        else:
            there.act(reconcile_classes(plan, there.pools, BOUNDS))
        assert sum(gpus_there(plan.pool(pool), there.pools[pool], H100) for pool in POOLS) <= limit
        there.pass_time(data)
