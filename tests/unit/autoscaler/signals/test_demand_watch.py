"""Pauses at zero: they end with the first request that waits, and never sooner twice in a row."""

from __future__ import annotations

import asyncio
import time

from autoscaler.signals.demand_watch import DemandWatch
from splitserve.errors import UnavailableError
from tests.support.waiting import PATIENCE_S


class Source:
    """A coordinator that says it when `waiting` is set."""

    def __init__(self, away: bool = False) -> None:
        self.waiting, self.away = asyncio.Event(), away
        self.asked: list[tuple[str, float]] = []

    async def demand(self, model: str, wait_s: float) -> bool:
        self.asked.append((model, wait_s))
        if self.away:
            raise UnavailableError("no answer")
        await asyncio.wait_for(self.waiting.wait(), PATIENCE_S)
        return True


async def test_it_ends_when_any_coordinator_has_a_request_that_waits() -> None:
    sources = [Source(away=True), Source(), Source()]
    watch = DemandWatch(sources, "m")
    pause = asyncio.create_task(watch.pause(10 * PATIENCE_S))
    await asyncio.sleep(0)
    assert not pause.done()
    sources[2].waiting.set()
    await asyncio.wait_for(pause, PATIENCE_S)
    assert sources[1].asked == [("m", 60.0)], "one call lasts no longer"


async def test_without_demand_it_lasts_as_long_as_it_shall() -> None:
    began = time.monotonic()
    await DemandWatch([Source()]).pause(0.05)
    await DemandWatch([]).pause(0.05)
    await DemandWatch([Source(away=True)]).pause(0.05)
    assert time.monotonic() - began >= 0.15


async def test_demand_that_no_decision_answers_makes_no_busy_loop() -> None:
    now = 0.0
    source = Source()
    source.waiting.set()
    watch = DemandWatch([source], clock=lambda: now)
    await watch.pause(0.01)
    await watch.pause(0.01)
    assert len(source.asked) == 1
    now = 1.0
    await watch.pause(0.01)
    assert len(source.asked) == 2
