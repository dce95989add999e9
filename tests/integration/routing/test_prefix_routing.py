"""Prefix routing over real processes: a prompt comes back to who computed it, also after restarts."""

from __future__ import annotations

import asyncio
from pathlib import Path

from splitserve.client import AsyncClient
from splitserve.client.types import Completion
from tests.support.cluster.ports import free_port
from tests.support.cluster.processes import ServiceProcess
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import restarted
from tests.support.waiting import PATIENCE_S

PREFILLS = 3
SLOW = ("--simulated-prefill-token-s", "0.0005")
"""0.4 s a prompt: far more than a block takes, beside whatever else the machine does."""
MIN_PROMPTS, MAX_PROMPTS = 6, 60


def prompt(seed: int) -> list[int]:
    return [(seed * 31 + 7 * n) % 250 for n in range(800)]


async def ask(client: AsyncClient, seed: int) -> Completion:
    return await client.generate(prompt(seed), max_tokens=4, temperature=0.0, ignore_eos=True)


async def first_holders(client: AsyncClient, prefills: int = PREFILLS) -> dict[int, str]:
    """Who computed each of a few prompts. A worker whose first measurement was slow, on a busy machine, gets few."""
    holders: dict[int, str] = {}
    for seed in range(1, MAX_PROMPTS):
        holders[seed] = (await ask(client, seed)).served_by.prefill_worker
        if seed >= MIN_PROMPTS and len(set(holders.values())) == prefills:
            break
    return holders


async def test_the_same_prefix_goes_where_it_was_computed(log_dir: Path) -> None:
    async with running(Cluster(log_dir, prefill=PREFILLS, worker_options=SLOW)) as cluster:
        async with AsyncClient(cluster.target) as client:
            holders = await first_holders(client)
            assert len(set(holders.values())) == PREFILLS
            for seed, holder in holders.items():
                again = await ask(client, seed)
                assert again.served_by.prefill_worker == holder
                assert again.usage.cached_prompt_tokens == 784  # all but the last, partly filled block
                assert again.usage.decode_cached_tokens > 0
        await cluster.assert_no_leaks()


async def test_a_restarted_worker_is_known_to_hold_nothing(log_dir: Path) -> None:
    async with running(Cluster(log_dir, prefill=1, coordinator_options=["--warm-prefixes", "0"])) as cluster:
        async with AsyncClient(cluster.target) as client:
            await ask(client, 1)
            assert (await ask(client, 1)).usage.cached_prompt_tokens > 0
            await restarted(cluster, "prefill-0")
            cluster.add_worker("prefill", "prefill-1")
            await cluster.wait_ready(prefill=2)
            assert (await ask(client, 1)).usage.cached_prompt_tokens == 0
            # Nothing draws everything to the worker that once held a prompt.
            assert len(set((await first_holders(client, 2)).values())) == 2
        await cluster.assert_no_leaks()


async def test_a_restarted_coordinator_learns_what_the_workers_hold(log_dir: Path) -> None:
    port = str(free_port())
    made = Cluster(log_dir, prefill=PREFILLS, worker_options=SLOW, coordinator_options=["--grpc-port", port])
    async with running(made) as cluster:
        async with AsyncClient(cluster.target) as client:
            holders = await first_holders(client)
        cluster.members["coordinator"].terminate()
        again = ServiceProcess("coordinator-again", ["coordinator", "--grpc-port", port], log_dir)
        cluster.members["coordinator"] = again
        again.start()
        again.wait_event("coordinator.ready")
        await cluster.wait_ready()
        async with AsyncClient(cluster.target) as client, asyncio.timeout(PATIENCE_S):
            for seed, holder in holders.items():
                answer = await ask(client, seed)
                assert answer.served_by.prefill_worker == holder
                assert answer.usage.cached_prompt_tokens == 784
        await cluster.assert_no_leaks()
