"""When a worker falls asleep and wakes up: by the words of its coordinators, and only when nothing is in progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, cast

import pytest

from engine.core.types import EngineLoad
from engine.worker.build import KvSleep
from engine.worker.engine_thread import BETWEEN_STEPS_S, Activity
from engine.worker.sleep import Sleeper, SleepOrders
from engine.worker.status import is_at_rest
from splitserve.errors import ConfigError, UnavailableError
from splitserve.v1 import registry_pb2
from tests.support.cluster.streams import eventually

NONE, SLEEP, WAKE = (
    registry_pb2.SLEEP_ORDER_UNSPECIFIED,
    registry_pb2.SLEEP_ORDER_SLEEP,
    registry_pb2.SLEEP_ORDER_WAKE,
)
LOAD = EngineLoad(total_blocks=8, free_blocks=8)


@pytest.mark.parametrize(
    ("words", "sleep", "wake"),
    [
        ([], False, False),
        ([("a", NONE)], False, False),
        ([("a", SLEEP)], True, False),
        ([("a", WAKE)], False, True),
        ([("a", SLEEP), ("b", NONE)], True, False),
        ([("a", SLEEP), ("b", WAKE)], False, True),
        ([("a", SLEEP), ("b", WAKE), ("b", NONE)], True, False),
        ([("a", SLEEP), ("a", WAKE)], False, True),
        ([("a", WAKE), ("a", SLEEP)], True, False),
        ([("a", 99)], False, False),
    ],
)
def test_a_worker_sleeps_where_one_asks_for_it_and_none_wants_it_awake(
    words: list[tuple[str, Any]], sleep: bool, wake: bool
) -> None:
    orders = SleepOrders()
    for coordinator, word in words:
        orders.follow(coordinator, word)
    assert (orders.sleep, orders.wake) == (sleep, wake)


def test_the_same_word_again_is_no_change() -> None:
    orders = SleepOrders()
    assert not orders.follow("a", NONE)
    assert [orders.follow("a", word) for word in (SLEEP, SLEEP, WAKE)] == [True, False, True]


@pytest.mark.parametrize(
    "held",
    [
        {"waiting_requests": 1},
        {"running_requests": 1},
        {"free_blocks": 7, "reserved_blocks": 1},
        {"free_blocks": 7, "quarantined_blocks": 1},
        {"free_blocks": 7, "referenced_blocks": 1},
    ],
)
def test_what_is_in_progress_keeps_an_engine_awake(held: dict[str, int]) -> None:
    assert is_at_rest(LOAD)
    assert not is_at_rest(replace(LOAD, **held))


class Host:
    """A worker whose engine is a list of what was done to it."""

    def __init__(self) -> None:
        self.epoch, self.draining, self.requests = 1, False, 0
        self.done: list[str] = []
        self.at_rest = True
        self.broken: Exception | None = None
        self.engine: Any = self
        self.parts: Any = self
        self.sleep: Any = self
        self.announced: list[int] = []

    def busy(self) -> bool:
        return self.requests > 0

    def load(self) -> EngineLoad:
        return LOAD

    async def call(self, fn: Callable[[Any, Any], Any], activity: Activity) -> Any:
        assert activity.limit_s > BETWEEN_STEPS_S, "much memory may take long, and that is no hang"
        await asyncio.sleep(0)
        return fn(self, self)

    def fall_asleep(self) -> None:
        self.done.append("transport closed")

    def give_up(self) -> None:
        self.done.append("memory given up")

    def take_back(self) -> None:
        if self.broken is not None:
            raise self.broken
        self.done.append("memory taken back")

    def reopen(self, epoch: int) -> None:
        assert epoch != self.epoch
        self.done.append("transport opened")

    async def register_anew(self) -> None:
        self.announced.append(self.epoch)

    def report_now(self) -> None:
        return


@asynccontextmanager
async def sleeping(host: Host) -> AsyncIterator[tuple[Sleeper[Any], asyncio.Task[None]]]:
    sleeper: Sleeper[Any] = Sleeper(host, "w")
    task = asyncio.create_task(sleeper.run())
    try:
        yield sleeper, task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, UnavailableError):
            await task


async def test_it_gives_up_its_memory_once_the_transport_is_closed_and_comes_back_as_another_boot() -> None:
    host = Host()
    async with sleeping(host) as (sleeper, _):
        sleeper.follow("a", SLEEP)
        await eventually(lambda: sleeper.asleep, "it follows")
        assert host.done == ["transport closed", "memory given up"]
        assert sleeper.closed
        assert host.announced == [1], "the same boot, which sleeps now"
        sleeper.follow("a", NONE)
        await asyncio.sleep(0)
        assert sleeper.asleep, "no word, and it stays as it is"
        sleeper.follow("a", WAKE)
        await eventually(lambda: not sleeper.asleep and sleeper.wake_s > 0, "it follows")
        assert host.done[2:] == ["memory taken back", "transport opened"]
        assert not sleeper.closed
        assert host.epoch != 1
        assert host.announced == [1, host.epoch]


async def test_it_waits_for_what_is_in_progress_and_takes_nothing_new_meanwhile() -> None:
    host = Host()
    host.requests = 1
    async with sleeping(host) as (sleeper, _):
        sleeper.follow("a", SLEEP)
        await eventually(lambda: sleeper.closed, "it follows")
        assert host.done == []
        sleeper.follow("b", WAKE)
        await eventually(lambda: not sleeper.closed, "it follows")
        sleeper.follow("b", SLEEP)
        await eventually(lambda: sleeper.closed, "it follows")
        assert host.done == []
        host.at_rest, host.requests = False, 0
        sleeper.follow("b", NONE)
        await asyncio.sleep(0)
        assert host.done == [], "a writer is awaited"
        host.at_rest = True
        await eventually(lambda: sleeper.asleep, "it follows")


async def test_a_word_that_is_taken_back_while_it_falls_asleep_wakes_it() -> None:
    host = Host()
    async with sleeping(host) as (sleeper, _):
        sleeper.follow("a", SLEEP)
        sleeper.follow("a", WAKE)
        await asyncio.sleep(0)
        assert not sleeper.closed
        sleeper.follow("a", SLEEP)
        await eventually(lambda: bool(host.done), "it follows")
        sleeper.follow("a", WAKE)
        await eventually(lambda: not sleeper.asleep and len(host.done) == 4, "it follows")


async def test_one_that_drains_does_neither() -> None:
    host = Host()
    host.draining = True
    async with sleeping(host) as (sleeper, _):
        sleeper.follow("a", SLEEP)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert host.done == []
        assert not sleeper.closed


async def test_an_engine_that_cannot_sleep_stays_awake() -> None:
    host = Host()
    host.sleep = None
    async with sleeping(host) as (sleeper, task):
        sleeper.follow("a", SLEEP)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not sleeper.closed
        assert not task.done()


async def test_one_that_cannot_wake_up_ends_with_the_reason() -> None:
    host = Host()
    async with sleeping(host) as (sleeper, task):
        sleeper.follow("a", SLEEP)
        await eventually(lambda: sleeper.asleep, "it follows")
        host.broken = ConfigError("engine.kv_memory_bytes: 9 bytes are free")
        sleeper.follow("a", WAKE)
        with pytest.raises(UnavailableError, match="9 bytes are free") as ended:
            await task
        assert ended.value.reason == "WAKE_FAILED"
        assert sleeper.closed


class Runner:
    """One whose memory is a number of bytes."""

    def __init__(self, given_up_bytes: int) -> None:
        self.given_up_bytes, self.taken = given_up_bytes, False

    def take_kv_back(self) -> None:
        self.taken = True


@pytest.mark.parametrize(("free", "fits"), [(700, True), (699, False), (400, False)])
def test_memory_is_taken_back_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, free: int, fits: bool
) -> None:
    """Pages are populated later: each part by itself would find free what the other one is going to take."""
    monkeypatch.setattr("engine.kv_cache.free_memory.free_memory", lambda: free)
    runners: Any = [Runner(400), Runner(300)]
    sleep = KvSleep(cast("Any", None), runners, None)
    if fits:
        sleep.take_back()
    else:
        with pytest.raises(ConfigError, match=rf"take 700 bytes, and {free} bytes"):
            sleep.take_back()
    assert [each.taken for each in runners] == [fits, fits]
