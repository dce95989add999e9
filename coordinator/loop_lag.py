"""How late the event loop is: everything on the coordinator waits at least so long."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left

from prometheus_client.core import HistogramMetricFamily, Metric

LAG_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
EVERY_S = 0.05


class LoopLag:
    """Lateness of a timer that fires twenty times a second."""

    def __init__(self) -> None:
        self._counts = [0] * (len(LAG_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, late_s: float) -> None:
        """Counts one value."""
        self._counts[bisect_left(LAG_BOUNDS_S, late_s)] += 1
        self._sum_s += late_s

    async def watch(self) -> None:
        """Measures until cancelled."""
        while True:
            due_s = time.monotonic() + EVERY_S
            await asyncio.sleep(EVERY_S)
            self.add(max(0.0, time.monotonic() - due_s))

    def metric(self) -> Metric:
        """The histogram so far."""
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
        return family
