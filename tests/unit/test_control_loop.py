"""The control loop against an actuator and a rotation in memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from prometheus_client.core import Metric

from autoscaler.loop import ControlLoop, LoopSettings
from autoscaler.loop_metrics import loop_metrics
from autoscaler.plan import Memory, Plan, PoolPlan
from autoscaler.reconcile import Bounds
from autoscaler.snapshot import DecodeSignals, PrefillSignals, Replica, ReplicaState, Snapshot
from splitserve.errors import UnavailableError
from tests.fakes.fake_actuator import FakeActuator

DOWN = UnavailableError("nobody answers")


class World:
    """One policy, one actuator, coordinators that see every replica as ready unless told otherwise."""

    def __init__(self, **settings: Any) -> None:
        self.actuator = FakeActuator()
        self.plan = Plan(PoolPlan(1), PoolPlan(1))
        self.states: dict[str, ReplicaState] = {}
        self.complete = True
        self.blind: UnavailableError | None = None
        self.deaf: UnavailableError | None = None
        self.told: list[tuple[list[str], list[str], bool]] = []
        self.rounds: list[Memory] = []
        limits = {"prefill": Bounds(1, 8), "decode": Bounds(1, 8)}
        settings = {"bounds": limits, "drain_s": {"prefill": 7.0, "decode": 9.0}} | settings
        self.loop = ControlLoop(self.observe, self.decide, self, self.actuator, LoopSettings(**settings))

    async def observe(self) -> Snapshot:
        if self.blind is not None:
            raise self.blind
        seen: dict[str, list[Replica]] = {"prefill": [], "decode": []}
        for replica in self.actuator.there.values():
            state = self.states.get(replica.name, ReplicaState.READY)
            seen[replica.pool].append(Replica(replica.name, state, 0.0))
        signals = PrefillSignals(tuple(seen["prefill"])), DecodeSignals(tuple(seen["decode"]))
        return Snapshot(0.0, *signals, complete=self.complete)

    def decide(self, memory: Memory, snapshot: Snapshot) -> tuple[Plan, Memory]:
        self.rounds.append(memory)
        return self.plan, (memory or 0) + 1

    async def apply(self, standby: Sequence[str], active: Sequence[str], lend: bool) -> None:
        if self.deaf is not None:
            raise self.deaf
        self.told.append((list(standby), list(active), lend))

    def wants(self, prefill: int, decode: int, standby: int = 0, lend: bool = False) -> None:
        self.plan = Plan(PoolPlan(prefill, standby, "more came"), PoolPlan(decode), lend)

    async def tick(self) -> list[str]:
        await self.loop.tick()
        return sorted(self.actuator.there)


async def test_it_starts_what_is_missing_once_and_remembers() -> None:
    world = World()
    world.wants(2, 1)
    there = await world.tick()
    assert there == ["decode-2", "prefill-0", "prefill-1"]
    assert await world.tick() == there
    assert world.rounds == [None, 1]


async def test_scale_in_is_one_at_a_time_and_out_of_rotation_first() -> None:
    world = World()
    world.wants(3, 1)
    await world.tick()
    await world.tick()
    world.wants(1, 1)
    await world.tick()
    await world.tick()
    assert world.actuator.calls[2:] == [("stop", "prefill", ("prefill-2",), 7.0)]
    assert world.told[2] == (["prefill-2"], ["decode-3", "prefill-0", "prefill-1"], False)
    world.actuator.end()
    await world.tick()
    assert world.actuator.calls[3:] == [("stop", "prefill", ("prefill-1",), 7.0)]


async def test_what_vanished_is_replaced() -> None:
    world = World()
    await world.tick()
    del world.actuator.there["prefill-0"]
    assert await world.tick() == ["decode-1", "prefill-2"]


async def test_a_new_loop_adopts_what_runs() -> None:
    world = World()
    world.wants(2, 2)
    there = await world.tick()
    after = World()
    after.actuator = after.loop.actuator = world.actuator
    after.wants(2, 2)
    assert await after.tick() == there


async def test_standbys_and_lending_reach_the_coordinators() -> None:
    world = World()
    world.wants(1, 1, standby=1, lend=True)
    await world.tick()
    await world.tick()
    assert world.told[-1] == (["prefill-1"], ["decode-2", "prefill-0"], True)
    world.states["prefill-1"] = ReplicaState.STANDBY
    world.wants(2, 1, standby=1)
    await world.tick()
    assert world.told[-1] == ([], ["decode-2", "prefill-0", "prefill-1"], False)


@pytest.mark.parametrize("hop", ["observe", "actuator", "rotate"])
async def test_a_failing_hop_is_tried_again_and_scales_nothing_down(hop: str) -> None:
    world = World()
    world.wants(3, 1)
    there = await world.tick()
    world.wants(3, 2)
    world.blind = DOWN if hop == "observe" else None
    world.actuator.failure = DOWN if hop == "actuator" else None
    world.deaf = DOWN if hop == "rotate" else None
    await world.tick()
    assert set(world.actuator.there) >= set(there)
    assert sum(world.loop.status.errors.values()) == 1
    world.blind = world.actuator.failure = world.deaf = None
    assert len(await world.tick()) == 5


async def test_half_a_look_removes_nothing_and_still_adds() -> None:
    world = World()
    world.wants(2, 1)
    await world.tick()
    await world.tick()
    world.complete = False
    world.wants(1, 2, standby=1)
    assert len(await world.tick()) == 4
    assert world.told[-1][0] == []
    assert not [call for call in world.actuator.calls if call[0] == "stop"]


async def test_a_hop_that_hangs_ends_at_its_deadline() -> None:
    world = World(observe_s=0.01)

    async def hang() -> Snapshot:
        await asyncio.Event().wait()
        raise AssertionError

    world.loop.observe = hang
    await world.tick()
    assert world.loop.status.errors == {"observe": 1}


async def test_a_failed_start_does_not_keep_the_other_pool_from_acting() -> None:
    world = World()
    world.actuator = world.loop.actuator = FakeActuator(gpus=2)
    world.wants(3, 1)
    await world.tick()
    assert [call[:2] for call in world.actuator.calls] == [("start", "prefill"), ("start", "decode")]
    assert world.loop.status.errors == {"start": 2}


async def test_dry_run_decides_and_acts_on_nothing(caplog: pytest.LogCaptureFixture) -> None:
    world = World(dry_run=True)
    world.wants(2, 1)
    with caplog.at_level(logging.INFO, "splitserve"):
        assert await world.tick() == []
    assert world.told == []
    assert [record.message for record in caplog.records] == ["scaling.decided"] * 2
    assert caplog.records[0].__dict__["event_fields"]["actions"] == ["start"]


async def test_what_it_did_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    with caplog.at_level(logging.INFO, "splitserve"):
        world.wants(2, 1)
        await world.tick()
        caplog.clear()
        await world.tick()
        assert not caplog.records  # no news
        world.wants(3, 1)
        await world.tick()
    acted = caplog.records[-1]
    assert acted.message == "scaling.acted"
    assert acted.__dict__["event_fields"] == {
        "pool": "prefill",
        "action": "start",
        "reason": "more came",
        "count": 1,
    }


async def test_without_an_actuator_it_looks_at_whatever_is_registered() -> None:
    world = World()
    await world.tick()
    world.loop.actuator = None
    world.wants(4, 1)
    there = sorted(world.actuator.there)
    assert await world.tick() == there
    assert world.loop.status.desired == {"prefill": 4, "decode": 1}


async def test_metrics() -> None:
    world = World()
    world.wants(2, 1)
    await world.tick()
    await world.tick()
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in loop_metrics(world.loop.status)
        for sample in samples(metric)
    }
    assert found["splitserve_autoscaler_desired_replicas", "prefill"] == 2
    assert found["splitserve_autoscaler_replicas", "prefill", "ready"] == 2
    assert found["splitserve_autoscaler_decisions_total",] == 2
    assert found["splitserve_autoscaler_actions_total", "start"] == 2
    assert found["splitserve_autoscaler_errors_total", "observe"] == 0


def samples(metric: Metric) -> list[Any]:
    return list(metric.samples)


async def test_it_ticks_until_it_is_cancelled() -> None:
    world = World(interval_s=0.001)
    third = asyncio.Event()

    def decide(memory: Memory, snapshot: Snapshot) -> tuple[Plan, Memory]:
        plan, after = world.decide(memory, snapshot)
        if after == 3:
            third.set()
        return plan, after

    world.loop.decide = decide
    task = asyncio.create_task(world.loop.run())
    await asyncio.wait_for(third.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
