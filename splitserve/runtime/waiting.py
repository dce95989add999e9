"""Waiting with a limit: for one step, for the first of several answers, and by the time that this process has run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from splitserve.errors import DeadlineExceededError

T = TypeVar("T")

LOOK_S = 0.25


async def within(deadline_s: float, work: Awaitable[T], what: str) -> T:
    """The result of `work`. Raises DeadlineExceededError, naming `what`, unless it is done within `deadline_s`."""
    try:
        async with asyncio.timeout(deadline_s):
            return await work
    except TimeoutError:
        raise DeadlineExceededError(f"{what}: not done within {deadline_s:g} s") from None


async def first_answer(asked: Iterable[Coroutine[Any, Any, T]], deadline_s: float) -> T | None:
    """Asks all at once; returns the first answer that is not empty and cancels the others. None if there is no such
    answer within `deadline_s` seconds. Raises the error of a call that fails before that."""
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
    """The time that a process has run, for deadlines on answers of others: while the process or its machine was
    stopped, it has not waited.

    Adds up the times between two calls of `tick`, each of which counts for `max_tick_s` at most. Pure.
    """

    def __init__(self, now: float, max_tick_s: float = 2 * LOOK_S) -> None:
        self._max_tick_s = max_tick_s
        self._looked_s = now

    def tick(self, now: float) -> float:
        """Seconds that count since the last call."""
        tick_s, self._looked_s = min(now - self._looked_s, self._max_tick_s), now
        return tick_s


async def wait_own_time(
    event: Callable[[], Awaitable[None]], seconds: float, now: Callable[[], float] = time.monotonic
) -> bool:
    """Whether `event()` returns within `seconds` of the time that this process has run. `event()` is cancelled and
    called again every LOOK_S."""
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
