"""Pinned pools whose workers trade prefixes: a conversation's KV goes from its decode worker to the prefill worker of
the next turn, hot prefixes go to a new prefill worker, and without the setting nothing is as much as connected."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from engine.runner.simulated_runner import expected_tokens
from splitserve.client import AsyncClient
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.integration.routing.test_peer_fetch import events, seeded_whole
from tests.support.clients.text import sentences
from tests.support.clients.traffic import REPEATS
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import tokens
from tests.support.engine.reference import Reference
from tests.support.waiting import LEAST_TIMEOUT_S, PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LEAST_TIMEOUT_S)]
BLOCK, PREFIX = 16, 320
PROMPT, ANSWER, NEXT = 96, 64, 8
"""Tokens of the first turn's prompt and answer, and of the second answer."""
HEARTBEAT_S = 0.1
WORKERS = ["--block-size", str(BLOCK), "--heartbeat", str(HEARTBEAT_S)]
TRADING = [*WORKERS, "--peer-fetch", "on"]
COORDINATOR = ["--routing", "round-robin", "--peer-fetch", "on"]
SIMULATED = ["--simulated-prefill-token-s", "0.002"]


async def lanes(client: AsyncClient) -> dict[str, list[str]]:
    """The peers of each worker."""
    workers = (await client.server_info()).workers
    return {worker.worker_id: sorted(lane.peer for lane in worker.lanes) for worker in workers}


async def all_connected(client: AsyncClient, names: list[str]) -> None:
    """Waits until each of these has a lane to each other one."""
    await until_lanes(client, {name: sorted({*names} - {name}) for name in names})


async def until_lanes(client: AsyncClient, expected: dict[str, list[str]]) -> None:
    """Waits until these are the lanes: they come with the reports after the measurement."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        found = await lanes(client)
        if found == expected:
            return
        assert time.monotonic() < deadline_s, found
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1)])
async def test_the_second_turn_s_kv_comes_from_the_decode_worker(
    smollm2: str, log_dir: Path, prefill: int, decode: int
) -> None:
    """Real weights in float32: the same tokens as computed, and the usage says what was cached."""
    tokenizer, reference = load_tokenizer(smollm2), Reference(smollm2)
    options = [*TRADING, "--dtype", "float32", "--num-blocks", "128", "--verify-kv", "all"]
    setup = Cluster(
        log_dir,
        model=smollm2,
        engine="torch",
        prefill=prefill,
        decode=decode,
        worker_options=options,
        coordinator_options=COORDINATOR,
    )
    async with running(setup) as cluster, AsyncClient(cluster.target, timeout_s=PATIENCE_S) as client:
        names = [f"prefill-{n}" for n in range(prefill)] + [f"decode-{n}" for n in range(decode)]
        await all_connected(client, names)
        for seed in range(10):
            prompt = tokenizer.encode(sentences(60, seed=seed))[:PROMPT]
            first = await client.generate(prompt, max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
            history = [*prompt, *first.token_ids]
            assert len(history) == PROMPT + ANSWER
            await asyncio.sleep(3 * HEARTBEAT_S)  # the holder reports its blocks; if late, the next one does
            turn = [*history, *tokenizer.encode(sentences(3, seed=50 + seed))[:5]]
            second = await client.generate(turn, max_tokens=NEXT, temperature=0.0, ignore_eos=False)
            assert list(second.token_ids) == reference.greedy(turn, NEXT)
            fetches = [event for event in events(cluster, "prefix.fetched") if not event["failure"]]
            if any(event["holder"].startswith("decode-") for event in fetches):
                break
        assert fetches[-1]["taker"] == second.served_by.prefill_worker
        assert second.usage.cached_prompt_tokens == (len(history) - 1) // BLOCK * BLOCK
        assert second.usage.cached_prompt_tokens > PROMPT, "with generated tokens"
        await cluster.assert_no_leaks()


async def test_a_new_prefill_worker_is_seeded_by_another_one(log_dir: Path) -> None:
    """Answers of one token are given by the prefill worker alone: no decode worker has these prefixes."""
    prefixes = [tokens(PREFIX, number) for number in range(3)]
    setup = Cluster(log_dir, worker_options=[*TRADING, *SIMULATED], coordinator_options=COORDINATOR)
    async with running(setup) as cluster, AsyncClient(cluster.target, timeout_s=PATIENCE_S) as client:

        async def ask(prompt: list[int]) -> tuple[str, int]:
            answer = await client.generate(prompt, max_tokens=1, temperature=0.0)
            assert list(answer.token_ids) == expected_tokens(prompt, 1)
            return answer.served_by.prefill_worker, answer.usage.cached_prompt_tokens

        async def warm() -> None:
            for turn in range(4):
                await asyncio.gather(*(ask([*prefix, turn]) for prefix in prefixes))
                await asyncio.sleep(3 * HEARTBEAT_S)  # the holder reports its blocks

        names = (f"prefill-new-{repeat}" for repeat in range(REPEATS))
        name, _ = await seeded_whole(cluster, warm, names, 3 * PREFIX // BLOCK, "prefill")
        await cluster.wait_ready(prefill=2)
        before = len(events(cluster, "prefix.fetched"))
        served = [await ask([*prefix, 50 + turn]) for turn in range(2) for prefix in prefixes]
        assert {cached for _, cached in served} == {PREFIX}
        assert {where for where, _ in served} == {"prefill-0", name}
        assert len(events(cluster, "prefix.fetched")) == before, "it was there"
        await cluster.assert_no_leaks()


async def test_without_their_own_setting_workers_are_connected_as_ever(log_dir: Path) -> None:
    setup = Cluster(log_dir, prefill=2, worker_options=WORKERS, coordinator_options=COORDINATOR)
    async with running(setup) as cluster, AsyncClient(cluster.target, timeout_s=PATIENCE_S) as client:
        expected = {"prefill-0": ["decode-0"], "prefill-1": ["decode-0"], "decode-0": []}
        await until_lanes(client, expected)
        # A worker that trades finds nobody who would.
        cluster.add_worker("prefill", "prefill-2", "--peer-fetch", "on").wait_event("worker.ready")
        await cluster.wait_ready(prefill=3)
        await until_lanes(client, {**expected, "prefill-2": ["decode-0"]})
        prompt = tokens(PREFIX, 9)
        answer = await client.generate(prompt, max_tokens=4, temperature=0.0)
        assert list(answer.token_ids) == expected_tokens(prompt, 4)
        await cluster.assert_no_leaks()
