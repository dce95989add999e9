"""Waiting with a limit: for one step, for the first of several answers, and on the time that this process has run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from splitserve.errors import DeadlineExceededError

T = TypeVar("T")

LOOK_S = 0.25


async def within(deadline_s: float, work: Awaitable[T], what: str) -> T:
    """What the work returns. Raises DeadlineExceededError (naming `what`) unless it is done in time."""
    try:
        async with asyncio.timeout(deadline_s):
            return await work
    except TimeoutError:
        raise DeadlineExceededError(f"{what}: not done within {deadline_s:g} s") from None


async def first_answer(asked: Iterable[Coroutine[Any, Any, T]], deadline_s: float) -> T | None:
    """The first result that is not empty of those that are all asked at once, the others being cancelled then; None if
    there is none, or none within `deadline_s` seconds. Raises what one of them raises before that."""
    asking = [asyncio.create_task(call) for call in asked]
    try:
        async with asyncio.timeout(deadline_s):
            for answer in asyncio.as_completed(asking):
                if result := await answer:
                    return result
    except TimeoutError:
        pass
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    return None


class OwnClock:
    """Time that a process has run, for deadlines on what others owe it: a process or a machine that was stopped has not
    waited, however long it took.

    Adds up the time between looks, of which none counts for more than `max_tick_s`. Pure.
    """

    def __init__(self, now: float, max_tick_s: float = 2 * LOOK_S) -> None:
        self._max_tick_s = max_tick_s
        self._looked_s = now

    def tick(self, now: float) -> float:
        """Seconds that count since the last look."""
        tick_s, self._looked_s = min(now - self._looked_s, self._max_tick_s), now
        return tick_s


async def wait_own_time(
    event: Callable[[], Awaitable[None]], seconds: float, now: Callable[[], float] = time.monotonic
) -> bool:
    """Whether `event()` returns within `seconds` of this process's own time, or has happened by then. It is cancelled
    at each look and called again."""
    clock, left_s = OwnClock(now()), seconds
    while True:
        try:
            async with asyncio.timeout(max(0.0, min(left_s, LOOK_S))):
                await event()
                return True
        except TimeoutError:
            if left_s <= 0:
                return False
            left_s -= clock.tick(now())
