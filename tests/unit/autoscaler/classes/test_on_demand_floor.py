"""Pools with classes on spot machines: the floor, replacements, and what the file may say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoscaler.classes.class_actions import reconcile_classes
from autoscaler.classes.class_bill import pool_bill
from autoscaler.classes.on_demand_floor import OnDemandFloor
from autoscaler.decide import make_decide
from autoscaler.plan import ClassShare, PoolPlan, ScalingPlan
from autoscaler.policies.policy_file import ScalingPolicy, parse_policy
from autoscaler.reconcile import Action, Bounds, Drain, ReplicaView, Start
from autoscaler.snapshot import ClassSignals, PoolName, PrefillSignals, Replica, ReplicaState, Snapshot
from splitserve.errors import ConfigError
from tests.support.scaling.snapshots import Load, snapshot

READY, STARTING, PREEMPTED = ReplicaState.READY, ReplicaState.STARTING, ReplicaState.PREEMPTED
PLAIN = {"name": "plain", "price_per_hour": 3.0}
SPOT = {"name": "spot", "price_per_hour": 1.0, "spot": True}
BOUNDS: dict[PoolName, Bounds] = {"prefill": Bounds(1, 20), "decode": Bounds(1, 20)}


def policy(prefill: dict[str, Any] | None = None, **more: Any) -> ScalingPolicy:
    pool = {"max_replicas": 8, "classes": [PLAIN, SPOT]}
    schedule = {"kind": "schedule", "min_replicas": 4, **pool, **(prefill or {})}
    return parse_policy({"prefill": schedule, "decode": {"target_ms": 60, **pool}, **more})


def seen(*prefill: Replica, **more: Any) -> Snapshot:
    given = snapshot(load=Load(0.1))
    signals = PrefillSignals(prefill, tokens_per_s=5000.0, classes={"plain": ClassSignals(1, 5000.0)})
    return replace(given, prefill=signals, **more)


def replica(name: str, state: ReplicaState = READY, *, ours: bool = True) -> Replica:
    return Replica(name, state, 0.0, ours=ours, replica_class=name.rpartition("-")[0])


def decided(rules: ScalingPolicy, given: Snapshot) -> PoolPlan:
    return make_decide(rules)(None, given)[0].prefill


def counts(plan: PoolPlan) -> dict[str, int]:
    return {share.name: share.count for share in plan.mix}


@pytest.mark.parametrize(
    ("floor", "wanted"),
    [
        (0, {"plain": 0, "spot": 4}),
        (1, {"plain": 1, "spot": 3}),
        ("50%", {"plain": 2, "spot": 2}),
        ("51%", {"plain": 3, "spot": 1}),
        ("100%", {"plain": 4, "spot": 0}),
        (8, {"plain": 4, "spot": 0}),
    ],
)
def test_of_what_is_wanted_the_floor_is_on_demand(floor: int | str, wanted: dict[str, int]) -> None:
    plan = decided(policy({"on_demand_floor": floor}), seen())
    assert counts(plan) == wanted
    assert ("not on spot machines" in plan.reason) == bool(wanted["plain"])


def test_others_on_demand_replicas_are_a_part_of_the_floor() -> None:
    others = [replica("plain-0", ours=False), replica("spot-0", ours=False)]
    assert counts(decided(policy({"on_demand_floor": 2}), seen(*others))) == {"plain": 1, "spot": 1}
    assert OnDemandFloor(share=0.5, others=2.0, others_on_demand=2.0).within(2) == 0


def test_a_replacement_is_of_the_class_that_was_taken_away_unless_that_is_short() -> None:
    # A little cheaper, and not worth a start: nothing moves there because of a notice.
    third = {"name": "third", "price_per_hour": 0.99, "spot": True, "max_replicas": 8}
    rules = policy({"classes": [PLAIN, SPOT, third]})
    there = [replica(f"spot-{n}") for n in range(3)]
    plan = decided(rules, seen(*there, replica("spot-3", PREEMPTED)))
    assert counts(plan) == {"plain": 0, "spot": 4, "third": 0}
    gone = decided(rules, seen(*there, replica("spot-3", PREEMPTED), short=frozenset({("prefill", "spot")})))
    assert counts(gone) == {"plain": 0, "spot": 3, "third": 1}
    assert "no more of spot is to be had for now" in gone.reason
    both = frozenset({("prefill", "spot"), ("prefill", "third")})
    assert counts(decided(rules, seen(*there, short=both))) == {"plain": 1, "spot": 3, "third": 0}


def test_another_class_carries_only_what_the_budget_holds() -> None:
    rules = policy(
        {"min_replicas": 1, "schedule": [{"start": "00:00", "end": "00:00", "replicas": 4}]},
        budget_per_hour=9.0,
    )
    there = [replica(f"spot-{n}") for n in range(2)]
    plan = decided(rules, seen(*there, short=frozenset({("prefill", "spot")})))
    assert counts(plan) == {"plain": 1, "spot": 2}, "4 for decode, 2 and 3 here"
    assert plan.cause == "money_budget"


def test_the_bill_has_the_floor() -> None:
    plan = decided(policy({"on_demand_floor": "50%"}), seen())
    bill = pool_bill(plan, [])
    assert bill is not None
    assert (bill.fewer_per_hour, bill.wanted_per_hour, bill.more_per_hour) == (7.0, 8.0, 11.0)
    assert [line.spot for line in bill.classes] == [False, True]


def actions(there: list[ReplicaView], floor: int = 2, budget: float | None = None) -> list[Action]:
    mix = (
        ClassShare("plain", 0, price_per_hour=3.0),
        ClassShare("fast", 1, 2.0, 5.0),
        ClassShare("spot", 2, 1.0, 1.0, spot=True),
    )
    plan = PoolPlan(3, units=4, mix=mix, floor=OnDemandFloor(units=floor))
    whole = ScalingPlan(plan, PoolPlan(0), budget_per_hour=budget)
    found = reconcile_classes(whole, {"prefill": there, "decode": []}, BOUNDS)
    return [one for one in found if one.pool == "prefill"]


def view(name: str, state: ReplicaState = READY, load: float = 0.0) -> ReplicaView:
    return ReplicaView(name, state, load, 0.0, replica_class=name.rpartition("-")[0])


def test_no_on_demand_replica_ends_before_another_stands_in_its_place() -> None:
    old = [view(f"plain-{n}") for n in range(2)] + [view(f"spot-{n}") for n in range(4)]
    spare = [view("fast-0", STARTING)]
    assert actions(old)[0] == Start("prefill", 1, "fast", 1)
    first = actions([*old, *spare])
    assert [type(one) for one in first] == [Drain]
    assert isinstance(first[0], Drain)
    assert first[0].names[0].startswith("spot"), "spot machines above the floor go first"
    kept = [*old[:4], *spare]  # the units would hold without one of the old ones
    assert actions([*kept, view("spot-9", PREEMPTED, load=1.0)]) == []
    assert actions([*old[:4], view("fast-0")]) == [Drain("prefill", ("plain-0",))]


def test_where_money_is_short_the_floor_is_started_first() -> None:
    assert actions([], budget=6.0) == [Start("prefill", 1, "fast", 1), Start("prefill", 1, "spot", 1)]


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (
            {"on_demand_floor": -1},
            "prefill.on_demand_floor: must be 0 to 10000 units, or a share from 0% to 100%",
        ),
        ({"on_demand_floor": "120%"}, "prefill.on_demand_floor: must be 0 to 10000 units"),
        ({"on_demand_floor": 1.5}, "prefill.on_demand_floor: must be 0 to 10000 units"),
        ({"on_demand_floor": True}, "prefill.on_demand_floor: must be 0 to 10000 units"),
        ({"on_demand_floor": "\u0662%"}, "prefill.on_demand_floor: must be 0 to 10000 units"),
        (
            {"on_demand_floor": 6, "max_replicas": 4},
            r"prefill.on_demand_floor \(6\) must be at most max_replicas \(4\)",
        ),
        (
            {"on_demand_floor": 3, "classes": [{**PLAIN, "max_replicas": 2}, SPOT]},
            r"prefill.on_demand_floor \(3\) must be at most what the classes without spot give: 2",
        ),
        (
            {"on_demand_floor": "10%", "classes": [SPOT]},
            r"prefill.on_demand_floor \(10%\) needs classes, and one of them without spot",
        ),
        ({"on_demand_floor": 1, "classes": []}, r"prefill.on_demand_floor \(1\) needs classes"),
    ],
)
def test_a_floor_that_cannot_be_kept_is_refused(pool: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        policy(pool)


def test_a_budget_must_hold_the_floor() -> None:
    with pytest.raises(
        ConfigError, match=r"budget_per_hour \(8\) must hold min_replicas and .* both pools.*: 9"
    ):
        policy({"on_demand_floor": 2}, budget_per_hour=8)  # 2 at 3 and 2 at 1; 1 for decode
    assert policy({"on_demand_floor": 2}, budget_per_hour=9).prefill.floor == OnDemandFloor(2)
