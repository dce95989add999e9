"""The sampler of the event loop feeds the metric and the listener."""

from __future__ import annotations

import asyncio
import time

import pytest

from coordinator.telemetry.event_loop import EVERY_S, LoopLag


def count(lag: LoopLag) -> float:
    return next(s.value for metric in lag.metrics() for s in metric.samples if s.name.endswith("_count"))


def longest_stall_s(lag: LoopLag) -> float:
    return next(
        s.value for metric in lag.metrics() for s in metric.samples if s.name.endswith("stall_seconds")
    )


@pytest.mark.timeout(20)
async def test_a_blocked_loop_is_seen_by_the_metric_and_by_the_listener() -> None:
    samples: list[tuple[float, float]] = []
    enough = asyncio.Event()

    def listen(busy: float, late_s: float) -> None:
        samples.append((busy, late_s))
        if len(samples) == 2:
            enough.set()

    lag = LoopLag(listen)
    watching = asyncio.create_task(lag.watch())
    await asyncio.sleep(0)
    until_s = time.thread_time() + 4 * EVERY_S
    while time.thread_time() < until_s:  # computes, so that the loop is both late and busy
        pass
    await enough.wait()
    watching.cancel()
    busy, late_s = samples[0]
    assert late_s >= 2 * EVERY_S
    assert 0 < busy <= 1.1
    assert longest_stall_s(lag) >= 3 * EVERY_S
    assert longest_stall_s(lag) < 3 * EVERY_S
    assert count(lag) == len(samples)
    assert all(late_s >= 0 for _, late_s in samples)
