"""Long-lived loops of a process. A loop that fails is logged, counted and started again; it never ends the others."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from prometheus_client.core import CounterMetricFamily, Metric

from splitserve.logs import log_exception
from splitserve.runtime.cancellation import is_being_cancelled

FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 30.0


class LoopRunner:
    """Runs loops as tasks of its callers' task groups. `name` is one of a fixed set: it is a metric's label."""

    def __init__(self) -> None:
        self._failures: Counter[str] = Counter()

    async def run(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        """Runs `loop` until it returns or this call is cancelled. After an exception `loop` is called again, after a
        pause that doubles up to LAST_PAUSE_S, and is short again after a run that lasted longer than that."""
        pause_s = FIRST_PAUSE_S
        self._failures[name] += 0
        while True:
            began_s = time.monotonic()
            try:
                await loop()
            except asyncio.CancelledError as error:
                if is_being_cancelled():
                    raise
                # A library cancelled what the loop awaited, as gRPC does when a channel is closed.
                self._failed(name, error)
            except Exception as error:
                self._failed(name, error)
                if is_being_cancelled():
                    # The loop was cancelled, and its clean-up failed.
                    raise asyncio.CancelledError from error
            else:
                return
            if time.monotonic() - began_s > LAST_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def metric(self) -> Metric:
        """Failures so far, by loop."""
        text = "Failures of background loops, which were started again"
        failures = CounterMetricFamily("splitserve_loop_failures", text, labels=["loop"])
        for name, count in self._failures.items():
            failures.add_metric([name], count)
        return failures

    def _failed(self, name: str, error: BaseException) -> None:
        self._failures[name] += 1
        log_exception("loop.failed", error, loop=name)
