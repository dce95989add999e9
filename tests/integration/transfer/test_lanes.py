"""Lanes between real workers: measured at first contact, and loud, or refused, where they are slow."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from splitserve.client import AsyncClient
from splitserve.errors import UnavailableError
from splitserve.v1 import inference_pb2
from tests.support.cluster.real_cluster import Cluster, running

pytestmark = pytest.mark.slow

PROMPT = list(range(1, 100))
BIG_BLOCKS = ("--block-size", "1024", "--num-blocks", "64")
"""16 KiB each, so that a probe measures bandwidth."""
TCP = {"UCX_TLS": "tcp"}
NAMED = re.compile(r"\d+\.\d\d GB/s over tcp")


def lane_of(info: inference_pb2.GetServerInfoResponse) -> tuple[str, inference_pb2.LaneInfo]:
    prefill = next(worker for worker in info.workers if worker.role == "prefill")
    (lane,) = prefill.lanes
    assert lane.peer == "decode-0"
    return prefill.state, lane


async def test_a_lane_as_expected_is_measured_and_says_nothing(log_dir: Path) -> None:
    async with running(Cluster(log_dir, worker_options=BIG_BLOCKS)) as cluster:
        async with AsyncClient(cluster.target) as client:
            state, lane = lane_of(await client.server_info())
            answer = await client.generate(PROMPT, max_tokens=4, temperature=0.0)
        assert len(answer.token_ids) == 4
        assert (state, lane.lane, lane.problem, lane.refused) == ("ready", "local", "", False)
        assert lane.gb_per_second > 0.1
        assert 0 < lane.latency_ms < 100
        events = cluster.members["prefill-0"].events()
        assert [event["event"] for event in events if event["event"].startswith("lane.")] == ["lane.measured"]
        await cluster.assert_no_leaks()


async def test_tcp_where_shared_memory_is_expected_raises_an_alarm(log_dir: Path) -> None:
    async with running(Cluster(log_dir, worker_options=BIG_BLOCKS, environment=TCP)) as cluster:
        async with AsyncClient(cluster.target) as client:
            state, lane = lane_of(await client.server_info())
            answer = await client.generate(PROMPT, max_tokens=4, temperature=0.0)
        assert len(answer.token_ids) == 4, "a warning keeps nobody from being served"
        assert (state, lane.lane, lane.refused) == ("slow-lane", "tcp", False)
        assert NAMED.search(lane.problem)
        alarm = cluster.members["prefill-0"].wait_event("lane.slow")
        assert alarm["level"] == "warning"
        assert alarm["gb_per_s"] > 0
        assert NAMED.search(alarm["problem"])
        await cluster.assert_no_leaks()


@pytest.mark.parametrize("environment", [TCP, {}], ids=["tcp", "local"])
async def test_a_refused_lane_is_named_in_the_error(log_dir: Path, environment: dict[str, str]) -> None:
    options = [*BIG_BLOCKS, "--lane-policy", "refuse"]
    if not environment:
        options += ["--expected-lane", "5000"]  # faster than any
    cluster = Cluster(
        log_dir,
        worker_options=options,
        coordinator_options=["--no-worker-wait", "0.2"],
        environment=environment,
    )
    try:
        await cluster.start(wait_ready=False)
        cluster.members["prefill-0"].wait_event("lane.slow")
        async with AsyncClient(cluster.target) as client:
            while True:
                if any(worker.state == "slow-lane" for worker in (await client.server_info()).workers):
                    break
                await asyncio.sleep(0.02)
            with pytest.raises(
                UnavailableError, match=r"prefill-0 to decode-0: \d+\.\d\d GB/s over"
            ) as refusal:
                await client.generate(PROMPT, max_tokens=4, temperature=0.0)
            assert refusal.value.reason == "SLOW_LANE"
            assert lane_of(await client.server_info())[1].refused
    finally:
        cluster.stop()


async def test_no_expectation_no_alarm(log_dir: Path) -> None:
    options = [*BIG_BLOCKS, "--expected-lane", "0", "--lane-policy", "refuse"]
    async with running(Cluster(log_dir, worker_options=options, environment=TCP)) as cluster:
        async with AsyncClient(cluster.target) as client:
            state, lane = lane_of(await client.server_info())
        assert (state, lane.lane, lane.problem) == ("ready", "tcp", "")
