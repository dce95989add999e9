"""Actions for a plan and existing replicas: level-triggered, idempotent, one removal at a time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.plan import PoolPlan, ScalingPlan
from autoscaler.policies.policy_file import PoolPolicy
from autoscaler.reconcile import (
    Activate,
    ChangeRole,
    Drain,
    Rest,
    Start,
    planned_rotation,
    reconcile,
)
from autoscaler.snapshot import Replica, ReplicaState
from splitserve.roles import POOLS, PoolName

READY, STANDBY, STARTING, DRAINING, OVERDUE, PREEMPTED = (
    ReplicaState.READY,
    ReplicaState.STANDBY,
    ReplicaState.STARTING,
    ReplicaState.DRAINING,
    ReplicaState.OVERDUE,
    ReplicaState.PREEMPTED,
)
BOUNDS: Mapping[PoolName, PoolPolicy] = dict.fromkeys(POOLS, PoolPolicy(max_replicas=8))
TO_ZERO = dict.fromkeys(POOLS, PoolPolicy(min_replicas=0, max_replicas=8))
NUMBERS = itertools.count()


def view(
    name: str, state: ReplicaState, load: float = 0.0, created_wall_s: float = 0.0, **fields: bool
) -> Replica:
    return Replica(name, state, 0.0, load, created_wall_s=created_wall_s, **fields)


ONE = (view("decode-0", READY),)


def of(*states: ReplicaState) -> list[Replica]:
    """Prefill replicas in these states, the first the oldest and the most loaded."""
    return [view(f"prefill-{n}", state, 10.0 - n, float(n)) for n, state in enumerate(states)]


@pytest.mark.parametrize(
    ("states", "drained"),
    [
        ([STARTING], ["prefill-0"]),
        ([STARTING, STARTING], ["prefill-1"]),
        ([STARTING, DRAINING], []),
        ([READY, STARTING], ["prefill-1"]),
        ([], []),
    ],
)
def test_a_start_that_nobody_waits_for_any_more_ends(states: list[ReplicaState], drained: list[str]) -> None:
    """Else nothing is drained where no replica is seen: the coordinators may have just restarted."""
    pools = {"prefill": of(*states), "decode": ()}

    def found(plan: ScalingPlan) -> list[object]:
        return list(reconcile(plan, pools, TO_ZERO))

    given_up = ScalingPlan(PoolPlan(0, cause="to_zero"), PoolPlan(0, cause="to_zero"))
    assert found(given_up) == [Drain("prefill", (name,)) for name in drained]
    if READY not in states:
        assert found(ScalingPlan(PoolPlan(0), PoolPlan(0))) == []


def actions(
    desired: int, there: Sequence[Replica], standby: int = 0, *, paused: bool = False
) -> list[object]:
    plan = ScalingPlan(PoolPlan(desired, standby), PoolPlan(1))
    return list(reconcile(plan, {"prefill": there, "decode": ONE}, BOUNDS, ["prefill"] if paused else []))


@pytest.mark.parametrize(
    ("desired", "standby", "states", "expected"),
    [
        (2, 0, [READY, READY], []),
        (3, 0, [READY], [Start("prefill", 2)]),
        (3, 0, [READY, STARTING], [Start("prefill", 1)]),
        (3, 0, [READY, READY, DRAINING], [Start("prefill", 1)]),
        (2, 0, [READY, READY, READY], [Drain("prefill", ("prefill-2",))]),
        (1, 0, [READY, READY, DRAINING], []),
        (1, 0, [READY, STARTING, STARTING], [Drain("prefill", ("prefill-2",))]),
        (1, 0, [STARTING, STARTING], []),
        (0, 0, [READY, READY], [Drain("prefill", ("prefill-1",))]),
        (99, 0, [READY] * 7, [Start("prefill", 1)]),
        (2, 1, [READY, READY, STANDBY], []),
        (3, 1, [READY, READY, STANDBY], [Activate("prefill", "prefill-2"), Start("prefill", 1)]),
        (1, 1, [READY, READY], [Rest("prefill", "prefill-1")]),
        (1, 1, [READY, READY, STANDBY], [Drain("prefill", ("prefill-1",))]),
        (1, 0, [READY, STANDBY], [Drain("prefill", ("prefill-1",))]),
        (2, 1, [READY, STARTING, STANDBY], [Activate("prefill", "prefill-2")]),
        (2, 0, [], [Start("prefill", 2)]),
        (2, 0, [READY, OVERDUE], [Drain("prefill", ("prefill-1",))]),
        (1, 0, [READY, READY, OVERDUE], [Drain("prefill", ("prefill-2",))]),
        (3, 0, [OVERDUE, OVERDUE, OVERDUE], [Drain("prefill", ("prefill-0",))]),
        (2, 0, [READY, OVERDUE, DRAINING], []),
        (3, 0, [READY, OVERDUE], [Start("prefill", 1), Drain("prefill", ("prefill-1",))]),
    ],
)
def test_cases(desired: int, standby: int, states: list[ReplicaState], expected: list[object]) -> None:
    assert actions(desired, of(*states), standby) == expected


def test_while_starts_fail_nothing_is_ordered_and_nothing_replaced() -> None:
    assert actions(3, of(READY), paused=True) == []
    assert actions(2, of(READY, OVERDUE), paused=True) == []
    assert actions(1, of(READY, OVERDUE), paused=True) == [Drain("prefill", ("prefill-1",))]
    assert actions(1, of(READY, READY), paused=True) == [Drain("prefill", ("prefill-1",))]


def others(*states: ReplicaState) -> list[Replica]:
    """Workers that the actuator does not have."""
    return [view(f"far-{n}", state, 0.0, 0.0, ours=False) for n, state in enumerate(states)]


@pytest.mark.parametrize(
    ("desired", "standby", "ours", "far", "expected"),
    [
        (4, 0, [READY], [READY, READY], [Start("prefill", 1)]),
        (3, 0, [READY], [READY, READY], []),
        (3, 0, [READY], [READY, STARTING], []),
        (2, 0, [READY], [READY, READY], [Drain("prefill", ("prefill-0",))]),
        (2, 0, [], [READY, READY, READY], []),
        (3, 0, [READY], [READY, DRAINING], [Start("prefill", 1)]),
        (2, 1, [READY], [READY, STANDBY], []),
        (2, 1, [READY, READY], [READY], [Rest("prefill", "prefill-1")]),
    ],
)
def test_workers_of_others_are_capacity_and_are_left_alone(
    desired: int, standby: int, ours: list[ReplicaState], far: list[ReplicaState], expected: list[object]
) -> None:
    assert actions(desired, [*others(*far), *of(*ours)], standby) == expected


def test_the_least_loaded_is_drained_and_of_equals_the_youngest() -> None:
    there = [view("a", READY, 3, 0), view("b", READY, 1, 1), view("c", READY, 1, 2)]
    assert actions(2, there) == [Drain("prefill", ("c",))]


def pools_of(*states: ReplicaState) -> st.SearchStrategy[list[Replica]]:
    rows = st.lists(st.tuples(st.sampled_from(states), st.floats(0, 9), st.floats(0, 9)), max_size=12)
    return rows.map(
        lambda rows: [view(f"prefill-{n}", state, load, at) for n, (state, load, at) in enumerate(rows)]
    )


pools = pools_of(READY, STANDBY, STARTING, DRAINING)
desires = st.integers(-1, 10)
standbys = st.integers(0, 3)


@given(pools, desires, standbys)
def test_never_below_the_minimum_and_one_at_a_time(there: list[Replica], desired: int, standby: int) -> None:
    done = actions(desired, there, standby)
    drained = [name for action in done if isinstance(action, Drain) for name in action.names]
    assert len(drained) <= 1
    if any(member.state is DRAINING for member in there):
        assert not drained
    assert not (drained and any(isinstance(action, Start) for action in done))
    after = apply(done, there)
    serving = [m for m in after if m.state in (READY, STARTING)]
    if drained or any(isinstance(action, Rest) for action in done):
        assert len(serving) >= BOUNDS["prefill"].min_replicas
    states = {member.name: member.state for member in there}
    if drained and states[drained[0]] is not STARTING:
        assert not [member for member in there if member.state is STARTING]


@given(pools, desires, standbys)
def test_asked_again_before_anything_happened_it_orders_nothing_twice(
    there: list[Replica], desired: int, standby: int
) -> None:
    after = apply(actions(desired, there, standby), there)
    again = actions(desired, after, standby)
    assert not [action for action in again if isinstance(action, Start)]


@given(pools_of(*ReplicaState), desires, standbys)
def test_it_comes_to_rest_at_the_plan(there: list[Replica], desired: int, standby: int) -> None:
    """Replicas become ready and end between ticks; reconciliation converges to the plan from any state."""
    for _ in range(40):
        before, done = there, actions(desired, there, standby)
        there = [
            replace(member, state=READY) if member.state is STARTING else member
            for member in apply(done, there)
            if member.state is not DRAINING
        ]
        if there == before:
            break
    wanted = min(max(desired, 1), 8)
    assert sum(member.state is READY for member in there) == wanted
    assert sum(member.state is STANDBY for member in there) == standby


def apply(done: Sequence[object], there: Sequence[Replica]) -> list[Replica]:
    """Applies actions as an instantaneous actuator and coordinators."""
    after = {member.name: member for member in there}
    for action in done:
        match action:
            case Start(count=count):
                for _ in range(count):
                    name = f"new-{next(NUMBERS)}"
                    after[name] = view(name, STARTING, 0.0, 99.0)
            case Activate(name=name):
                after[name] = replace(after[name], state=READY)
            case Rest(name=name):
                after[name] = replace(after[name], state=STANDBY)
            case Drain(names=names):
                for name in names:
                    after[name] = replace(after[name], state=DRAINING)
    return list(after.values())


def able(name: str, load: float = 0.0) -> Replica:
    return view(name, ReplicaState.READY, load, 0.0, can_change_role=True)


def role_changes(
    desired: tuple[int, int],
    prefill: Sequence[Replica],
    decode: Sequence[Replica],
    one_shape: bool = True,
) -> tuple[object, ...]:
    plan = ScalingPlan(PoolPlan(desired[0]), PoolPlan(desired[1]), one_shape)
    bounds = dict.fromkeys(POOLS, PoolPolicy(max_replicas=9))
    return reconcile(plan, {"prefill": prefill, "decode": decode}, bounds)


def test_workers_change_roles_before_anything_starts() -> None:
    decode = [able("a", 3), able("b", 1), able("c", 2)]
    assert role_changes((2, 2), [able("p")], decode) == (ChangeRole("prefill", "b"),)
    assert role_changes((2, 2), decode, [able("p")]) == (ChangeRole("decode", "b"),)
    assert role_changes((3, 1), [able("p")], decode) == (
        ChangeRole("prefill", "b"),
        ChangeRole("prefill", "c"),
    )
    # What is missing in both pools starts.
    assert role_changes((3, 2), [able("p")], decode) == (ChangeRole("prefill", "b"), Start("prefill", 1))


def test_replicas_of_other_shapes_and_workers_that_keep_their_role_are_replaced() -> None:
    decode = [able("a"), able("b")]
    replaced = (Start("prefill", 1), Drain("decode", ("a",)))
    assert role_changes((2, 1), [able("p")], decode, one_shape=False) == replaced
    fixed = [replace(member, can_change_role=False) for member in decode]
    assert role_changes((2, 1), [able("p")], fixed) == replaced


def test_workers_of_others_keep_their_role() -> None:
    theirs = [replace(able(name), ours=False) for name in "ab"]
    assert role_changes((2, 1), [able("p")], theirs) == (Start("prefill", 1),)


def test_a_pool_that_will_have_enough_gets_no_worker_of_the_other() -> None:
    coming = view("s", ReplicaState.STARTING, 0.0, 0.0)
    assert role_changes((2, 1), [able("p"), coming], [able("a"), able("b")]) == (Drain("decode", ("a",)),)


def test_workers_with_both_roles_are_capacity_of_both_pools_and_are_left_alone() -> None:
    there = dict.fromkeys(BOUNDS, (view("b", READY, both=True),))
    plan = ScalingPlan(PoolPlan(2), PoolPlan(1))
    assert reconcile(plan, there, BOUNDS) == (Start("prefill", 1),)
    assert reconcile(ScalingPlan(PoolPlan(0), PoolPlan(0)), there, TO_ZERO) == ()
    assert planned_rotation(there, []).active == set()


@given(
    st.tuples(st.integers(1, 6), st.integers(1, 6)),
    st.tuples(st.integers(0, 6), st.integers(0, 6)),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_changes_of_roles_keep_the_total_and_end_where_the_plan_is(
    desired: tuple[int, int], counts: tuple[int, int], fixed: tuple[int, int]
) -> None:
    there = {
        name: [
            *(able(f"{name}{n}") for n in range(count)),
            *(replace(able(f"{name}x{n}"), can_change_role=False) for n in range(rest)),
        ]
        for name, count, rest in zip(("prefill", "decode"), counts, fixed, strict=True)
    }
    actions = role_changes(desired, there["prefill"], there["decode"])
    for action in (action for action in actions if isinstance(action, ChangeRole)):
        other = "decode" if action.pool == "prefill" else "prefill"
        (moved,) = [member for member in there[other] if member.name == action.name]
        there[other].remove(moved)
        there[action.pool].append(moved)
        assert there[other], "a pool keeps one"
    assert not any(
        isinstance(action, ChangeRole) for action in role_changes(desired, there["prefill"], there["decode"])
    )


def test_coordinators_are_told_the_roles_of_workers_that_can_change_them() -> None:
    there = {"prefill": [able("p"), view("v", READY, 0.0, 0.0)], "decode": [able("a"), able("b")]}
    assert planned_rotation(there, []).roles == {"p": "prefill", "a": "decode", "b": "decode"}
    assert planned_rotation(there, [ChangeRole("prefill", "b")]).roles["b"] == "prefill"


def test_a_preempted_replica_is_replaced_at_once_and_told_to_end_once_it_is_empty() -> None:
    busy = of(READY, PREEMPTED)
    assert actions(2, busy) == [Start("prefill", 1)]
    assert actions(2, busy, paused=True) == []
    empty = [replace(member, load=0.0) for member in busy]
    assert actions(2, empty) == [Start("prefill", 1), Drain("prefill", ("prefill-1",))]
    assert actions(1, empty) == [Drain("prefill", ("prefill-1",))]
    theirs = [replace(member, ours=False) for member in empty]
    assert actions(2, theirs) == [Start("prefill", 1)]


def test_where_everything_is_once_the_actions_are_done() -> None:
    pools: dict[PoolName, Sequence[Replica]] = {
        "prefill": of(READY, READY, STANDBY, STANDBY),
        "decode": ONE,
    }
    here = planned_rotation(pools, [])
    assert here.standby == {"prefill-2", "prefill-3"}
    assert here.active == {"prefill-0", "prefill-1", "decode-0"}
    assert "prefill-2" in planned_rotation(pools, [Activate("prefill", "prefill-2")]).active
    resting = planned_rotation(pools, [Rest("prefill", "prefill-1")])
    assert resting.standby == {"prefill-1", "prefill-2", "prefill-3"}
    ending = planned_rotation(pools, [Drain("prefill", ("prefill-0", "prefill-2"))])
    assert ending.standby == {"prefill-0", "prefill-2", "prefill-3"}


def test_workers_of_others_are_never_put_on_standby() -> None:
    there = [replace(member, ours=False) for member in of(STANDBY)]
    assert planned_rotation({"prefill": there, "decode": ONE}, []).standby == set()
