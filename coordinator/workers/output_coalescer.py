"""Coalesces output under load: tokens leave at once while the event loop is idle, at intervals while it is busy.

A message to a client costs far more than a token in it. Under load, decode output therefore stays in its collectors
until the interval ends, and everything for one client goes out as one message. The interval, a few milliseconds at
most, grows and shrinks with the load; see docs/decisions/0011-output-is-coalesced-under-load.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import islice

BUSY, IDLE = 0.45, 0.3
"""Shares of a core used by the loop. Above the first the interval grows, below the second it shrinks. gRPC's threads
need about as much again, so a loop that shares its core with them rarely gets much more than half of it."""
LATE_S = 0.01
"""A loop whose timers fire this late counts as fully busy, even if another process holds the core."""
SMOOTHING = 0.4
FIRST_INTERVAL_S = 0.5e-3
MAX_WAITERS_PER_TURN = 32
"""Waiters woken in one turn of the loop; each then writes a message."""
GROW, SHRINK = 1.5, 0.8


def next_interval_s(interval_s: float, load: float, max_interval_s: float) -> float:
    """The interval that follows `interval_s` at this loop load (0..1). Seconds; 0: no coalescing."""
    if load > BUSY:
        return min(max_interval_s, max(FIRST_INTERVAL_S, interval_s * GROW))
    if load < IDLE:
        return interval_s * SHRINK if interval_s > FIRST_INTERVAL_S else 0.0
    return interval_s


class OutputCoalescer:
    """Wakes readers of output at intervals. A `max_interval_s` of 0 turns coalescing off."""

    def __init__(self, max_interval_s: float = 0.0) -> None:
        self.interval_s = 0.0
        """How long output may be held back now. Seconds."""
        self.loop_load = 0.0
        """Smoothed load of the event loop, 0..1."""
        self._max_interval_s = max_interval_s
        self._waiters: dict[Callable[[], None], None] = {}

    def schedule(self, waiter: Callable[[], None]) -> None:
        """Calls `waiter` once when the interval ends, or in the loop's next turn if the interval is 0.

        Waiters beyond MAX_WAITERS_PER_TURN follow in later turns, so that the loop stays responsive.
        """
        if not self._waiters:
            asyncio.get_running_loop().call_later(self.interval_s, self._flush)
        self._waiters[waiter] = None

    def on_sample(self, busy: float, late_s: float) -> None:
        """Takes a sample of the loop: the share of time it computed, 0..1, and how late its timer fired, in seconds."""
        load = max(busy, min(1.0, late_s / LATE_S))
        self.loop_load += SMOOTHING * (load - self.loop_load)
        self.interval_s = next_interval_s(self.interval_s, self.loop_load, self._max_interval_s)

    def _flush(self) -> None:
        for waiter in list(islice(self._waiters, MAX_WAITERS_PER_TURN)):
            del self._waiters[waiter]
            waiter()
        if self._waiters:
            asyncio.get_running_loop().call_soon(self._flush)
