"""Neutral workers that no coordinator sees: nothing is started because it is not known where they lean."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.actuators.actuator import ActualReplica
from autoscaler.control_loop import LoopSettings
from autoscaler.plan import PoolPlan, ScalingPlan
from autoscaler.policies.policy_file import parse_policy
from autoscaler.policy_in_force import loop_settings
from autoscaler.reconcile import Bounds, Drain, Lean, ReplicaView, Start, members, reconcile
from autoscaler.snapshot import POOLS, PoolName, Replica, ReplicaState
from tests.support.scaling.fake_actuator import FakeActuator
from tests.support.scaling.neutral_loop import NeutralLoop

READY, STARTING, STANDBY, OVERDUE = (
    ReplicaState.READY,
    ReplicaState.STARTING,
    ReplicaState.STANDBY,
    ReplicaState.OVERDUE,
)


def of(*states: ReplicaState, name: str = "w", neutral: bool = True) -> list[ReplicaView]:
    return [
        ReplicaView(f"{name}{n}", state, 0.0, float(n), neutral=neutral) for n, state in enumerate(states)
    ]


def acts(
    desired: tuple[int, int], prefill: Sequence[ReplicaView], decode: Sequence[ReplicaView], standby: int = 0
) -> list[object]:
    plan = ScalingPlan(PoolPlan(desired[0]), PoolPlan(desired[1], standby))
    return list(reconcile(plan, {"prefill": prefill, "decode": decode}, dict.fromkeys(POOLS, Bounds(0, 9))))


def test_one_that_starts_for_a_pool_which_needs_it_no_more_is_the_others() -> None:
    assert acts((2, 2), of(READY, name="p"), of(READY, READY, STARTING)) == []
    assert acts((3, 2), of(READY, name="p"), of(READY, READY, STARTING)) == [Start("prefill", 1)]
    assert acts((2, 3), of(READY, name="p"), of(READY, READY, STARTING)) == [Start("prefill", 1)]
    assert acts((1, 2), of(READY, name="p"), of(READY, READY, STARTING)) == [Drain("decode", ("w2",))]
    # Once it is there.
    assert acts((2, 2), of(READY, name="p"), of(READY, READY, READY)) == [Lean("prefill", "w2")]


def test_what_cannot_lean_there_or_has_a_use_stays() -> None:
    pinned = of(STARTING, name="x", neutral=False)
    assert acts((2, 1), of(READY, name="p"), [*of(READY), *pinned]) == [
        Start("prefill", 1),
        Drain("decode", ("x0",)),
    ]
    foreign = [replace(one, ours=False) for one in of(STARTING, name="f")]
    assert Start("prefill", 1) in acts((2, 1), of(READY, name="p"), [*of(READY), *foreign])
    assert acts((2, 2), of(READY, name="p"), of(READY, READY, STANDBY), standby=1) == [Start("prefill", 1)]
    assert acts((2, 1), of(READY, name="p"), of(READY, STARTING), standby=1) == [Start("prefill", 1)]
    # One that has been given up holds the place of its own replacement.
    assert acts((2, 1), of(READY, name="p"), of(READY, OVERDUE)) == [
        Start("prefill", 1),
        Drain("decode", ("w1",)),
    ]


def test_only_what_nobody_sees_is_taken_for_what_is_started() -> None:
    actual = [ActualReplica(name, "decode", False, 0.0) for name in ("new", "pinned", "lost")]
    seen = {
        "pinned": Replica("pinned", READY, 0.0, registered=True, neutral=False),
        "lost": Replica("lost", STARTING, 0.0, registered=False, neutral=False),
    }
    for neutral in (False, True):
        found = {one.name: one.neutral for one in members("decode", actual, seen, neutral=neutral)}
        assert found == {"new": neutral, "pinned": False, "lost": neutral}


async def test_a_worker_that_is_lost_while_it_leans_elsewhere_is_not_replaced_at_once() -> None:
    loop = NeutralLoop(actuator := FakeActuator())
    await loop.tick(1, 3)
    await loop.all_seen()
    await loop.tick(3, 1)
    assert loop.sides == (3, 1)
    lost = [name for name, pool in loop.leans.items() if pool != actuator.there[name].pool]
    assert len(lost) == 2
    for name in lost:
        del loop.leans[name]
        await loop.tick(3, 1)
    assert len(actuator.calls) == 2, "the first two orders"
    await loop.all_seen()
    await loop.tick(3, 1)
    assert loop.sides == (3, 1)


async def test_all_coordinators_forget_where_everybody_leans() -> None:
    loop = NeutralLoop(actuator := FakeActuator())
    await loop.tick(1, 3)
    await loop.all_seen()
    await loop.tick(3, 1)
    leaning, loop.leans = loop.leans, {}
    for _ in range(3):
        await loop.tick(3, 1)
    loop.leans = leaning
    await loop.tick(3, 1)
    assert len(actuator.calls) == 2


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from(["seen", "forget", "one", "end"])),
        min_size=1,
        max_size=12,
    )
)
def test_whatever_is_seen_nothing_is_started_twice_and_it_ends_at_the_plan(
    rounds: list[tuple[int, int, str]],
) -> None:
    asyncio.run(follow(rounds))


async def follow(rounds: list[tuple[int, int, str]]) -> None:
    loop = NeutralLoop(actuator := FakeActuator())
    most = 0
    for prefill, decode, what in rounds:
        most = max(most, prefill + decode)
        await loop.tick(prefill, decode)
        living = [one for one in actuator.there.values() if not one.stopping]
        assert len(living) <= most, "nothing is started twice"
        if what == "seen":
            await loop.all_seen()
        elif what == "forget":
            loop.leans = {}
        elif what == "one" and loop.leans:
            loop.leans.pop(min(loop.leans))
        elif what == "end":
            actuator.end()
            loop.leans = {name: pool for name, pool in loop.leans.items() if name in actuator.there}
    prefill, decode, _ = rounds[-1]
    for _ in range(2 * most + 2):
        actuator.end()
        await loop.all_seen()
        await loop.tick(prefill, decode)
    actuator.end()
    await loop.all_seen()
    assert loop.sides == (prefill, decode)


@pytest.mark.parametrize("workers", ["pinned", "neutral"])
def test_neutral_workers_drain_for_as_long_as_either_pool_may(workers: str) -> None:
    pool = {"target_ms": 100, "max_replicas": 2}
    policy = parse_policy(
        {"workers": workers, "prefill": pool | {"drain_s": 20}, "decode": pool | {"drain_s": 90}}
    )
    drain_s: dict[PoolName, float] = {"prefill": 90.0 if workers == "neutral" else 20.0, "decode": 90.0}
    assert loop_settings(policy, LoopSettings()).drain_s == drain_s
