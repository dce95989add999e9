"""Workers that do not fit those that serve already (failure case 11), and reports that cannot be."""

from __future__ import annotations

import asyncio
import math

import pytest

from splitserve.client import AsyncClient
from tests.support.cluster.fake_cluster import expected, fake_cluster
from tests.support.cluster.real_cluster import Cluster
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(90)


async def test_workers_of_another_model_end_with_one_line(
    simulated_cluster: Cluster, short_smollm2: str
) -> None:
    other = [
        "--engine",
        "torch",
        "--model",
        short_smollm2,
        "--served-model-name",
        "simulated",
        "--num-blocks",
        "64",
    ]
    odd = simulated_cluster.add_worker("decode", "odd-model", *other)
    assert await asyncio.to_thread(odd.process.wait, PATIENCE_S) != 0
    assert "model_fingerprint" in odd.log_tail()
    assert "Traceback" not in odd.log_tail()
    async with AsyncClient(simulated_cluster.target) as client:
        answer = await client.generate("hello", model="simulated", max_tokens=3)
        assert len(answer.token_ids) == 3
        info = await client.server_info()
        assert not any(worker.worker_id.startswith("odd") for worker in info.workers)
    await simulated_cluster.assert_no_leaks()


async def test_a_worker_that_reports_nonsense_is_passed_over_until_it_reports_sense() -> None:
    async with fake_cluster(prefill=2) as cluster:
        first, second = cluster.prefills
        first.load = {"latency": {"prefill": {"token_ms": math.nan}}}
        first.registry.report_now()
        registry = cluster.coordinator.registry
        while any(
            worker.worker_id == first.worker_id and worker.usable for worker in registry.snapshot().workers
        ):
            await registry.wait_change(registry.version)
        for _ in range(3):
            assert (await cluster.answer()).token_ids == expected(6)
        assert (len(first.calls.entries), len(second.calls.entries)) == (0, 3)
        first.load = {}
        await cluster.all_ready()
