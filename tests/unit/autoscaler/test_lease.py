"""The autoscaler's side of the lease: majorities, its own clock, giving up."""

from __future__ import annotations

import pytest

from autoscaler.lease import Lease
from coordinator.telemetry.scaling_lease import ScalingLeases
from splitserve.errors import UnavailableError
from splitserve.v1 import scaling_pb2
from tests.support.scaling.signal_sources import Clock


class LeaseCoordinator:
    """A coordinator's leases without the coordinator."""

    def __init__(self, target: str, clock: Clock) -> None:
        self.target, self._clock = target, clock
        self.down = False
        self.boot(booted_s=-1000.0)

    def boot(self, booted_s: float) -> None:
        self.leases = ScalingLeases(booted_s, lambda: round(self._clock.now * 1e3))

    async def acquire_lease(
        self, holder: str, *, valid_s: float, model: str = "", number: int = 0
    ) -> scaling_pb2.AcquireLeaseResponse:
        if self.down:
            raise UnavailableError("down")
        request = scaling_pb2.AcquireLeaseRequest(holder=holder, model=model, number=number)
        request.valid_for.FromNanoseconds(round(valid_s * 1e9))
        return self.leases.acquire(request, self._clock.now)


class World:
    def __init__(self, coordinators: int) -> None:
        self.clock = Clock()
        self.coordinators = [LeaseCoordinator(f"c{n}:1", self.clock) for n in range(coordinators)]
        self.a, self.b = (Lease(self.coordinators, name, "", 10.0, self.clock) for name in "ab")


@pytest.mark.parametrize("coordinators", [1, 2, 3])
async def test_one_of_two_holds_it_and_the_other_takes_over(coordinators: int) -> None:
    world = World(coordinators)
    assert await world.a.renew()
    assert not await world.b.renew()
    assert world.b.other == "a"
    world.clock.now += 9
    assert await world.a.renew()
    world.clock.now += 9
    assert world.a.held
    assert not await world.b.renew()
    world.clock.now += 2  # "a" sleeps, and its lease ends
    assert await world.b.renew()
    assert not world.a.held, "it knows by its own clock"
    assert not await world.a.renew()
    assert all(world.b.number_at(c.target) > world.a.number_at(c.target) for c in world.coordinators)


async def test_given_up_it_passes_on_at_once() -> None:
    world = World(3)
    await world.a.renew()
    await world.a.release()
    assert not world.a.held
    assert await world.b.renew()


@pytest.mark.parametrize(
    ("coordinators", "down", "held"),
    [(3, [0], True), (3, [0, 1], False), (2, [1], True), (2, [0], False), (1, [0], False), (4, [1], True)],
)
async def test_a_majority_must_grant_it(coordinators: int, down: list[int], held: bool) -> None:
    world = World(coordinators)
    for number in down:
        world.coordinators[number].down = True
    assert await world.a.renew() is held


async def test_two_that_reach_different_halves_never_both_hold_it() -> None:
    world = World(2)
    world.coordinators[1].down = True
    assert await world.a.renew()
    world.coordinators[0].down, world.coordinators[1].down = True, False
    assert not await world.b.renew()


async def test_a_lost_answer_costs_nothing_before_the_end() -> None:
    world = World(1)
    await world.a.renew()
    world.clock.now += 5
    world.coordinators[0].down = True
    assert await world.a.renew(), "what was granted holds until its end"
    assert world.a.number_at("c0:1")
    world.clock.now += 6
    assert not await world.a.renew()


async def test_a_coordinator_that_restarts_confirms_who_holds_it() -> None:
    world = World(1)
    await world.a.renew()
    world.clock.now += 2
    world.coordinators[0].boot(booted_s=world.clock.now)
    assert not await world.b.renew()
    assert await world.a.renew()
    world.clock.now += 9.5
    assert not await world.b.renew()
