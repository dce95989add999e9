"""What a plan makes of the replicas that exist: level-triggered, idempotent, one removal at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.actuator import ActualReplica
from autoscaler.plan import Plan, PoolPlan
from autoscaler.reconcile import Activate, Bounds, Drain, Member, Rest, Start, members, reconcile
from autoscaler.snapshot import PoolName, Replica, ReplicaState

READY, STANDBY, STARTING, DRAINING = (
    ReplicaState.READY,
    ReplicaState.STANDBY,
    ReplicaState.STARTING,
    ReplicaState.DRAINING,
)
BOUNDS: Mapping[PoolName, Bounds] = {"prefill": Bounds(1, 8), "decode": Bounds(1, 8)}
ONE = (Member("decode-0", READY, 0.0, 0.0),)


def of(*states: ReplicaState) -> list[Member]:
    """Prefill replicas in these states, the first the oldest and the most loaded."""
    return [Member(f"prefill-{n}", state, 10.0 - n, float(n)) for n, state in enumerate(states)]


def actions(desired: int, there: Sequence[Member], standby: int = 0) -> list[object]:
    plan = Plan(PoolPlan(desired, standby), PoolPlan(1))
    return list(reconcile(plan, {"prefill": there, "decode": ONE}, BOUNDS))


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
    ],
)
def test_cases(desired: int, standby: int, states: list[ReplicaState], expected: list[object]) -> None:
    assert actions(desired, of(*states), standby) == expected


def test_the_least_loaded_is_drained_and_of_equals_the_youngest() -> None:
    there = [Member("a", READY, 3, 0), Member("b", READY, 1, 1), Member("c", READY, 1, 2)]
    assert actions(2, there) == [Drain("prefill", ("c",))]


def test_what_exists_is_the_actuators_word() -> None:
    actual = [
        ActualReplica("prefill-0", "prefill", False, 5.0),
        ActualReplica("prefill-1", "prefill", True, 6.0),
        ActualReplica("prefill-2", "prefill", False, 7.0),
        ActualReplica("decode-0", "decode", False, 8.0),
    ]
    seen = {
        "prefill-0": Replica("prefill-0", READY, 0.0, 4.0),
        "prefill-1": Replica("prefill-1", READY, 0.0, 2.0),
        "somebody": Replica("somebody", READY, 0.0, 0.0),
    }
    assert members("prefill", actual, seen) == (
        Member("prefill-0", READY, 4.0, 5.0),
        Member("prefill-1", DRAINING, 2.0, 6.0),
        Member("prefill-2", STARTING, 0.0, 7.0),
    )


pools = st.lists(
    st.tuples(st.sampled_from(list(ReplicaState)), st.floats(0, 9), st.floats(0, 9)), max_size=12
).map(lambda rows: [Member(f"prefill-{n}", state, load, at) for n, (state, load, at) in enumerate(rows)])
desires = st.integers(-1, 10)
standbys = st.integers(0, 3)


@given(pools, desires, standbys)
def test_never_below_the_minimum_and_one_at_a_time(there: list[Member], desired: int, standby: int) -> None:
    done = actions(desired, there, standby)
    drained = [name for action in done if isinstance(action, Drain) for name in action.names]
    assert len(drained) <= 1
    if any(member.state is DRAINING for member in there):
        assert not drained
    assert not (drained and any(isinstance(action, Start) for action in done))
    after = apply(done, there)
    serving = [m for m in after if m.state in (READY, STARTING)]
    if drained or any(isinstance(action, Rest) for action in done):
        assert len(serving) >= BOUNDS["prefill"].min
    states = {member.name: member.state for member in there}
    if drained and states[drained[0]] is not STARTING:
        assert not [member for member in there if member.state is STARTING]


@given(pools, desires, standbys)
def test_asked_again_before_anything_happened_it_orders_nothing_twice(
    there: list[Member], desired: int, standby: int
) -> None:
    after = apply(actions(desired, there, standby), there)
    again = actions(desired, after, standby)
    assert not [action for action in again if isinstance(action, Start)]


@given(pools, desires, standbys)
def test_it_comes_to_rest_at_the_plan(there: list[Member], desired: int, standby: int) -> None:
    """Replicas that get ready and end in between; and whoever asks, from whatever state, ends the same."""
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


def apply(done: Sequence[object], there: Sequence[Member]) -> list[Member]:
    """What an actuator and the coordinators make of it at once."""
    after = {member.name: member for member in there}
    for action in done:
        match action:
            case Start(count=count):
                for number in range(count):
                    name = f"new-{len(after)}-{number}"
                    after[name] = Member(name, STARTING, 0.0, 99.0)
            case Activate(name=name):
                after[name] = replace(after[name], state=READY)
            case Rest(name=name):
                after[name] = replace(after[name], state=STANDBY)
            case Drain(names=names):
                for name in names:
                    after[name] = replace(after[name], state=DRAINING)
    return list(after.values())
