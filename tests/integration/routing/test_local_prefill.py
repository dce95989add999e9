"""Prompts computed on the decode worker, by choice of the coordinator: same tokens, no handoff, nothing leaked."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from engine.runner.simulated_runner import expected_tokens
from splitserve.client import AsyncClient
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.waiting import PATIENCE_S

MAX_TOKENS = 8


@pytest.mark.parametrize(("mode", "local"), [("always", True), ("never", False)])
async def test_same_tokens_with_and_without_a_prefill_worker(log_dir: Path, mode: str, local: bool) -> None:
    prompt = [(11 * n) % 250 for n in range(300)]
    async with running(Cluster(log_dir, coordinator_options=["--local-prefill", mode])) as cluster:
        async with AsyncClient(cluster.target) as client:
            answer = await client.generate(prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
            again = await client.generate(prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
            single = await client.generate(prompt, max_tokens=1, temperature=0.0, ignore_eos=True)
        await cluster.assert_no_leaks()
    expected = expected_tokens(prompt, MAX_TOKENS)
    assert list(answer.token_ids) == list(again.token_ids) == expected
    assert list(single.token_ids) == expected[:1]
    assert (answer.served_by.prefill_worker == "") is local
    assert (answer.served_by.transport == "") is local
    assert (answer.timings.transfer_bytes == 0) is local
    assert answer.served_by.decode_worker == "decode-0"
    assert answer.timings.prefill_ms > 0
    assert again.usage.decode_cached_tokens > 0


async def test_auto_begins_split_and_turns_local_once_the_rates_are_measured(log_dir: Path) -> None:
    async with running(Cluster(log_dir, coordinator_options=["--local-prefill", "auto"])) as cluster:
        async with AsyncClient(cluster.target) as client, asyncio.timeout(PATIENCE_S):
            first = await client.generate([1] * 16, max_tokens=4, ignore_eos=True)
            for seed in itertools.count(2):
                answer = await client.generate([seed % 250] * 16, max_tokens=4, ignore_eos=True)
                if not answer.served_by.prefill_worker:
                    break
        await cluster.assert_no_leaks()
    assert first.served_by.prefill_worker == "prefill-0"
    assert list(answer.token_ids) == expected_tokens([seed % 250] * 16, 4)


async def test_same_tokens_where_targets_pace_local_prompts(log_dir: Path) -> None:
    """The second half of the requests comes while the first one decodes, on workers that have measured themselves."""
    options = ["--local-prefill", "always", "--tpot-slo", "0.2"]
    prompts = [[(seed * 31 + 7 * n) % 250 for n in range(40 * seed)] for seed in range(1, 9)]

    async def asked(client: AsyncClient, prompt: list[int]) -> tuple[int, ...]:
        answer = await client.generate(prompt, max_tokens=48, temperature=0.0, ignore_eos=True)
        return tuple(answer.token_ids)

    async with running(Cluster(log_dir, coordinator_options=options)) as cluster:
        async with AsyncClient(cluster.target) as client, asyncio.timeout(PATIENCE_S):
            for prompt in prompts:
                await asked(client, prompt)
            fresh = [[251 - token for token in prompt] for prompt in prompts]
            answers = await asyncio.gather(*(asked(client, prompt) for prompt in fresh))
        await cluster.assert_no_leaks()
    assert answers == [tuple(expected_tokens(prompt, 48)) for prompt in fresh]
