"""Wrong bytes on a real lane: without checksums wrong tokens, with them another try and the right ones."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from splitserve.client import AsyncClient
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.engine.simulated_tokens import expected_tokens
from tests.support.waiting import PATIENCE_S

PROMPT = [(7 * n) % 250 for n in range(1, 400)]
MAX_TOKENS = 8
EXPECTED = expected_tokens(PROMPT, MAX_TOKENS)
FIRST_WRITE = {"wrong_bytes": {"at": [1]}}
EVERY_WRITE = {"wrong_bytes": {"every": 1}}


def a_cluster(log_dir: Path, faults: dict[str, Any] | None, *options: str) -> Cluster:
    # Short, so that what waits in quarantine for a late write comes back while the test looks.
    times = ("--ticket", "3", "--quarantine", "2")
    return Cluster(log_dir, decode=2, worker_options=(*times, *options), faults=faults)


async def test_without_checksums_wrong_bytes_give_wrong_tokens(log_dir: Path) -> None:
    cluster = a_cluster(log_dir, EVERY_WRITE, "--verify-kv", "off")
    async with running(cluster), AsyncClient(cluster.target) as client:
        answer = await client.generate(PROMPT, max_tokens=MAX_TOKENS)
        assert list(answer.token_ids) != EXPECTED, "the fault does what it says"


@pytest.mark.parametrize("verify", ["sampled", "all"])
async def test_right_bytes_pass(log_dir: Path, verify: str) -> None:
    cluster = a_cluster(log_dir, None, "--verify-kv", verify)
    async with running(cluster), AsyncClient(cluster.target) as client:
        for end in (1, 16, 17, 200, 399):
            answer = await client.generate(PROMPT[:end], max_tokens=MAX_TOKENS)
            assert list(answer.token_ids) == expected_tokens(PROMPT[:end], MAX_TOKENS)
            assert answer.served_by.attempts == 1
        await cluster.assert_no_leaks()


@pytest.mark.slow
async def test_wrong_bytes_are_refused_and_the_request_goes_on_elsewhere(log_dir: Path) -> None:
    cluster = a_cluster(log_dir, FIRST_WRITE, "--verify-kv", "all")
    async with running(cluster), AsyncClient(cluster.target) as client:
        answer = await client.generate(PROMPT, max_tokens=MAX_TOKENS)
        assert list(answer.token_ids) == EXPECTED
        assert answer.served_by.attempts == 2
        async with asyncio.timeout(
            PATIENCE_S
        ):  # a heartbeat brings it; the blocks wait in quarantine meanwhile
            while True:
                workers = (await client.server_info()).workers
                if any(worker.rejected_handoffs for worker in workers):
                    break
                await asyncio.sleep(0.05)
        assert sum(worker.rejected_handoffs for worker in workers) == 1
        assert sum(worker.quarantined_blocks for worker in workers) == len(PROMPT) // 16 + 1
        rejected = [
            event
            for name in ("decode-0", "decode-1")
            for event in cluster.members[name].events()
            if event["event"] == "handoff.rejected"
        ]
        assert [event["reason"] for event in rejected] == ["checksum_mismatch"]
        await cluster.assert_no_leaks()
