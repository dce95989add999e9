"""What every actuator must do, whatever its replicas are. Kinds: `tests/support/scaling/actuator_rigs.py`."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from autoscaler.actuators.actuator import ActualReplica, Actuator
from autoscaler.plan import PoolPlan, ScalingPlan
from autoscaler.policies.policy_file import PoolPolicy
from autoscaler.reconcile import Drain, Start, reconcile
from splitserve.errors import ResourceExhaustedError
from splitserve.roles import POOLS
from tests.support.scaling.actuator_rigs import RIGS, Rig
from tests.support.scaling.signal_sources import with_actual
from tests.support.waiting import PATIENCE_S

DRAIN_S = 20.0

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=list(RIGS))
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    async with RIGS[request.param](tmp_path, None) as opened:
        yield opened


@pytest.fixture(params=list(RIGS))
async def two_gpus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    async with RIGS[request.param](tmp_path, 2) as opened:
        if not opened.gives_gpus:
            pytest.skip("its platform gives GPUs out")
        yield opened


async def until(actuator: Actuator, holds: Callable[[Sequence[ActualReplica]], bool]) -> list[str]:
    """Waits until it holds of the replicas; their names."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        there = await actuator.replicas()
        if holds(there):
            return [replica.name for replica in there]
        await actuator.tidy()
        assert time.monotonic() < deadline, there
        await asyncio.sleep(0.02)


async def settled(actuator: Actuator, count: int) -> list[str]:
    """The names once so many replicas, all of them real, are there and none is stopping."""
    return await until(
        actuator,
        lambda there: len(there) == count and not any(r.stopping or "-pending-" in r.name for r in there),
    )


def names(there: Sequence[ActualReplica], pool: str | None = None) -> list[str]:
    return [replica.name for replica in there if pool in (None, replica.pool)]


async def test_nothing_at_first(rig: Rig) -> None:
    assert await rig.actuator.replicas() == ()
    await rig.actuator.stop(["nobody"], 1.0)
    assert await rig.actuator.replicas() == ()


async def test_ordered_replicas_count_at_once(rig: Rig) -> None:
    await rig.actuator.start("prefill", 2)
    there = await rig.actuator.replicas()
    assert [replica.pool for replica in there] == ["prefill", "prefill"]
    assert not any(replica.stopping for replica in there)
    await rig.actuator.start("decode", 1)
    await settled(rig.actuator, 3)
    there = await rig.actuator.replicas()
    assert names(there) == sorted(set(names(there)))
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{1,64}", replica.name) for replica in there)
    assert all(0 < replica.created_wall_s <= time.time() + 1 for replica in there)
    assert len(names(there, "decode")) == 1


async def test_more_leave_those_there_alone(rig: Rig) -> None:
    await rig.actuator.start("prefill", 1)
    first = await settled(rig.actuator, 1)
    await rig.actuator.start("prefill", 2)
    assert set(first) < set(await settled(rig.actuator, 3))


async def test_a_stopped_replica_is_listed_as_such_and_then_gone(rig: Rig) -> None:
    await rig.actuator.start("decode", 3)
    there = await settled(rig.actuator, 3)
    victim = there[-1]
    began = time.monotonic()
    await rig.actuator.stop([victim], DRAIN_S)
    assert time.monotonic() - began < DRAIN_S / 2
    after = {replica.name: replica.stopping for replica in await rig.actuator.replicas()}
    assert after.get(victim, True)
    assert [name for name, stopping in after.items() if not stopping] == there[:-1]
    assert await settled(rig.actuator, 2) == there[:-1]


async def test_the_last_one_may_go_and_the_next_one_comes(rig: Rig) -> None:
    for _ in range(2):
        await rig.actuator.start("decode", 1)
        there = await settled(rig.actuator, 1)
        await rig.actuator.stop(there, DRAIN_S)
        await settled(rig.actuator, 0)


