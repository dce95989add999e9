"""Waiting in the process's own time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from splitserve.runtime.waiting import LOOK_S, OwnClock, wait_own_time


class Event:
    """Happens by itself at the `at`th call, if ever."""

    def __init__(self, at: int = 0) -> None:
        self.calls, self.at = 0, at

    async def __call__(self) -> None:
        self.calls += 1
        if self.calls != self.at:
            await asyncio.Event().wait()


def jumping(step_s: float) -> Callable[[], float]:
    times = count()
    return lambda: next(times) * step_s


def test_a_stop_counts_as_one_look() -> None:
    clock = OwnClock(10.0, max_tick_s=0.5)
    assert clock.tick(10.25) == 0.25
    assert clock.tick(100.0) == 0.5
    assert clock.tick(100.25) == 0.25


async def test_an_event_in_time() -> None:
    assert await wait_own_time(Event(at=1), 5.0)
    assert await wait_own_time(Event(at=2), 5.0)


async def test_the_time_ends() -> None:
    event = Event()
    assert not await wait_own_time(event, 0.3)
    assert event.calls >= 2


async def test_a_process_that_was_stopped_has_not_waited() -> None:
    event = Event(at=3)
    assert await wait_own_time(event, 4 * LOOK_S, jumping(60.0))


async def test_what_happened_by_the_end_counts() -> None:
    """A stop longer than all the time given ends in one look, and the event came meanwhile."""
    assert await wait_own_time(Event(at=2), LOOK_S, jumping(60.0))
    assert not await wait_own_time(Event(at=3), LOOK_S, jumping(60.0))
