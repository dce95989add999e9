"""Steady load with 30% cancels (case 20): memory, files, blocks, series, scrapes and the event loop stay as they are.

36 s unless `SPLITSERVE_SOAK_SECONDS` says otherwise; the long form takes an hour.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
import urllib.request
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from prometheus_client.parser import text_string_to_metric_families

from splitserve.client import AsyncClient
from tests.support.clients.traffic import Shape, offer, process_of, rss_mb
from tests.support.cluster.real_cluster import Cluster, running

SECONDS = float(os.environ.get("SPLITSERVE_SOAK_SECONDS", "36"))
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(SECONDS * 1.5 + 120)]
PER_S = 12.0
ENGINE = ["--simulated-step-s", "0.004", "--num-blocks", "2048", "--heartbeat", "0.5"]
LAG = "splitserve_event_loop_lag_seconds"


@dataclass(frozen=True, slots=True)
class Look:
    """The coordinator and its workers at one moment. Memory in 10^6 bytes, by member."""

    rss_mb: dict[str, float]
    files: dict[str, int]
    series: int
    scrape_s: float
    lag_buckets: dict[float, float]


def requests() -> object:
    pick = random.Random(7)

    def shape(_number: int) -> Shape:
        output = pick.randint(1, 60)
        leaves = pick.randint(0, output - 1) if pick.random() < 0.3 else None
        return Shape(pick.randint(1, 400), output, leaves or (1 if leaves == 0 else None))

    return shape


async def look(cluster: Cluster, port: int) -> Look:
    url = f"http://127.0.0.1:{port}/metrics"
    began = time.monotonic()
    page = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read().decode())
    scrape_s = time.monotonic() - began
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    lag = {float(s.labels["le"]): s.value for s in samples if s.name == f"{LAG}_bucket"}
    names = list(cluster.members)
    return Look(
        {name: rss_mb(cluster, name) for name in names},
        {name: process_of(cluster, name).num_fds() for name in names},
        len(samples),
        scrape_s,
        lag,
    )


def lag_p99_s(before: Look, after: Look) -> float:
    counts = {bound: after.lag_buckets[bound] - before.lag_buckets[bound] for bound in after.lag_buckets}
    return min(bound for bound, count in counts.items() if count >= 0.99 * counts[float("inf")])


async def test_nothing_grows(log_dir: Path) -> None:
    cluster = Cluster(log_dir, worker_options=ENGINE, coordinator_options=["--metrics-port", "0"])
    async with running(cluster), AsyncClient(cluster.target) as client:
        port = cluster.members["coordinator"].wait_event("metrics.ready")["port"]
        shape = requests()
        await offer(client, PER_S, SECONDS / 3, shape, seed=1)  # type: ignore[arg-type]
        await cluster.assert_no_leaks()
        before = await look(cluster, port)
        traffic = asyncio.create_task(offer(client, PER_S, SECONDS * 2 / 3, shape, seed=2))  # type: ignore[arg-type]
        looks = [before]
        while not traffic.done():
            await asyncio.wait([traffic], timeout=min(10.0, SECONDS / 12))
            looks.append(await look(cluster, port))
        outcomes = (await traffic).outcomes
        await cluster.assert_no_leaks()
        after = await look(cluster, port)
        left = sum(one.answer is None and one.error is None for one in outcomes)
        # The median over the parts: what else the machine does in one of them decides nothing.
        lag_s = median(lag_p99_s(*pair) for pair in pairwise(looks))
        print(
            f"{len(outcomes)} requests, {left} of them left; memory {before.rss_mb} -> {after.rss_mb} MB, "
            f"files {before.files} -> {after.files}, {after.series} series, "
            f"scrape up to {max(one.scrape_s for one in looks):.3f} s, loop lag p99 <= {lag_s} s"
        )
        assert not [one.error for one in outcomes if one.error is not None]
        assert 0.15 * len(outcomes) < left < 0.45 * len(outcomes)
        for name, rss in after.rss_mb.items():
            # An hour may not take more than half a minute does.
            assert rss - before.rss_mb[name] < 12, name
            assert abs(after.files[name] - before.files[name]) <= 4, name
        assert after.series == before.series
        assert median(one.scrape_s for one in looks[-len(looks) // 3 :]) < 1.0
        assert lag_s <= 0.02
