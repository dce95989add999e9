"""Samples how late and how busy the event loop is. Every request waits at least that long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from prometheus_client.core import HistogramMetricFamily, Metric

from splitserve.histograms import DurationCounts
from splitserve.metrics import add_durations, gauge

EVERY_S = 0.05
TICK_S = 0.01
"""The shortest stall that is certainly noticed."""

Listener = Callable[[float, float], None]
"""Takes the share of time that the loop computed, 0..1, and how late its timer fired, in seconds."""


class LoopLag:
    """Samples the event loop by a timer every TICK_S; each EVERY_S the worst lateness is counted and passed to a
    listener."""

    def __init__(self, listener: Listener = lambda busy, late_s: None) -> None:
        self._listener = listener
        self.computed_s: Callable[[], float] = time.process_time
        """CPU time in seconds of this process, or of the threads that may cause stalls."""
        self._late = DurationCounts()
        self.longest_stall_s = 0.0
        """The longest time since the last `metrics` for which the loop stood still while this process computed. Time in
        which the process had no core does not count."""

    async def watch(self) -> None:
        """Samples until cancelled. Raises the listener's errors."""
        since_s, busy_s, worst_s = time.monotonic(), time.thread_time(), 0.0
        while True:
            due_s, computed_s = time.monotonic() + TICK_S, self.computed_s()
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            late_s = max(0.0, now_s - due_s)
            self.longest_stall_s = max(self.longest_stall_s, min(late_s, self.computed_s() - computed_s))
            worst_s = max(worst_s, late_s)
            if now_s >= since_s + EVERY_S:
                self._late.add(worst_s)
                self._listener((time.thread_time() - busy_s) / (now_s - since_s), worst_s)
                since_s, busy_s, worst_s = now_s, time.thread_time(), 0.0

    def metrics(self) -> list[Metric]:
        """The histogram so far, and the longest stall since the last call."""
        longest_s, self.longest_stall_s = self.longest_stall_s, 0.0
        family = HistogramMetricFamily(
            "splitserve_event_loop_lag_seconds",
            "How late timers fire on the coordinator's event loop",
            labels=(),
        )
        add_durations(family, [], self._late)
        text = "Longest time since the previous scrape that computation kept the coordinator's event loop from running"
        return [family, gauge("splitserve_event_loop_longest_stall_seconds", text, longest_s)]
