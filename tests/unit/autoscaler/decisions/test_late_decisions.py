"""The control loop while a decision takes long, with pauses that end when they are told to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from autoscaler.control_loop import PolicyChange
from autoscaler.plan import Memory, PoolPlan, ScalingPlan
from autoscaler.reconcile import Bounds
from autoscaler.snapshot import POOLS, PoolName, ReplicaState, Snapshot
from splitserve.errors import UnavailableError
from tests.support.waiting import PATIENCE_S
from tests.unit.autoscaler.test_control_loop import DOWN, Stuck, World

pytestmark = pytest.mark.timeout(60)
TURNS = 200
"""Of the event loop: a loop that spins looks in each third or so."""


class Pauses:
    """Each lasts until it is ended, or by what the loop waits for beside it."""

    def __init__(self) -> None:
        self.begun, self.left_s = asyncio.Queue[asyncio.Event](), list[float]()

    async def pause(self, left_s: float) -> None:
        end = asyncio.Event()
        self.left_s.append(left_s)
        self.begun.put_nowait(end)
        await end.wait()

    async def next(self) -> asyncio.Event:
        async with asyncio.timeout(PATIENCE_S):
            return await self.begun.get()


@asynccontextmanager
async def running(world: World) -> AsyncIterator[Pauses]:
    pauses = Pauses()
    world.loop.pause = world.loop.rest = pauses.pause
    task = asyncio.create_task(world.loop.run())
    try:
        yield pauses
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


def blind(world: World, down: UnavailableError | None) -> None:
    world.blind = down


def without_actuator(world: World, down: UnavailableError | None) -> None:
    world.actuator.failure = down


@pytest.mark.parametrize("fail", [blind, without_actuator])
async def test_a_decision_that_has_ended_wakes_a_loop_that_cannot_look_once(
    fail: Callable[[World, UnavailableError | None], None],
) -> None:
    world, looks = World(), 0
    stuck, observe = Stuck(world), world.loop.observe

    async def counted() -> Snapshot:
        nonlocal looks
        looks += 1
        return await observe()

    world.loop.observe = counted
    async with running(world) as pauses:
        await pauses.next()
        fail(world, DOWN)
        stuck.free.set()
        end = await pauses.next()
        await turns()
        assert looks == 2
        fail(world, None)
        end.set()
        await pauses.next()
        assert len(world.actuator.there) == 2, "the decision is taken once it can be"


async def test_demand_that_a_late_decision_passed_over_is_decided_on_at_once() -> None:
    world, free = World(bounds=dict.fromkeys(POOLS, Bounds(0, 8))), threading.Event()
    world.wants(0, 0)
    await world.tick()
    decide = world.loop.decide

    def late_at_first(memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        assert free.wait(PATIENCE_S)
        _, after = decide(memory, snapshot)
        wanted = PoolPlan(1 if snapshot.now_s else 0)
        return ScalingPlan(wanted, wanted), after

    world.loop.decide, world.loop.decider.turn_s = late_at_first, 0.0
    async with running(world) as pauses:
        end = await pauses.next()
        world.now_s = 5.0  # a request comes, and the watch ends the pause
        end.set()
        await pauses.next()  # and is not asked again for an interval
        world.loop.decider.turn_s = PATIENCE_S
        free.set()
        await pauses.next()
        assert len(world.actuator.there) == 2
        assert len(pauses.left_s) == 3


def change(world: World, most: int, *, holds: bool) -> None:
    bounds: dict[PoolName, Bounds] = {"prefill": Bounds(1, most), "decode": Bounds(1, most)}
    settings = replace(world.loop.settings, bounds=bounds)
    changes = [PolicyChange(world.loop.decide, settings, lambda memory: memory, holds=holds)]
    world.loop.changed_policy = lambda: changes.pop() if changes else None


@pytest.mark.parametrize(
    ("most", "holds", "starts"),
    [(8, True, 1), (3, True, 0), (8, False, 0)],
)
async def test_the_last_plan_holds_until_a_new_policy_has_decided_where_it_means_the_same(
    most: int, holds: bool, starts: int
) -> None:
    world = World()
    world.wants(4, 1)
    assert len(await world.tick()) == 5
    stuck = Stuck(world)
    change(world, most, holds=holds)
    world.states["prefill-0"] = ReplicaState.PREEMPTED
    world.wants(2, 1)
    for _ in range(2):
        assert len(await world.tick()) == 5 + starts, (
            "nothing ends, and no more starts than the new bounds allow"
        )
    assert world.loop.status.policy_reloads == 1
    stuck.free.set()
    await world.loop.decider.pause(Pauses().pause, 0.0)
    await world.tick()
    assert ("stop", "prefill") in [call[:2] for call in world.actuator.calls]
