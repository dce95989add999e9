"""Time that a process has run, for deadlines on what others owe it: a process or a machine that was stopped has not
waited, however long it took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

LOOK_S = 0.25


class OwnClock:
    """Adds up the time between looks, of which none counts for more than `max_tick_s`. Pure."""

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
