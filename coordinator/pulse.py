"""When tokens leave: at once while the event loop has time to spare, in common beats of a few milliseconds when not.

A message to a client costs far more than a token in it. So under load the outputs of decode workers stay in their
inboxes until the next beat, and what has gathered for one client goes out as one message. The time between beats grows
and shrinks with the load; see docs/decisions/0011-tokens-leave-in-beats.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import islice

EVERY_S = 0.05
"""How often the load is looked at."""
BUSY, IDLE = 0.45, 0.3
"""Shares of a core that the loop computes. Above the first the beat gets longer, below the second shorter. The threads
of gRPC need about as much again, so where they share one core with the loop, it never gets much more than half."""
LATE_S = 0.01
"""A loop that runs its timers so late counts as wholly busy, whoever else may have the core."""
SMOOTHING = 0.4
FIRST_BEAT_S = 0.5e-3
AT_ONCE = 32
"""Waiters woken in one turn of the loop: each then writes a message."""
GROW, SHRINK = 1.5, 0.8


def next_beat_s(beat_s: float, load: float, max_beat_s: float) -> float:
    """The time between beats that follows on `beat_s` at this load (1: wholly busy); 0: no waiting at all."""
    if load > BUSY:
        return min(max_beat_s, max(FIRST_BEAT_S, beat_s * GROW))
    if load < IDLE:
        return beat_s * SHRINK if beat_s > FIRST_BEAT_S else 0.0
    return beat_s


class Pulse:
    """Wakes who waits for output. `max_beat_s` 0 turns waiting off."""

    def __init__(self, max_beat_s: float = 0.0) -> None:
        self.beat_s = 0.0
        """Time that output may be held back now. Seconds."""
        self.load = 0.0
        """Smoothed load of the event loop, 0..1."""
        self._max_beat_s = max_beat_s
        self._held: dict[Callable[[], None], None] = {}

    def wake(self, waiter: Callable[[], None]) -> None:
        """Calls `waiter` at the next beat, once however often it was asked for; in the loop's next turn when there is
        no beat. Where many wait, some follow in the turns after that, so that the loop stays quick for all else."""
        if not self._held:
            asyncio.get_running_loop().call_later(self.beat_s, self._beat)
        self._held[waiter] = None

    async def watch(self) -> None:
        """Follows the load until cancelled."""
        then_s, busy_s = time.monotonic(), time.thread_time()
        while True:
            await asyncio.sleep(EVERY_S)
            now_s, now_busy_s = time.monotonic(), time.thread_time()
            self.note((now_busy_s - busy_s) / (now_s - then_s), now_s - then_s - EVERY_S)
            then_s, busy_s = now_s, now_busy_s

    def note(self, busy: float, late_s: float) -> None:
        """Takes one look: the share of time in which the loop computed, and how late its timer fired."""
        load = max(busy, min(1.0, late_s / LATE_S))
        self.load += SMOOTHING * (load - self.load)
        self.beat_s = next_beat_s(self.beat_s, self.load, self._max_beat_s)

    def _beat(self) -> None:
        for waiter in list(islice(self._held, AT_ONCE)):
            del self._held[waiter]
            waiter()
        if self._held:
            asyncio.get_running_loop().call_soon(self._beat)
