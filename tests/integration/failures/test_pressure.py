"""Many cancels, and a decode pool without room (failure cases 15 and 16)."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

from splitserve.client import AsyncClient
from tests.support.clients.traffic import REPEATS
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import Reading, tokens, until, worker
from tests.support.engine.simulated_tokens import expected_tokens

AT_WORKERS = ("--admission", "off")
"""Requests wait at the workers; test_overload.py has those that wait at the coordinator."""


async def test_a_hundred_cancelled_prompts_leave_no_work_behind(log_dir: Path) -> None:
    options = ["--max-step-tokens", "64", "--simulated-prefill-token-s", "0.001", "--heartbeat", "0.1"]
    async with (
        running(Cluster(log_dir, worker_options=options, coordinator_options=AT_WORKERS)) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        idle = await client.generate(tokens(500, 0), max_tokens=2)
        assert idle.timings.ttft_ms > 500
        # 200 s of work, were it done.
        long = [Reading(client, tokens(2000, n), max_tokens=2) for n in range(100)]
        await until(cluster, lambda info: worker(info, "prefill-0").waiting_requests > 30, "they queue")
        await asyncio.gather(*(reading.leave() for reading in long))
        short = await client.generate(tokens(500, 1000), max_tokens=2)
        assert short.timings.ttft_ms < 60_000, (
            "not behind thirty of them, whatever the machine does beside it"
        )
        await cluster.assert_no_leaks()


async def test_a_full_decode_pool_stops_admission_and_nothing_else(log_dir: Path) -> None:
    options = ["--num-blocks", "40", "--no-prefix-cache", "--simulated-step-s", "0.02", "--heartbeat", "0.1"]
    async with (
        running(Cluster(log_dir, worker_options=options, coordinator_options=AT_WORKERS)) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        for repeat in range(REPEATS):
            readings = [Reading(client, tokens(160, 100 * repeat + n), max_tokens=40) for n in range(12)]
            info = await until(
                cluster, lambda info: worker(info, "decode-0").waiting_reservations >= 6, "reservations wait"
            )
            # What has no room on decode is not computed either.
            prefill = worker(info, "prefill-0")
            assert prefill.waiting_requests + prefill.running_requests <= 40 // 10
            answers = [await reading.task for reading in readings]
            for reading in readings:
                assert reading.tokens == expected_tokens(reading.prompt, 40)
            waits = sorted(answer.timings.reserve_ms for answer in answers)
            assert waits[-1] - waits[0] > 800
            late = max(answers, key=lambda answer: answer.timings.reserve_ms)
            assert late.timings.queue_ms >= late.timings.reserve_ms
            elsewhere = statistics.median(a.timings.ttft_ms - a.timings.reserve_ms for a in answers)
            if elsewhere < 0.5 * late.timings.reserve_ms:
                break
        assert elsewhere < 0.5 * late.timings.reserve_ms
        await cluster.assert_no_leaks()
