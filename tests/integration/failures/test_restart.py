"""Workers that come back at the same address under load (failure cases 4 and 10)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from splitserve.client import AsyncClient, Completion
from tests.support.cluster.ports import free_port
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import eventually, restarted, tokens
from tests.support.engine.simulated_tokens import expected_tokens
from tests.support.waiting import SLACK_S

BLOCK = 16
RESTARTS = 30

pytestmark = pytest.mark.timeout(300)


@asynccontextmanager
async def _load(
    client: AsyncClient, readers: int, length: int
) -> AsyncIterator[list[tuple[float, Completion]]]:
    """So many readers ask again and again meanwhile; (when, answer) of all, each of them right."""
    answers: list[tuple[float, Completion]] = []
    over = asyncio.Event()

    async def ask(number: int) -> None:
        while not over.is_set():
            number += readers
            prompt = tokens(length, number)
            answer = await client.generate(prompt, max_tokens=12)
            assert list(answer.token_ids) == expected_tokens(prompt, 12)
            answers.append((time.monotonic(), answer))

    async with asyncio.TaskGroup() as group:
        for number in range(readers):
            group.create_task(ask(number))
        yield answers
        over.set()


@pytest.mark.slow
async def test_restarts_at_the_same_address_under_load(log_dir: Path) -> None:
    options = ["--simulated-step-s", "0.01", "--heartbeat", "0.1", "--drain", "2"]
    async with (
        running(Cluster(log_dir, worker_options=options)) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        for pool in ("prefill", "decode"):
            cluster.add_worker(pool, f"{pool}-1", "--port", str(free_port()))
        await cluster.wait_ready(prefill=2, decode=2)
        async with _load(client, readers=4, length=200) as answers:
            for round_number in range(RESTARTS // 2):
                names = ["prefill-1", "decode-1"]
                began_s, served = time.monotonic(), len(answers)
                for name in names:
                    member = cluster.members[name]
                    if round_number % 5 == 4:
                        assert await asyncio.to_thread(member.terminate) == 0
                    else:
                        member.kill()
                    member.start()
                # Served by both of the new boots, not merely registered.
                await cluster.wait_ready(prefill=2, decode=2)
                await eventually(
                    lambda: _who_served(answers[served:], began_s) >= set(names),  # noqa: B023
                    "both new boots serve",
                )
                assert time.monotonic() - began_s < SLACK_S
        assert len(answers) > RESTARTS
        await cluster.assert_no_leaks()


def _who_served(answers: list[tuple[float, Completion]], since_s: float) -> set[str]:
    return {
        name
        for when, answer in answers
        if when > since_s
        for name in (answer.served_by.prefill_worker, answer.served_by.decode_worker)
    }


@pytest.mark.parametrize("loser", ["prefill-0", "decode-0"])
async def test_prefix_hits_on_either_side_alone(log_dir: Path, loser: str) -> None:
    """After one side's restart the other still holds the prefix."""
    options = ["--max-step-tokens", "64", "--heartbeat", "0.1"]
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, 8 * BLOCK - 1, 8 * BLOCK, 8 * BLOCK + 1]
    async with (
        running(Cluster(log_dir, worker_options=options)) as cluster,
        AsyncClient(cluster.target) as client,
    ):
        first = [await client.generate(tokens(n, n), max_tokens=20) for n in lengths]
        await restarted(cluster, loser)
        for length, before in zip(lengths, first, strict=True):
            for prompt in (tokens(length, length), tokens(length, length) + tokens(5, 0), tokens(length, 77)):
                answer = await client.generate(prompt, max_tokens=20)
                assert list(answer.token_ids) == expected_tokens(prompt, 20)
            again = await client.generate(tokens(length, length), max_tokens=20)
            assert again.token_ids == before.token_ids
            assert again.usage.decode_cached_tokens == length // BLOCK * BLOCK
            assert again.usage.cached_prompt_tokens == (length - 1) // BLOCK * BLOCK
        await cluster.assert_no_leaks()
