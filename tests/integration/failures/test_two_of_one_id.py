"""Two workers of one id, which only a mistake starts: the one that came last serves, the other one when it has gone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.runner.simulated_runner import expected_tokens
from splitserve.client import AsyncClient
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import Reading, tokens, until, worker
from tests.support.waiting import LEAST_TIMEOUT_S

pytestmark = pytest.mark.timeout(LEAST_TIMEOUT_S)
WAIT = ["--no-worker-wait", "120", "--admission", "off"]
"""Streams outlive the time in which the other one has not come back yet, and wait for blocks at the worker."""


async def test_streams_move_to_the_later_one_and_back_when_it_is_killed_while_it_reserves(
    log_dir: Path,
) -> None:
    options = ["--simulated-step-s", "0.02", "--heartbeat", "0.1", "--num-blocks", "40", "--no-prefix-cache"]
    setup = Cluster(log_dir, worker_options=options, coordinator_options=WAIT)
    async with running(setup) as cluster, AsyncClient(cluster.target) as client:
        readings = [Reading(client, tokens(100, n), max_tokens=60) for n in range(8)]
        await readings[0].got(3)
        first = worker(await client.server_info(), "decode-0").address
        twin = cluster.add_worker("decode", "twin", "--worker-id", "decode-0")
        await until(
            cluster, lambda info: worker(info, "decode-0").address not in ("", first), "the later one serves"
        )
        earlier = cluster.members["decode-0"]
        refused = await asyncio.to_thread(earlier.wait_event, "registry.refused")
        assert (refused["level"], refused["reason"]) == ("error", "WORKER_REPLACED")
        await until(
            cluster, lambda info: worker(info, "decode-0").waiting_reservations, "some wait for blocks"
        )
        twin.kill()
        await until(
            cluster, lambda info: worker(info, "decode-0").address == first, "the earlier one is back"
        )
        for reading in readings:
            await reading.task
            assert reading.tokens == expected_tokens(reading.prompt, 60)
        taken = [
            e for e in cluster.members["coordinator"].events() if e.get("why") == "replaced by a new boot"
        ]
        assert len(taken) == 1, "they do not take the id from each other in turn"
        await cluster.assert_no_leaks()
