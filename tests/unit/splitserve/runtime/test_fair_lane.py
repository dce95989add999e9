"""Lanes: tenants take turns, smaller work first, bounded."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from splitserve.runtime.fair_lane import FairLane


async def test_a_lane_gives_turns_to_one_tenant_after_another() -> None:
    lane, order = FairLane(1), list[str]()
    sizes = {"a1": 5, "a2": 7, "a3": 7, "a4": 1}
    async with AsyncExitStack() as first:
        await first.enter_async_context(lane.turn("z"))

        async def work(tenant: str, name: str) -> None:
            async with lane.turn(tenant, sizes.get(name, 0)):
                order.append(name)

        tasks = [
            asyncio.create_task(work(*each))
            for each in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("a", "a4"), ("b", "b1"))
        ]
        gone = asyncio.create_task(work("c", "c1"))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert order == ["a4", "b1", "a1", "a2", "a3"], "a tenant's smallest first, then as they came"
    assert not lane._waiting
    await work("d", "d1")


async def test_a_lane_tells_how_many_of_a_tenant_wait() -> None:
    lane = FairLane(1)
    async with lane.turn("a"):

        async def work(tenant: str) -> None:
            async with lane.turn(tenant):
                pass

        tasks = [asyncio.create_task(work(tenant)) for tenant in ("a", "a", "b")]
        await asyncio.sleep(0)
        assert [lane.waiting(tenant) for tenant in ("a", "b", "c")] == [2, 1, 0]
    await asyncio.gather(*tasks)
    assert not lane.waiting("a")
