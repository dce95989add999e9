"""A prefill and a decode worker that trade prefixes: the decode worker's cache of a conversation becomes the prefill
worker's, the answers stay the same, and faults cost nothing but the fetch."""

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
from tests.support.journal import settled
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
ANSWER = 40


async def test_a_conversation_s_kv_goes_back_from_decode_to_prefill(smollm2: str, log_dir: Path) -> None:
    tokenizer, reference = load_tokenizer(smollm2), Reference(smollm2)
    prompt = tokenizer.encode(sentences(40, seed=1))[: 4 * BLOCK + 6]
    answer = reference.greedy(prompt, ANSWER)
    history = [*prompt, *answer]
    prefix = history[: (len(history) - 1) // BLOCK * BLOCK]
    assert len(prefix) == 6 * BLOCK, "two blocks of the answer's own tokens"
    turn = [*history, *tokenizer.encode(sentences(3, seed=2))[:7]]
    expected = reference.greedy(turn, MAX_TOKENS)
    options = ["--dtype", "float32", "--block-size", str(BLOCK), "--num-blocks", "96", "--verify-kv", "all"]
    (faults := log_dir / "faults.yaml").write_text(HALF_A_PREFIX)
    options += ["--config", str(faults)]
    async with neutral_processes(log_dir, smollm2, *options, pinned=True) as workers:
        async with direct_workers(workers.registry, "a", "b") as (prefill, decode):
            whole = {"ignore_eos": False}
            # Computed by the decode worker, so that the prefill worker has none of it.
            assert await decode.local("first", prompt, max_tokens=ANSWER, **whole) == answer
            with pytest.raises(FailedPreconditionError) as other:
                await hand_prefix(decode, prefill, "other", prefix, salt=b"another tenant")
            assert other.value.reason == "PREFIX_GONE"
            assert await hand_prefix(decode, prefill, "fetch", prefix) == 6
            assert await hand_prefix(decode, prefill, "again", prefix) == 0, "it is there"
            assert await hand_off(prefill, decode, "second", turn, **whole) == expected
            await _requests_of_the_other_pool_are_refused(prefill, decode, prompt)
            await _lose_the_holder_half_way(workers, prefill, decode, prompt[::-1], reference)
        await workers.registry.assert_no_leaks()


async def _requests_of_the_other_pool_are_refused(
    prefill: DirectWorker, decode: DirectWorker, prompt: list[int]
) -> None:
    with pytest.raises(FailedPreconditionError) as refused:
        await prefill.reserve("stream", prompt, decode.agent_id)
    assert refused.value.reason == "PREFIXES_ONLY"
    with pytest.raises(FailedPreconditionError) as refused:
        await decode.compute("prompt", prompt, None)
    assert refused.value.reason == "PREFIXES_ONLY"


async def _lose_the_holder_half_way(
    workers: NeutralProcesses,
    prefill: DirectWorker,
    decode: DirectWorker,
    prompt: list[int],
    reference: Reference,
) -> None:
    """Its first piece has arrived in blocks that the prefill worker has reserved, the second one is on its way."""
    answer = reference.greedy(prompt, ANSWER)
    prefix = [*prompt, *answer][: 6 * BLOCK]
    assert await decode.local("warm", prompt, max_tokens=ANSWER, ignore_eos=False) == answer
    await lose_the_holder_half_way(workers, prefill, decode, prefix)
    first = await prefill.compute("after", prompt, None, ignore_eos=False)
    assert first == answer[:1], "computed, not read from half a prefix"


async def test_a_taker_that_dies_while_it_is_written_to_leaves_nothing_at_the_holder(log_dir: Path) -> None:
    (faults := log_dir / "faults.yaml").write_text("faults: {stall_write: {at: [1]}}\n")
    options = ["--num-blocks", "256", "--config", str(faults)]
    async with neutral_processes(log_dir, "simulated", *options, pinned=True) as workers:
        registry = workers.registry
        async with direct_workers(registry, "a", "b") as (prefill, decode):
            prefix = tokens(6 * BLOCK, 1)
            prompt = [*prefix, 7]
            assert await decode.local("warm", prompt) == expected_tokens(prompt, MAX_TOKENS)
            ticket = await prefill.reserve("fetch", prefix, decode.agent_id, prefix_only=True)
            push = asyncio.create_task(decode.compute("fetch", prefix, ticket, prefix_only=True))
            holder = workers.members["b"]
            await settled(lambda: any(event["event"] == "fault.injected" for event in holder.events()))
            workers.members["a"].kill()
            registry.lost("a")
            with pytest.raises(SplitserveError):
                await push
            assert await decode.local("on", prompt) == expected_tokens(prompt, MAX_TOKENS)
        await registry.assert_no_leaks()
