"""Which workers a plan leaves to the coordinators' planners."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoscaler.classes.on_demand_floor import OnDemandFloor
from autoscaler.decide import make_decide
from autoscaler.leanings.movable import movable_workers
from autoscaler.leanings.side_room import SideRoom
from autoscaler.plan import ClassShare, PoolPlan, ScalingPlan
from autoscaler.policies.policy_file import parse_policy
from autoscaler.reconcile import Action, Drain, Lean, ReplicaView, Rest
from autoscaler.snapshot import (
    POOLS,
    DecodeSignals,
    PoolName,
    PrefillSignals,
    Replica,
    ReplicaState,
    Snapshot,
)

READY, STARTING = ReplicaState.READY, ReplicaState.STARTING


def view(name: str, kind: str = "", state: ReplicaState = READY, neutral: bool = True) -> ReplicaView:
    return ReplicaView(name, state, 0.0, float(name[1:]), neutral=neutral, replica_class=kind)


def pools(prefill: int, decode: int) -> dict[PoolName, list[ReplicaView]]:
    sides: dict[PoolName, list[ReplicaView]] = {
        "prefill": [view(f"p{n}") for n in range(prefill)],
        "decode": [view(f"d{n}") for n in range(decode)],
    }
    return sides


def plan(least: tuple[float, float], most: float = 9.0, **changed: Any) -> ScalingPlan:
    rooms = {pool: SideRoom(one, most) for pool, one in zip(POOLS, least, strict=True)}
    return replace(ScalingPlan(PoolPlan(3), PoolPlan(3), rooms=rooms), **changed)


def found(made: ScalingPlan, there: dict[PoolName, list[ReplicaView]], *actions: Action) -> list[str]:
    return sorted(movable_workers(made, there, actions))


def test_each_side_keeps_its_least_and_one() -> None:
    assert found(plan((1, 2)), pools(3, 3)) == ["d2", "p1", "p2"]
    assert found(plan((0, 0)), pools(1, 1)) == []
    assert found(replace(plan((1, 1)), rooms={}), pools(3, 3)) == [], "explicit counts"


def test_the_other_side_has_no_more_than_its_most() -> None:
    assert found(plan((1, 3), most=4), pools(3, 3)) == ["p2"]
    there = pools(3, 3)
    there["decode"].append(view("d9", state=STARTING))
    assert found(plan((1, 3), most=4), there) == []


def test_who_is_named_by_the_plan_is_bound_and_does_not_count() -> None:
    assert found(plan((1, 1)), pools(3, 1), Drain("prefill", ("p0",))) == ["p2"]
    assert found(plan((1, 1)), pools(3, 1), Rest("prefill", "p1"), Lean("decode", "p0")) == []
    assert found(plan((1, 3), most=4), pools(3, 3), Lean("decode", "p2")) == []


def test_pinned_ones_and_others_count_and_stay() -> None:
    there = pools(2, 0)
    there["prefill"].append(view("x0", neutral=False))
    there["decode"].append(replace(view("f0"), ours=False))
    assert found(plan((2, 1)), there) == ["p1"]


def test_with_classes_the_floor_on_demand_holds_and_what_is_of_no_use_stays() -> None:
    shares = (ClassShare("spot", 2, spot=True), ClassShare("plain", 2), ClassShare("slow", 1))
    side = PoolPlan(5, units=5.0, mix=shares, floor=OnDemandFloor(units=2.0))
    useless = replace(side, mix=(*shares[:2], replace(shares[2], most=0)))
    there: dict[PoolName, list[ReplicaView]] = {
        "prefill": [
            view("p0", "spot"),
            view("p1", "spot"),
            view("p2", "plain"),
            view("p3", "plain"),
            view("p4", "slow"),
        ],
        "decode": [view("d0", "plain")],
    }
    assert found(plan((1, 1), prefill=side, decode=side), there) == ["p0", "p1", "p4"]
    assert found(plan((1, 1), prefill=side, decode=useless), there) == ["p0", "p1"]
    assert found(plan((3, 1), prefill=side, decode=side), there) == ["p0", "p1"], "units"


@pytest.mark.parametrize(
    ("rules", "least"),
    [
        ({}, (1, 1)),
        ({"prefill": {"min_replicas": 2}}, (2, 1)),
        ({"ratio": {"min_prefill_per_decode": 1.0}}, (2, 1)),
        ({"ratio": {"max_prefill_per_decode": 1.0}}, (1, 2)),
        ({"decode": {"schedule": [{"start": "00:00", "end": "00:00", "replicas": 2}]}}, (1, 2)),
        ({"prefill": {"kind": "schedule", "min_replicas": 2}, "decode": {"min_replicas": 2}}, (2, 2)),
        ({"workers": "pinned"}, None),
        ({"prefill": {"kind": "schedule"}, "decode": {"kind": "schedule"}}, (2, 2)),
    ],
)
def test_what_an_operator_has_given_is_binding(rules: dict[str, Any], least: tuple[int, int] | None) -> None:
    own = {pool: {"kind": "slo", "target_ms": 100, "max_replicas": 4} | rules.get(pool, {}) for pool in POOLS}
    for one in own.values():
        if one["kind"] == "schedule":
            del one["target_ms"]
    policy = parse_policy({"workers": "neutral"} | rules | own)
    replicas = [Replica(f"w{n}", READY, 0.0, neutral=True) for n in range(4)]
    seen = Snapshot(0.0, PrefillSignals(tuple(replicas[:2])), DecodeSignals(tuple(replicas[2:])))
    made, _ = make_decide(policy)(None, seen)
    assert (made.prefill.desired, made.decode.desired) == (2, 2)
    assert tuple(room.least for room in made.rooms.values()) == (least or ())
