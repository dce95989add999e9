"""Faults while a decode worker computes a prompt itself (failure cases 1, 2, 7, 8 and 24 without a handoff)."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from splitserve.client import AsyncClient
from splitserve.errors import DeadlineExceededError, UnavailableError
from tests.support.cluster.ports import free_port
from tests.support.cluster.real_cluster import Cluster, proxied, running
from tests.support.cluster.streams import (
    Reading,
    busy,
    mid_prompt,
    tokens,
    total,
    until,
    worker,
)
from tests.support.engine.simulated_tokens import expected_tokens
from tests.support.waiting import SLACK_S

LOCAL = ["--local-prefill", "always"]
CHUNKS = ["--max-step-tokens", "64", "--simulated-prefill-token-s", "0.001", "--heartbeat", "0.1"]
"""A prompt of 2000 tokens takes 2 s, in chunks of 64 ms."""
CHUNKS += ["--no-prefix-cache"]
PROMPT_TOKENS, ANSWER_TOKENS = 2000, 12

pytestmark = pytest.mark.timeout(120)


async def computing(cluster: Cluster, client: AsyncClient, seed: int) -> tuple[Reading, str]:
    """A request whose prompt a decode worker is computing, and that worker."""
    reading, info = await mid_prompt(
        cluster,
        lambda n: Reading(client, tokens(PROMPT_TOKENS, seed + 10 * n), max_tokens=ANSWER_TOKENS),
        "decode",
    )
    assert not total(info, "prefill", "running_requests")
    return reading, busy(info, "decode")


async def complete(reading: Reading) -> int:
    """Waits for the whole answer, computed without a prefill worker; how many attempts it took."""
    answer = await reading.task
    assert reading.tokens == expected_tokens(reading.prompt, ANSWER_TOKENS)
    assert answer.served_by.prefill_worker == ""
    return answer.served_by.attempts


async def test_a_killed_worker_costs_the_prompt_a_second_attempt(log_dir: Path) -> None:
    cluster = Cluster(log_dir, decode=2, worker_options=CHUNKS, coordinator_options=LOCAL)
    async with running(cluster), AsyncClient(cluster.target) as client:
        reading, victim = await computing(cluster, client, 1)
        cluster.members[victim].kill()
        assert await complete(reading) == 2
        await cluster.assert_no_leaks()

        alone, last = await computing(cluster, client, 2)
        assert last != victim
        cluster.members[last].kill()
        killed_s = time.monotonic()
        with pytest.raises(UnavailableError, match="decode"):
            await alone.task
        assert time.monotonic() - killed_s < SLACK_S
        await cluster.assert_no_leaks()


async def test_a_prefill_worker_that_is_killed_is_not_missed_by_a_prompt_elsewhere(log_dir: Path) -> None:
    cluster = Cluster(log_dir, worker_options=CHUNKS, coordinator_options=LOCAL)
    async with running(cluster), AsyncClient(cluster.target) as client:
        reading, _ = await computing(cluster, client, 1)
        cluster.members["prefill-0"].kill()
        await until(cluster, lambda info: not worker(info, "prefill-0").worker_id, "it is gone")
        assert await complete(reading) == 1
        with pytest.raises(UnavailableError, match="prefill"):
            await client.generate(tokens(30, 2), max_tokens=4)
        await cluster.assert_no_leaks()


@pytest.mark.slow
async def test_a_thawed_worker_frees_everything_and_serves_again(log_dir: Path) -> None:
    options = [*LOCAL, "--heartbeat-timeout", "2", "--no-worker-wait", "60"]
    cluster = Cluster(
        log_dir, decode=2, worker_options=[*CHUNKS, "--lease", "1"], coordinator_options=options
    )
    async with running(cluster), AsyncClient(cluster.target) as client:
        reading, frozen = await computing(cluster, client, 1)
        cluster.members[frozen].signal(signal.SIGSTOP)
        assert await complete(reading) >= 2
        cluster.members[frozen].signal(signal.SIGCONT)
        await cluster.wait_ready()
        await cluster.assert_no_leaks()
        # Beside the other one, which of both is chosen is a matter of predictions.
        other = "decode-1" if frozen == "decode-0" else "decode-0"
        cluster.members[other].kill()
        await until(cluster, lambda info: not worker(info, other).worker_id, "the other one is gone")
        for n in range(4):
            await complete(Reading(client, tokens(200, 20 + n), max_tokens=ANSWER_TOKENS))
        await cluster.assert_no_leaks()


async def test_clients_that_leave_or_run_out_of_time_leave_no_work_behind(log_dir: Path) -> None:
    """One whose prompt is computed leaves, one that waits for it, and one whose deadline passes meanwhile."""
    options = [*CHUNKS, "--num-blocks", "1000", "--max-running-requests", "2"]
    at_coordinator = [*LOCAL, "--admission", "off"]
    cluster = Cluster(log_dir, worker_options=options, coordinator_options=at_coordinator)
    async with running(cluster), AsyncClient(cluster.target) as client:
        leaving, _ = await computing(cluster, client, 1)
        late = Reading(client, tokens(PROMPT_TOKENS, 2), max_tokens=ANSWER_TOKENS, timeout_s=1.0)
        queued = Reading(client, tokens(PROMPT_TOKENS, 3), max_tokens=ANSWER_TOKENS)
        staying = Reading(client, tokens(100, 4), max_tokens=ANSWER_TOKENS)
        with pytest.raises(DeadlineExceededError):
            await late.task
        assert not late.tokens
        await leaving.leave()
        await queued.leave()
        assert await complete(staying) == 1
        await cluster.assert_no_leaks()


@pytest.mark.slow
async def test_after_the_coordinators_death_the_worker_frees_the_prompt(log_dir: Path) -> None:
    at_coordinator = [*LOCAL, "--grpc-port", str(free_port())]
    cluster = Cluster(log_dir, worker_options=[*CHUNKS, "--lease", "1"], coordinator_options=at_coordinator)
    async with running(cluster):
        async with AsyncClient(cluster.target) as client:
            reading, _ = await computing(cluster, client, 1)
            cluster.members["coordinator"].kill()
            with pytest.raises(UnavailableError):
                await reading.task
        cluster.members["coordinator"].start()
        cluster.members["coordinator"].wait_event("coordinator.ready")
        await cluster.wait_ready()
        await cluster.assert_no_leaks()
        async with AsyncClient(cluster.target) as client:
            assert await complete(Reading(client, tokens(60, 7), max_tokens=ANSWER_TOKENS)) == 1


@pytest.mark.slow
async def test_a_prompt_goes_on_through_a_reset_connection(log_dir: Path) -> None:
    cluster = Cluster(log_dir, decode=0, worker_options=CHUNKS, coordinator_options=LOCAL)
    async with proxied(cluster) as proxy, AsyncClient(cluster.target) as client:
        reading, _ = await computing(cluster, client, 1)
        proxy.reset()
        coordinator = cluster.members["coordinator"]
        await asyncio.to_thread(coordinator.wait_event, "outputs.broken")
        assert await complete(reading) == 1
        await cluster.assert_no_leaks()


@pytest.mark.slow
async def test_a_prompt_moves_before_its_worker_is_taken_away(log_dir: Path) -> None:
    options = [*CHUNKS, "--spot-notice", "2"]
    cluster = Cluster(log_dir, decode=2, worker_options=options, coordinator_options=LOCAL)
    async with running(cluster), AsyncClient(cluster.target) as client:
        reading, left = await computing(cluster, client, 1)
        cluster.members[left].signal(signal.SIGUSR1)
        assert await complete(reading) == 2
        assert reading.task.result().served_by.decode_worker != left
        await cluster.assert_no_leaks()
