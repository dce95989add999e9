"""Workers that join and leave a running local cluster: names, crash loops, leaving between two lives."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from autoscaler.control_loop import ControlLoop, Rotation
from autoscaler.plan import Memory, PoolPlan, ScalingPlan
from autoscaler.policies.policy_file import parse_policy
from autoscaler.reconcile import PlannedRotation
from autoscaler.snapshot import DecodeSignals, PrefillSignals, Snapshot
from launcher.cluster.child_process import ChildSpec
from launcher.cluster.placement import Place, make_inventory
from launcher.cluster.process_actuator import ProcessActuator
from splitserve.errors import FailedPreconditionError, UnavailableError
from splitserve.roles import POOLS, PoolName
from tests.support.scaling.actuator_rigs import ProcessRig, open_process
from tests.support.scaling.signal_sources import with_actual
from tests.support.waiting import PATIENCE_S

DEAD = (sys.executable, "-I", "-S", "-c", "raise SystemExit('error: no luck')")


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[ProcessRig]:
    async with open_process(tmp_path, None) as opened:
        assert isinstance(opened, ProcessRig)
        yield opened


async def eventually(rig: ProcessRig, holds: Callable[[list[str]], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds([member.name for member in rig.cluster.processes]):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_name_is_never_given_again(rig: ProcessRig) -> None:
    await rig.actuator.start("decode", 2)
    await rig.actuator.stop(["decode-1"], 10.0)
    await eventually(rig, lambda names: names == ["decode-0"])
    await rig.actuator.start("decode", 1)
    await eventually(rig, lambda names: names == ["decode-0", "decode-2"])


async def test_a_worker_that_died_is_started_again_under_its_name(rig: ProcessRig) -> None:
    await rig.actuator.start("decode", 1)
    before = (await rig.actuator.replicas())[0]
    await rig.vanish("decode-0")
    member = rig.cluster.processes[0]
    deadline = time.monotonic() + PATIENCE_S
    while not member.child.running:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    after = (await rig.actuator.replicas())[0]
    assert after.name == before.name
    assert after.created_wall_s > before.created_wall_s


async def test_a_crash_loop_gives_the_worker_up_and_not_the_cluster(rig: ProcessRig) -> None:
    await rig.actuator.start("prefill", 1)
    await rig.cluster.add(ChildSpec("prefill-9", "prefill", DEAD))
    await eventually(rig, lambda names: names == ["prefill-0"])
    assert not rig.cluster.stopping.is_set()


async def test_leaving_between_two_lives(rig: ProcessRig) -> None:
    await rig.cluster.add(ChildSpec("prefill-9", "prefill", DEAD))
    await rig.cluster.processes[0].child.wait()
    await rig.actuator.stop(["prefill-9"], 10.0)
    await eventually(rig, lambda names: not names)


async def test_a_name_in_use_and_a_cluster_that_ends_are_refused(rig: ProcessRig) -> None:
    await rig.actuator.start("prefill", 1)
    with pytest.raises(FailedPreconditionError) as caught:
        await rig.cluster.add(ChildSpec("prefill-0", "prefill", DEAD))
    assert caught.value.reason == "NAME_TAKEN"
    rig.cluster.request_stop()
    with pytest.raises(UnavailableError) as ended:
        await rig.actuator.start("prefill", 1)
    assert ended.value.reason == "STOPPING"


async def test_a_pool_whose_workers_crash_is_tried_ever_later(rig: ProcessRig) -> None:
    """The cluster gives a crashing worker up; the loop does not order the next one at once, for ever."""
    rig_make = rig.actuator._make_spec  # type: ignore[attr-defined]

    def make(pool: PoolName, name: str, place: Place) -> ChildSpec:
        return ChildSpec(name, pool, DEAD) if pool == "prefill" else rig_make(pool, name, place)

    actuator = ProcessActuator(rig.cluster, make_inventory([0], 4, pin_cores=False), make)
    orders: list[float] = []

    class Counted(Rotation):
        async def apply(self, where: PlannedRotation, decisions: Any, valid_s: float) -> None:
            pass

    async def observe() -> Snapshot:
        actual = await actuator.replicas()
        pools = with_actual(actual, [replica.name for replica in actual if replica.pool == "decode"])
        signals = PrefillSignals(pools["prefill"]), DecodeSignals(pools["decode"])
        return Snapshot(time.monotonic(), *signals)

    def decide(memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        return ScalingPlan(PoolPlan(1), PoolPlan(1)), memory

    policy = parse_policy({pool: {"target_ms": 1000, "cold_start_s": 2.0} for pool in POOLS})
    loop = ControlLoop(observe, decide, Counted(), actuator, policy)
    deadline = time.monotonic() + PATIENCE_S
    while len(orders) < 3:
        assert time.monotonic() < deadline, orders
        before, now = loop.status.actions["start"], time.monotonic()
        allowed_s = now + loop._starts.pause_s("prefill", now)
        await loop.tick()
        if loop.status.actions["start"] > before:
            assert time.monotonic() >= allowed_s or not orders
            orders.append(time.monotonic())
        await asyncio.sleep(0.02)
    assert loop.status.failed_starts["prefill"] >= 2
    assert loop.status.failed_starts["decode"] == 0
    assert loop.status.errors == {}
