"""Two coordinators in front of the same workers, which know nothing of each other."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from splitserve.client import AsyncClient
from splitserve.errors import UnavailableError
from tests.support.cluster.ports import free_port
from tests.support.cluster.processes import ServiceProcess
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import Reading, tokens
from tests.support.engine.simulated_tokens import expected_tokens
from tests.support.waiting import PATIENCE_S, SLACK_S

LEASE_S = 2.0
OPTIONS = ["--simulated-step-s", "0.02", "--simulated-prefill-token-s", "0.0001", "--lease", str(LEASE_S)]

pytestmark = pytest.mark.timeout(90)


async def test_one_dies_and_the_other_never_notices(log_dir: Path) -> None:
    port = free_port()
    other = ServiceProcess(
        "other", ["coordinator", "--grpc-port", str(port), "--http-port", "off"], log_dir, {}
    )
    other_target = f"127.0.0.1:{port}"
    cluster = Cluster(log_dir, worker_options=[*OPTIONS, "--coordinator", other_target])
    other.start()
    try:
        other.wait_event("coordinator.ready")
        async with running(cluster), AsyncClient(cluster.target) as ours, AsyncClient(other_target) as theirs:
            await theirs.wait_ready(PATIENCE_S)
            doomed = [Reading(ours, tokens(60, n), max_tokens=100_000) for n in range(3)]
            safe = [Reading(theirs, tokens(60, 10 + n), max_tokens=100_000) for n in range(3)]
            for reading in (*doomed, *safe):
                await reading.got(3)
            await _sees_running(theirs, 6)  # those of the other coordinator, too: routing counts them
            cluster.members["coordinator"].kill()
            killed_s = time.monotonic()
            for reading in doomed:
                with pytest.raises(UnavailableError):
                    await reading.task
            for reading, before in [(reading, len(reading.tokens)) for reading in safe]:
                await reading.got(before + 100)
                assert reading.tokens == expected_tokens(reading.prompt, len(reading.tokens))
                await reading.leave()
            cluster.target = other_target
            await cluster.assert_no_leaks()
            assert time.monotonic() - killed_s < LEASE_S + SLACK_S
    finally:
        other.terminate()


async def test_a_client_of_both_goes_to_the_one_that_lives(log_dir: Path) -> None:
    dead = f"127.0.0.1:{free_port()}"
    async with (
        running(Cluster(log_dir, worker_options=OPTIONS)) as cluster,
        AsyncClient(f"{dead},{cluster.target}") as client,
    ):
        for seed in range(2):
            answer = await client.generate(tokens(60, seed), max_tokens=5)
            assert list(answer.token_ids) == expected_tokens(tokens(60, seed), 5)
        assert (await client.models())[0].ready


async def _sees_running(client: AsyncClient, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            info = await client.server_info()
            if sum(worker.running_requests for worker in info.workers if worker.role == "decode") >= count:
                return
            await asyncio.sleep(0.05)
