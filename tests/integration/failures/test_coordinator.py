"""A coordinator that is told to end, that dies, and that comes back (failure case 24)."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from splitserve.client import AsyncClient
from splitserve.errors import UnavailableError
from tests.support.cluster.ports import free_port
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import Reading, tokens
from tests.support.engine.simulated_tokens import expected_tokens
from tests.support.waiting import PATIENCE_S, SLACK_S

OPTIONS = ["--simulated-step-s", "0.02", "--simulated-prefill-token-s", "0.001", "--max-step-tokens", "64"]
LEASE_S = 2.0
TOO_LONG = 100_000
"""Tokens: half an hour of decoding."""

pytestmark = pytest.mark.timeout(90)


async def test_sigterm_lets_open_streams_end(log_dir: Path) -> None:
    async with (
        running(Cluster(log_dir, worker_options=OPTIONS)) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        readings = [Reading(client, tokens(60, n), max_tokens=60) for n in range(4)]
        for reading in readings:
            await reading.got(3)
        coordinator = cluster.members["coordinator"]
        coordinator.signal(signal.SIGTERM)
        await asyncio.to_thread(coordinator.wait_event, "coordinator.draining")
        with pytest.raises(UnavailableError):
            await client.generate(tokens(10, 9), max_tokens=2)
        for reading in readings:
            await reading.task
            assert reading.tokens == expected_tokens(reading.prompt, 60)
        assert await asyncio.to_thread(coordinator.process.wait, PATIENCE_S) == 0


@pytest.mark.slow
async def test_after_sigkill_workers_free_everything_and_find_the_next_one(log_dir: Path) -> None:
    port = ["--grpc-port", str(free_port())]
    options = [*OPTIONS, "--lease", str(LEASE_S)]
    cluster = Cluster(log_dir, decode=2, worker_options=options, coordinator_options=port)
    async with running(cluster):
        for _ in range(2):
            async with AsyncClient(cluster.target) as client:
                # One of each: decoding, being computed and written, waiting.
                decoding = Reading(client, tokens(60, 1), max_tokens=TOO_LONG)
                await decoding.got(5)
                others = [Reading(client, tokens(2000, 2 + n), max_tokens=1000) for n in range(3)]
                await asyncio.to_thread(cluster.members["decode-0"].wait_event, "worker.ready")
                await decoding.got(20)
                cluster.members["coordinator"].kill()
                killed_s = time.monotonic()
                for reading in (decoding, *others):
                    with pytest.raises(UnavailableError):
                        await reading.task
            cluster.members["coordinator"].start()
            cluster.members["coordinator"].wait_event("coordinator.ready")
            await cluster.wait_ready()
            await cluster.assert_no_leaks()
            assert time.monotonic() - killed_s < LEASE_S + SLACK_S
            async with AsyncClient(cluster.target) as client:
                answer = await client.generate(tokens(60, 7), max_tokens=10)
            assert list(answer.token_ids) == expected_tokens(tokens(60, 7), 10)
