"""Prefixes from one worker's cache to another's over NIXL: the answer after it is the one without it, and faults cost
nothing but the fetch."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.runner.simulated_runner import expected_tokens
from splitserve.errors import FailedPreconditionError, SplitserveError
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.support.clients.text import sentences
from tests.support.cluster.streams import tokens
from tests.support.engine.reference import Reference
from tests.support.neutral.direct_requests import (
    MAX_TOKENS,
    DirectWorker,
    direct_workers,
    hand_off,
    hand_prefix,
)
from tests.support.neutral.half_a_prefix import BLOCK, HALF_A_PREFIX, lose_the_holder_half_way
from tests.support.neutral.neutral_processes import NeutralProcesses, neutral_processes
from tests.support.waiting import LEAST_TIMEOUT_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LEAST_TIMEOUT_S)]


async def test_float32_answers_after_a_fetch_are_those_of_transformers(smollm2: str, log_dir: Path) -> None:
    tokenizer, reference = load_tokenizer(smollm2), Reference(smollm2)
    prefix = tokenizer.encode(sentences(40, seed=1))[: 6 * BLOCK]
    prompts = [[*prefix, *tokenizer.encode(sentences(3, seed=n))[: 5 + n]] for n in range(2)]
    expected = [reference.greedy(prompt, MAX_TOKENS) for prompt in prompts]
    options = ["--dtype", "float32", "--block-size", str(BLOCK), "--num-blocks", "96", "--verify-kv", "all"]
    (faults := log_dir / "faults.yaml").write_text(HALF_A_PREFIX)
    options += ["--config", str(faults)]
    async with neutral_processes(log_dir, smollm2, *options) as workers:
        async with direct_workers(workers.registry, "a", "b") as (a, b):
            whole = {"ignore_eos": False}
            assert await b.local("warm", prompts[0], **whole) == expected[0]
            assert await hand_prefix(b, a, "fetch", prefix) == 6
            assert await hand_prefix(b, a, "again", prefix) == 0, "it is there"
            answers = [await a.local(f"a{n}", prompt, **whole) for n, prompt in enumerate(prompts)]
            assert answers == expected
            # And on from there: what was fetched is handed off like what was computed.
            assert await hand_off(a, b, "ab", prompts[1], **whole) == expected[1]
            await _lose_the_holder_half_way(workers, a, b, prompts[0][::-1], reference)
        await workers.registry.assert_no_leaks()


async def _lose_the_holder_half_way(
    workers: NeutralProcesses, a: DirectWorker, b: DirectWorker, prompt: list[int], reference: Reference
) -> None:
    """Its first piece has arrived in blocks that the taker has reserved, the second one is on its way."""
    prefix, expected = prompt[: 6 * BLOCK], reference.greedy(prompt, MAX_TOKENS)
    assert await b.local("warm again", prompt, ignore_eos=False) == expected
    await lose_the_holder_half_way(workers, a, b, prefix)
    assert await a.local("after", prompt, ignore_eos=False) == expected, (
        "computed, not read from half a prefix"
    )


async def test_a_holder_that_lacks_it_or_dies_costs_the_fetch_alone(log_dir: Path) -> None:
    options = ["--simulated-prefill-token-s", "0.0005", "--num-blocks", "256"]
    async with neutral_processes(log_dir, "simulated", *options) as workers:
        registry = workers.registry
        async with direct_workers(registry, "a", "b") as (a, b):
            prefix = tokens(6 * BLOCK, 1)
            with pytest.raises(FailedPreconditionError) as gone:
                await hand_prefix(b, a, "gone", prefix)
            assert gone.value.reason == "PREFIX_GONE"
            prompt = [*prefix, 7]
            assert await b.local("warm", prompt) == expected_tokens(prompt, MAX_TOKENS)
            ticket = await a.reserve("fetch", prefix, b.agent_id, prefix_only=True)
            assert ticket is not None
            workers.members["b"].kill()
            registry.lost("b")
            failed = await asyncio.gather(
                b.compute("fetch", prefix, ticket, prefix_only=True), a.rest("fetch"), return_exceptions=True
            )
            assert all(isinstance(error, SplitserveError) for error in failed)
            assert await a.local("computed", prompt) == expected_tokens(prompt, MAX_TOKENS)
        await registry.assert_no_leaks()


async def test_a_holder_reads_back_what_it_has_below_its_blocks(log_dir: Path) -> None:
    options = ["--num-blocks", "24", "--block-size", str(BLOCK), "--kv-host-tier-bytes", str(2**22)]
    async with neutral_processes(log_dir, "simulated", *options) as workers:
        async with direct_workers(workers.registry, "a", "b") as (a, b):
            prefix, others = tokens(6 * BLOCK, 1), [tokens(7 * BLOCK, seed) for seed in range(2, 6)]
            for number, prompt in enumerate([[*prefix, 7], *others]):  # more than its blocks hold
                assert await b.local(f"b{number}", prompt) == expected_tokens(prompt, MAX_TOKENS)
            assert await hand_prefix(b, a, "fetch", prefix) == 6
            assert await hand_prefix(b, a, "again", prefix) == 0, "it is there"
            assert await a.local("a", [*prefix, 8]) == expected_tokens([*prefix, 8], MAX_TOKENS)
        await workers.registry.assert_no_leaks()
