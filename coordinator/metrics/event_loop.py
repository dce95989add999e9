"""Samples how late and how busy the event loop is; everything on the coordinator waits at least that long."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable

from prometheus_client.core import HistogramMetricFamily, Metric

from splitserve.metrics import gauge

LAG_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
EVERY_S = 0.05
TICK_S = 0.01
"""The finest stall that is noticed for certain."""

Listener = Callable[[float, float], None]
"""Takes the share of time that the loop computed, 0..1, and how late its timer fired, in seconds."""


class LoopLag:
    """The sampler of the event loop: a timer every EVERY_S whose lateness is counted and passed to a listener."""

    def __init__(self, listener: Listener = lambda busy, late_s: None) -> None:
        self._listener = listener
        self.computed_s: Callable[[], float] = time.process_time
        """CPU time of this process, in seconds, or of that part of it which may cause stalls."""
        self._counts = [0] * (len(LAG_BOUNDS_S) + 1)
        self._sum_s = 0.0
        self.longest_stall_s = 0.0
        """The longest time since `metrics` was read that the loop stood still while this process computed. Time in
        which the machine gave the process no core is not in it."""

    def add(self, late_s: float) -> None:
        """Counts one sample, in seconds."""
        self._counts[bisect_left(LAG_BOUNDS_S, late_s)] += 1
        self._sum_s += late_s

    async def watch(self) -> None:
        """Samples until cancelled. Raises what the listener raises."""
        # A chain of timers: waking a task for each tick would take more of a core than all else of an idle coordinator.
        ticks = _Ticks(self)
        try:
            await ticks.over
        finally:
            ticks.timer.cancel()

    def tick(self, late_s: float, computed_s: float) -> None:
        """Takes how late a tick was, and what this process computed since the one before, in seconds."""
        self.longest_stall_s = max(self.longest_stall_s, min(late_s, computed_s))

    def sample(self, busy: float, late_s: float) -> None:
        """Counts a sample, and passes it on."""
        self.add(late_s)
        self._listener(busy, late_s)

    def metrics(self) -> list[Metric]:
        """The histogram so far, and the longest stall since the last call."""
        longest_s, self.longest_stall_s = self.longest_stall_s, 0.0
        buckets, reached = [], 0
        for bound, count in zip(
            (*(f"{bound:g}" for bound in LAG_BOUNDS_S), "+Inf"), self._counts, strict=True
        ):
            reached += count
            buckets.append((bound, float(reached)))
        family = HistogramMetricFamily(
            "splitserve_event_loop_lag_seconds", "How late timers fire on the coordinator's event loop"
        )
        family.add_metric([], buckets, sum_value=self._sum_s)
        text = "Longest time since the previous scrape that computation kept the coordinator's event loop from running"
        return [family, gauge("splitserve_event_loop_longest_stall_seconds", text, longest_s)]


class _Ticks:
    """The timers of one `LoopLag.watch`. `over` gets what goes wrong in them."""

    def __init__(self, lag: LoopLag) -> None:
        self._lag, self._loop = lag, asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()
        self._computed_s = lag.computed_s()
        self._begin(time.monotonic())

    def _begin(self, now_s: float) -> None:
        """Begins a sample."""
        self._since_s, self._busy_s, self._late_s = now_s, time.thread_time(), 0.0
        self._wait(now_s)

    def _wait(self, now_s: float) -> None:
        self._due_s = now_s + TICK_S
        self.timer = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        now_s, computed_s = time.monotonic(), self._lag.computed_s()
        late_s = max(0.0, now_s - self._due_s)
        self._lag.tick(late_s, computed_s - self._computed_s)
        self._computed_s, self._late_s = computed_s, max(self._late_s, late_s)
        if now_s < self._since_s + EVERY_S:
            self._wait(now_s)
            return
        try:
            self._lag.sample((time.thread_time() - self._busy_s) / (now_s - self._since_s), self._late_s)
        except Exception as error:
            self.over.set_exception(error)
            return
        self._begin(now_s)
