"""Prompts in order of triage at running prefill workers: same tokens, short ones first, nothing leaked."""

from __future__ import annotations

import asyncio
from pathlib import Path

from engine.runner.simulated_runner import expected_tokens
from splitserve.client import AsyncClient
from splitserve.v1 import generation_pb2
from tests.support.cluster.fake_cluster import ask, fake_cluster
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.waiting import PATIENCE_S

MAX_TOKENS = 8
LONG, SHORT = 1500, 40
SLOW = ("--simulated-prefill-token-s", "0.002", "--max-step-tokens", "2048")


def prompt(seed: int, tokens: int) -> list[int]:
    return [(seed * 31 + 7 * n) % 250 for n in range(tokens)]


async def test_both_workers_of_a_request_learn_its_targets() -> None:
    async with fake_cluster(admission={"ttft_slo_s": 30.0, "tpot_slo_s": 2.0}) as cluster:
        await cluster.answer()
        reserve = await cluster.decodes[0].reserves.wait()
        prefill = await cluster.prefills[0].calls.wait()
    for targets in (reserve.targets, prefill.targets):
        assert (targets.tpot_ms, targets.ttft_ms) == (2e3, 30e3)
    assert 0 < prefill.targets.ttft_left_ms < reserve.targets.ttft_left_ms <= 30e3


async def test_without_settings_there_are_none() -> None:
    async with fake_cluster() as cluster:
        await cluster.answer()
        reserve = await cluster.decodes[0].reserves.wait()
        prefill = await cluster.prefills[0].calls.wait()
    assert not reserve.HasField("targets")
    assert prefill.targets == generation_pb2.ServiceTargets()
    assert not prefill.HasField("targets")


async def test_a_request_s_own_targets_reach_the_workers_and_tighter_ones_are_refused() -> None:
    async with fake_cluster(admission={"ttft_slo_s": 30.0}) as cluster:
        await cluster.answer(ask(ttft_ms=60_000, tpot_ms=400))
        prefill = await cluster.prefills[0].calls.wait()
        error = await cluster.error(ask(ttft_ms=29_000))
        await cluster.answer()
    assert (prefill.targets.ttft_ms, prefill.targets.tpot_ms) == (60_000, 400)
    assert (error.field, error.message) == (
        "ttft_ms",
        "ttft_ms must be at least 30000, the target here, not 29000",
    )


async def test_a_prompt_that_would_be_late_anyway_makes_no_short_one_late(log_dir: Path) -> None:
    """The long prompt takes 3 s, so it misses its 1.5 s; the short ones come while it is computed."""
    options = ["--admission", "off", "--local-prefill", "never", "--ttft-slo", "1.5"]
    ended: list[int] = []

    async def asked(client: AsyncClient, tokens: list[int]) -> tuple[int, ...]:
        answer = await client.generate(tokens, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        ended.append(len(tokens))
        return tuple(answer.token_ids)

    async with running(Cluster(log_dir, worker_options=SLOW, coordinator_options=options)) as cluster:
        async with AsyncClient(cluster.target) as client, asyncio.timeout(PATIENCE_S):
            for seed in range(10):  # the workers measure what prompts take
                await asked(client, prompt(seed, 40 * (1 + seed % 3)))
            ended.clear()
            prompts = [prompt(20, LONG), *(prompt(21 + seed, SHORT) for seed in range(6))]
            answers = await asyncio.gather(*(asked(client, tokens) for tokens in prompts))
        await cluster.assert_no_leaks()
    assert ended == [SHORT] * 6 + [LONG]
    assert answers == [tuple(expected_tokens(tokens, MAX_TOKENS)) for tokens in prompts]