async def test_stopping_twice_takes_one(rig: Rig) -> None:
    await rig.actuator.start("decode", 3)
    there = await settled(rig.actuator, 3)
    for _ in range(3):
        await rig.actuator.stop([there[-1]], DRAIN_S)
    assert await settled(rig.actuator, 2) == there[:-1]


async def test_replicas_of_both_pools_are_stopped_by_their_names(rig: Rig) -> None:
    await rig.actuator.start("prefill", 1)
    await rig.actuator.start("decode", 2)
    await settled(rig.actuator, 3)
    there = await rig.actuator.replicas()
    prefill, decode = (names(there, pool) for pool in POOLS)
    await rig.actuator.stop([*prefill, "nobody", decode[-1]], DRAIN_S)
    assert await settled(rig.actuator, 1) == decode[:1]


async def test_a_restarted_autoscaler_finds_them_all(rig: Rig) -> None:
    await rig.actuator.start("prefill", 1)
    await rig.actuator.start("decode", 2)
    there = await settled(rig.actuator, 3)
    before = await rig.actuator.replicas()
    again = rig.again()
    try:
        assert await again.replicas() == before
        await again.stop(names(before, "decode")[-1:], DRAIN_S)
        await again.start("prefill", 1)
        after = await settled(again, 3)
    finally:
        await again.close()
    assert len(set(there) & set(after)) == 2


async def test_a_dead_replica_is_replaced_and_scale_in_ends_at_the_plan(rig: Rig) -> None:
    """The reconciler with this actuator: whatever happens, both pools come to be as planned."""
    await reach(rig.actuator, prefill=2, decode=1)
    victim = names(await rig.actuator.replicas(), "prefill")[0]
    await rig.vanish(victim)
    await reach(rig.actuator, prefill=2, decode=1)
    await reach(rig.actuator, prefill=1, decode=3)
    await reach(rig.actuator, prefill=1, decode=1)


async def reach(actuator: Actuator, prefill: int, decode: int) -> None:
    """Ticks until there is nothing to do; every replica that is there counts as ready."""
    plan = ScalingPlan(PoolPlan(prefill), PoolPlan(decode))
    wanted = {"prefill": prefill, "decode": decode}
    async with asyncio.timeout(PATIENCE_S):
        while True:
            actual = await actuator.replicas()
            await actuator.tidy()
            pools = with_actual(actual, [replica.name for replica in actual])
            actions = reconcile(plan, pools, dict.fromkeys(POOLS, PoolPolicy(max_replicas=8)))
            for action in actions:
                match action:
                    case Start(pool, count):
                        await actuator.start(pool, count)
                    case Drain(_, chosen):
                        await actuator.stop(chosen, DRAIN_S)
            alive = {pool: [r for r in actual if r.pool == pool] for pool in POOLS}
            if not actions and all(len(alive[pool]) == wanted[pool] for pool in POOLS):
                return
            await asyncio.sleep(0.02)


async def test_what_does_not_end_in_time_is_killed(rig: Rig) -> None:
    if not rig.keeps_deadline:
        pytest.skip("its platform keeps the deadline")
    await rig.actuator.start("decode", 1)
    (name,) = await settled(rig.actuator, 1)
    rig.make_stubborn(name)
    await rig.actuator.stop([name], 3.0)  # time enough to see it first
    assert [replica.stopping for replica in await rig.actuator.replicas()] == [True]
    await settled(rig.actuator, 0)


async def test_every_replica_has_a_gpu_of_its_own(two_gpus: Rig) -> None:
    actuator = two_gpus.actuator
    await actuator.start("prefill", 1)
    with pytest.raises(ResourceExhaustedError) as caught:
        await actuator.start("decode", 2)
    assert caught.value.reason == "NO_GPU"
    there = await actuator.replicas()
    assert len(names(there, "decode")) == 1
    assert len({replica.gpu for replica in there} - {None}) == 2
    freed = there[0].gpu
    await actuator.stop([there[0].name], DRAIN_S)
    await settled(actuator, 1)
    await actuator.start("decode", 1)
    assert freed in {replica.gpu for replica in await actuator.replicas()}
