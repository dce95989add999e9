"""Two workers of one id, which only a mistake starts: the one that came last serves, the other one when it has gone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from splitserve.client import AsyncClient
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import tokens, until, worker
from tests.support.engine.simulated_tokens import expected_tokens
from tests.support.waiting import LEAST_TIMEOUT_S

pytestmark = pytest.mark.timeout(LEAST_TIMEOUT_S)
LANES, MAX_TOKENS = 8, 40
WAIT = ["--no-worker-wait", "120", "--admission", "off"]
"""Requests wait for the worker that comes back, and for blocks at the worker: three have room."""


async def test_streams_move_to_the_later_one_and_back_when_it_is_killed_while_it_reserves(
    log_dir: Path,
) -> None:
    options = ["--simulated-step-s", "0.02", "--heartbeat", "0.1", "--num-blocks", "40", "--no-prefix-cache"]
    over, setup = asyncio.Event(), Cluster(log_dir, worker_options=options, coordinator_options=WAIT)
    async with running(setup) as cluster, AsyncClient(cluster.target) as client:

        async def ask(number: int) -> None:
            while not over.is_set():
                prompt = tokens(100, number)
                answer = await client.generate(prompt, max_tokens=MAX_TOKENS)
                assert list(answer.token_ids) == expected_tokens(prompt, MAX_TOKENS)
                number += LANES

        first = worker(await client.server_info(), "decode-0").address
        async with asyncio.TaskGroup() as group:
            for lane in range(LANES):
                group.create_task(ask(lane))
            twin = cluster.add_worker("decode", "twin", "--worker-id", "decode-0")
            await until(
                cluster, lambda info: worker(info, "decode-0").address not in ("", first), "the later serves"
            )
            earlier = cluster.members["decode-0"]
            refused = await asyncio.to_thread(earlier.wait_event, "registry.refused")
            assert (refused["level"], refused["reason"]) == ("error", "WORKER_REPLACED")
            await until(cluster, lambda info: worker(info, "decode-0").waiting_reservations, "some wait")
            twin.kill()
            await until(cluster, lambda info: worker(info, "decode-0").address == first, "it is back")
            await client.generate(tokens(50, 1), max_tokens=2)
            over.set()
        taken = [
            e for e in cluster.members["coordinator"].events() if e.get("why") == "replaced by a new boot"
        ]
        assert len(taken) == 1, "they do not take the id from each other in turn"
        await cluster.assert_no_leaks()
