"""Workers that join and leave a running local cluster: names, crash loops, leaving between two lives."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from autoscaler.actuators.actuator import ActualReplica
from autoscaler.actuators.process import ProcessActuator
from autoscaler.control_loop import ControlLoop, LoopSettings, Rotation
from autoscaler.decide import make_decide
from autoscaler.decisions.decider import Decider
from autoscaler.plan import Memory, PoolPlan, ScalingPlan
from autoscaler.policies.policy_file import parse_policy
from autoscaler.reconcile import PlannedRotation
from autoscaler.snapshot import (
    POOLS,
    DecodeSignals,
    PoolName,
    PrefillSignals,
    Replica,
    ReplicaState,
    Snapshot,
)
from autoscaler.start_watch import StartLimits
from splitserve.cluster.child_process import ChildSpec
from splitserve.cluster.placement import Place, make_inventory
from splitserve.errors import FailedPreconditionError, UnavailableError
from splitserve.gpus.inventory import GpuInventory
from tests.support.scaling.actuator_rigs import ProcessRig, open_process
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
    await rig.actuator.stop("decode", ["decode-1"], 10.0)
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
    await rig.actuator.stop("prefill", ["prefill-9"], 10.0)
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

    def make(pool: PoolName, name: str, place: Place, replica_class: str = "") -> ChildSpec:
        return ChildSpec(name, pool, DEAD) if pool == "prefill" else rig_make(pool, name, place)

    actuator = ProcessActuator(rig.cluster, make_inventory([0], 4, pin_cores=False), make, make)
    orders: list[float] = []

    class Counted(Rotation):
        async def apply(self, where: PlannedRotation, decisions: Any) -> None:
            pass

    async def observe() -> Snapshot:
        up = tuple(
            Replica(r.name, ReplicaState.READY, 0.0) for r in await actuator.replicas() if r.pool == "decode"
        )
        return Snapshot(time.monotonic(), PrefillSignals(), DecodeSignals(up))

    def decide(memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        return ScalingPlan(PoolPlan(1), PoolPlan(1)), memory

    limits = dict.fromkeys(POOLS, StartLimits(cold_start_s=2.0))
    loop = ControlLoop(
        observe, decide, Counted(), actuator, LoopSettings(starts=limits), decider=Decider(turn_s=PATIENCE_S)
    )
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


async def test_classes_get_gpus_of_their_kinds_and_one_that_is_not_there_is_left_alone(
    rig: ProcessRig,
) -> None:
    """Two H100 and four L40S, and the cheapest class of prefill wants a B200."""
    gpus = GpuInventory.listed("H100=0,1;L40S=2,3,4,5")
    rig_make = rig.actuator._make_spec  # type: ignore[attr-defined]
    actuator = ProcessActuator(
        rig.cluster, make_inventory([0], 8, pin_cores=False, gpus=gpus), rig_make, rig_make
    )
    l40s = {"name": "l40s", "gpu": "L40S", "price_per_hour": 1.0}
    h100 = {"name": "h100", "gpu": "H100", "gpus_per_replica": 2, "price_per_hour": 3.0, "speed": 4}
    b200 = {"name": "b200", "gpu": "B200", "price_per_hour": 0.5}
    rules = parse_policy(
        {
            "prefill": {"kind": "schedule", "classes": [b200, l40s]},
            "decode": {"kind": "schedule", "classes": [l40s, h100], "min_replicas": 5, "warm_standby": 1},
        }
    )

    class Quiet(Rotation):
        async def apply(self, where: PlannedRotation, decisions: Any) -> None:
            pass

    async def observe() -> Snapshot:
        up = {pool: tuple(_ready(r) for r in await actuator.replicas() if r.pool == pool) for pool in POOLS}
        return Snapshot(time.monotonic(), PrefillSignals(up["prefill"]), DecodeSignals(up["decode"]))

    loop = ControlLoop(
        observe, make_decide(rules), Quiet(), actuator, LoopSettings(), decider=Decider(turn_s=PATIENCE_S)
    )
    for _ in range(3):
        await loop.tick()
    there = await actuator.replicas()
    assert sorted((one.pool, one.replica_class, one.gpu) for one in there) == [
        ("decode", "h100", "0,1"),
        ("decode", "l40s", "2"),
        ("decode", "l40s", "3"),
        ("prefill", "l40s", "4"),
    ]
    assert loop.status.errors == {"start": 1}, "asked for once, and then left alone"


def _ready(one: ActualReplica) -> Replica:
    return Replica(one.name, ReplicaState.READY, 0.0, replica_class=one.replica_class)
