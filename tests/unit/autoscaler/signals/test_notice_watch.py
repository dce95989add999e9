"""Pauses between decisions end with a notice that is news, and with no other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from autoscaler.signals.notice_watch import NoticeWatch
from splitserve.errors import UnavailableError
from tests.support.waiting import PATIENCE_S


class Source:
    """A coordinator that knows of these notices."""

    def __init__(self, *preempted: str, away: bool = False) -> None:
        self.there, self.away, self.asked = set(preempted), away, 0
        self.changed = asyncio.Event()

    def add(self, name: str) -> None:
        self.there.add(name)
        self.changed.set()

    async def preempted(self, model: str, known: Iterable[str], wait_s: float) -> frozenset[str]:
        self.asked += 1
        if self.away:
            raise UnavailableError("no answer")
        while self.there <= set(known):
            self.changed.clear()
            await self.changed.wait()
        return frozenset(self.there)


async def test_a_notice_of_any_coordinator_ends_the_pause_once() -> None:
    away, first, second = Source(away=True), Source(), Source()
    watch = NoticeWatch([away, first, second])
    pause = asyncio.create_task(watch.pause(10 * PATIENCE_S))
    await asyncio.sleep(0)
    first.add("decode-0")
    await asyncio.wait_for(pause, PATIENCE_S)
    assert away.asked == 1, "one that is away is not asked again and again"
    second.add("decode-0")
    began_s = time.monotonic()
    await watch.pause(0.05)
    assert time.monotonic() - began_s >= 0.05, "it is known by now"


async def test_one_that_has_gone_and_comes_back_is_news() -> None:
    source = Source("decode-0")
    watch = NoticeWatch([source])
    await asyncio.wait_for(watch.pause(0.01), PATIENCE_S)
    await watch.pause(0.02)
    source.there = {"decode-1"}
    await asyncio.wait_for(watch.pause(0.001), PATIENCE_S)
    source.there = {"decode-0"}
    watch._woke_s = float("-inf")
    await asyncio.wait_for(watch.pause(10 * PATIENCE_S), PATIENCE_S)


class Slow(Source):
    """Says nothing the first time, as a coordinator does that has waited as long as it may."""

    async def preempted(self, model: str, known: Iterable[str], wait_s: float) -> frozenset[str]:
        if not self.asked:
            self.asked = 1
            return frozenset()
        return await super().preempted(model, known, wait_s)


async def test_a_long_pause_asks_again() -> None:
    source = Slow()
    pause = asyncio.create_task(NoticeWatch([source]).pause(10 * PATIENCE_S))
    await asyncio.sleep(0)
    source.add("decode-0")
    await asyncio.wait_for(pause, PATIENCE_S)
    assert source.asked == 2
