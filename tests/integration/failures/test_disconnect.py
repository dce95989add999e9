"""Clients that leave in each phase of a request (failure case 7)."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from splitserve.client import AsyncClient
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import Info, Reading, chunks_written, tokens, until, worker
from tests.support.engine.simulated_tokens import expected_tokens

LENGTH = 60_000
"""60 s of prefill, in chunks of 64 ms; more than half of the decode pool."""
STOPPED_WITHIN_S = 40.0
"""Far more than one chunk and some heartbeats of 0.1 s, and less than the work that is given up would still take."""
IDLE_TTFT_MS = 1e3 * STOPPED_WITHIN_S

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    options = [
        "--max-step-tokens",
        "64",
        "--simulated-prefill-token-s",
        "0.001",
        "--simulated-step-s",
        "0.01",
    ]
    options += [
        "--num-blocks",
        "6000",
        "--max-running-requests",
        "2",
        "--no-prefix-cache",
        "--heartbeat",
        "0.1",
    ]
    # The queues tested here are the workers' own; that of the coordinator's admission has tests of its own.
    cluster = Cluster(
        tmp_path_factory.mktemp("logs"), worker_options=options, coordinator_options=["--admission", "off"]
    )
    async with running(cluster):
        yield cluster


async def _all_is_free(cluster: Cluster, client: AsyncClient) -> None:
    """The leak oracle, and an answer at idle speed."""
    await cluster.assert_no_leaks()
    after = await client.generate(tokens(30, 99), max_tokens=4)
    assert list(after.token_ids) == expected_tokens(tokens(30, 99), 4)
    assert after.timings.ttft_ms < IDLE_TTFT_MS


def _waits(pool: str, count: str) -> Callable[[Info], Any]:
    return lambda info: getattr(worker(info, f"{pool}-0"), count)


async def test_while_prefilling_and_transferring(cluster: Cluster) -> None:
    async with AsyncClient(cluster.target) as client:
        reading = Reading(client, tokens(LENGTH, 1), max_tokens=5)
        await chunks_written(cluster)
        await until(
            cluster, lambda info: worker(info, "decode-0").reserved_blocks == LENGTH // 16, "it is reserved"
        )
        await reading.leave()
        left_s = time.monotonic()
        await until(cluster, lambda info: not worker(info, "prefill-0").running_requests, "computing stops")
        await until(cluster, lambda info: not worker(info, "decode-0").reserved_blocks, "blocks are freed")
        assert time.monotonic() - left_s < STOPPED_WITHIN_S
        await _all_is_free(cluster, client)


@pytest.mark.slow
async def test_while_queued_at_prefill(cluster: Cluster) -> None:
    async with AsyncClient(cluster.target) as client:
        # The worker computes two at a time, and the decode pool has room for more.
        ahead = [Reading(client, tokens(3000, 10 + n), max_tokens=5) for n in range(2)]
        await until(cluster, lambda info: worker(info, "prefill-0").running_requests == 2, "two are computed")
        queued = Reading(client, tokens(600, 12), max_tokens=5)
        await until(cluster, _waits("decode", "waiting_reservations"), "the third waits")
        await queued.leave()
        await until(
            cluster, lambda info: not worker(info, "decode-0").waiting_reservations, "it is forgotten"
        )
        for reading in ahead:
            await reading.task
            assert reading.tokens == expected_tokens(reading.prompt, 5)
        await _all_is_free(cluster, client)


async def test_while_waiting_for_room_on_decode(cluster: Cluster) -> None:
    async with AsyncClient(cluster.target) as client:
        first = Reading(client, tokens(LENGTH, 20), max_tokens=5)
        await until(cluster, _waits("decode", "reserved_blocks"), "the first has its blocks")
        second = Reading(client, tokens(LENGTH, 21), max_tokens=5)
        await until(cluster, _waits("decode", "waiting_reservations"), "the second waits")
        await second.leave()
        await until(
            cluster, lambda info: not worker(info, "decode-0").waiting_reservations, "it is forgotten"
        )
        assert not second.tokens
        await first.leave()
        await _all_is_free(cluster, client)


async def test_while_decoding(cluster: Cluster) -> None:
    async with AsyncClient(cluster.target) as client:
        readings = [Reading(client, tokens(40, 30 + n), max_tokens=6000) for n in range(2)]
        for reading in readings:
            await reading.got(10)
        for reading in readings:
            await reading.leave()
        left_s = time.monotonic()
        await until(cluster, lambda info: not worker(info, "decode-0").running_requests, "decoding stops")
        assert time.monotonic() - left_s < STOPPED_WITHIN_S
        await _all_is_free(cluster, client)


@pytest.mark.slow
async def test_while_the_last_write_is_under_way(log_dir: Path) -> None:
    """The write lands seconds after the client has left: nobody may own its blocks until then."""
    faults = {"late_write": {"at": [2]}, "hold_s": 8.0}
    async with _faulty(log_dir, faults) as (cluster, client):
        neighbour = await client.generate(tokens(60, 1), max_tokens=5)
        assert list(neighbour.token_ids) == expected_tokens(tokens(60, 1), 5)
        reading = Reading(client, tokens(200, 2), max_tokens=50)
        await reading.got(1)
        await reading.leave()
        await until(cluster, lambda info: worker(info, "decode-0").quarantined_blocks == 13, "quarantine")
        # All that is left of the pool goes to others, again and again, while the write is under way.
        others = [Reading(client, tokens(100, 10 + n), max_tokens=20) for n in range(30)]
        for other in others:
            await other.task
            assert other.tokens == expected_tokens(other.prompt, 20)
        await until(cluster, lambda info: not worker(info, "decode-0").quarantined_blocks, "it is over")
        await cluster.assert_no_leaks()


@pytest.mark.slow
async def test_while_waiting_to_decode(log_dir: Path) -> None:
    """Everything is written, and the word of it is late."""
    faults = {"delay_notification": {"at": [1]}, "hold_s": 8.0}
    async with _faulty(log_dir, faults) as (cluster, client):
        reading = Reading(client, tokens(200, 1), max_tokens=50)
        await reading.got(1)
        later = (await client.server_info()).uptime_seconds + 0.3  # reports may be of before the request
        await until(
            cluster,
            lambda info: info.uptime_seconds > later and not worker(info, "prefill-0").open_rpcs,
            "prefill is over",
        )
        await reading.leave()
        info = await until(
            cluster, lambda info: worker(info, "decode-0").free_blocks == 40, "blocks are free"
        )
        assert not worker(info, "decode-0").rejected_handoffs, "free before the word of the writes came"
        assert len(reading.tokens) == 1
        others = [Reading(client, tokens(100, 10 + n), max_tokens=20) for n in range(10)]
        for other in others:
            await other.task
            assert other.tokens == expected_tokens(other.prompt, 20)
        await until(cluster, lambda info: worker(info, "decode-0").rejected_handoffs == 1, "too late")
        await cluster.assert_no_leaks()


@asynccontextmanager
async def _faulty(log_dir: Path, faults: dict[str, Any]) -> AsyncIterator[tuple[Cluster, AsyncClient]]:
    options = ["--num-blocks", "40", "--no-prefix-cache", "--heartbeat", "0.1"]
    async with (
        running(Cluster(log_dir, worker_options=options, faults=faults)) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        yield cluster, client
