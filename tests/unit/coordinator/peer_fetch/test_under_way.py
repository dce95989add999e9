"""Fetches under way: several requests wait for one, and it ends with the last of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.background_tasks import BackgroundTasks
from coordinator.peer_fetch.fetch_times import FetchTimes
from coordinator.peer_fetch.policy import FetchPlan, Wanted, plan_fetch
from coordinator.peer_fetch.under_way import FetchesUnderWay, UnderWay
from coordinator.workers.prefix_index.hits import PrefixHits
from coordinator.workers.snapshot import PoolSnapshot
from splitserve.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    SplitserveError,
    UnavailableError,
)
from tests.support.journal import settled
from tests.support.waiting import PATIENCE_S
from tests.unit.coordinator.peer_fetch.test_policy import BLOCK, PROMPT, worker

pytestmark = pytest.mark.timeout(10)
KEYS = tuple(range(40))


class Rig:
    def __init__(self) -> None:
        self.background = BackgroundTasks()
        self.under_way = FetchesUnderWay(self.background)
        self.outcome: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.ended = False

    async def bring(self) -> int:
        try:
            return await self.outcome
        finally:
            self.ended = True

    def begin(self, **fields: Any) -> UnderWay:
        made = UnderWay(worker(1), worker(0), KEYS[:32], began_s=0.0, due_s=0.02, lane_s=0.01)
        for name, value in fields.items():
            setattr(made, name, value)
        return self.under_way.begin(made, self.bring)

    def plan(self, now: float, prompt: tuple[int, ...] = KEYS, shared: int = 40) -> FetchPlan | None:
        """For another prompt, at the taker whose blocks are expected and not yet there."""
        asks = worker(0)
        expected, confirmed = PrefixHits.of({0: shared, 1: shared}), PrefixHits.of({1: shared})
        wanted = Wanted(asks, PROMPT, {BLOCK: prompt}, expected, confirmed, "m")
        snapshot = PoolSnapshot((asks, worker(1)))
        return plan_fetch(snapshot, wanted, FetchTimes(), self.under_way, now)


async def test_a_second_prompt_waits_for_what_it_shares_of_a_fetch_under_way() -> None:
    rig = Rig()
    assert rig.plan(0.0) is None, "what is expected is computed there now"
    fetch = rig.begin()
    found = rig.plan(0.015, (*KEYS[:20], *range(100, 120)), 20)
    assert found is not None
    assert found.joined is fetch
    assert (found.tokens, found.held_tokens) == (20 * BLOCK, 0)
    assert found.fetch_s == pytest.approx(0.005), "what is left of it"
    late = rig.plan(5.0, (*KEYS[:20], *range(100, 120)), 20)
    assert late is not None
    assert late.fetch_s == pytest.approx(0.002), "it is late, and not over"
    rig.outcome.set_result(32)
    assert await fetch.wait(PATIENCE_S) == 32
    await settled(lambda: rig.plan(0.0) is None)


async def test_a_fetch_of_more_is_begun_where_that_spares_more() -> None:
    rig = Rig()
    fetch = rig.begin(due_s=10.0)
    found = rig.plan(0.0)
    assert found is not None
    assert (found.joined, found.tokens, found.held_tokens) == (None, 40 * BLOCK, 0)
    assert found.wait_s == pytest.approx(fetch.lane_s), "behind the other one's bytes"
    rig.outcome.set_result(0)
    await fetch.wait(PATIENCE_S)


async def test_it_goes_on_while_anybody_waits_and_ends_with_the_last() -> None:
    rig = Rig()
    fetch = rig.begin()
    waits = [asyncio.create_task(fetch.wait(PATIENCE_S)) for _ in range(2)]
    await asyncio.sleep(0)
    waits[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits[0]
    with pytest.raises(DeadlineExceededError) as late:
        await fetch.wait(0.01)
    assert late.value.reason == "FETCH_TOO_SLOW"
    assert not fetch.given_up
    waits[1].cancel()
    await settled(lambda: rig.ended)
    assert list(rig.under_way.at(fetch.taker.key)) == []
    await settled(lambda: rig.background.count == 0)


@pytest.mark.parametrize(
    "error", [FailedPreconditionError("gone", reason="PREFIX_GONE"), OSError("no such thing")]
)
async def test_all_who_wait_hear_how_it_failed(error: Exception) -> None:
    rig = Rig()
    fetch = rig.begin()
    waits = [asyncio.create_task(fetch.wait(PATIENCE_S)) for _ in range(3)]
    await asyncio.sleep(0)
    rig.outcome.set_exception(error)
    for failed in await asyncio.gather(*waits, return_exceptions=True):
        assert failed is error if isinstance(error, SplitserveError) else isinstance(failed, UnavailableError)


async def test_seeds_give_way_and_count_for_nothing() -> None:
    rig = Rig()
    holder, taker = worker(1).key, worker(0).key
    seed = rig.begin(is_seed=True)
    assert rig.under_way.busy_s(holder, taker, 0.0) == 0.0
    assert rig.under_way.may_seed(holder, taker)
    fetch = rig.begin()
    assert rig.under_way.busy_s(("other", 1), taker, 0.0) == pytest.approx(0.01)
    assert rig.under_way.busy_s(holder, ("other", 1), 0.015) == pytest.approx(0.005)
    assert not rig.under_way.may_seed(holder, ("other", 1))
    rig.outcome.set_result(1)
    assert [await each.wait(PATIENCE_S) for each in (seed, fetch)] == [1, 1]
