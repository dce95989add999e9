"""Greedy float32 output of two neutral workers equals `transformers`' generate, whoever does what."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.v1 import registry_pb2
from tests.support.clients.text import sentences
from tests.support.engine.reference import Reference
from tests.support.neutral.direct_requests import MAX_TOKENS, direct_workers, hand_off
from tests.support.neutral.neutral_processes import neutral_processes
from tests.support.waiting import LEAST_TIMEOUT_S

LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33]
"""Around the borders of blocks and of chunks."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LEAST_TIMEOUT_S)]


async def test_all_four_ways_at_once_while_leanings_change(smollm2: str, log_dir: Path) -> None:
    tokenizer, reference = load_tokenizer(smollm2), Reference(smollm2)
    prompts = [tokenizer.encode(sentences(n // 6 + 8, seed=n))[:n] for n in LENGTHS]
    expected = [reference.greedy(prompt, MAX_TOKENS) for prompt in prompts]
    options = ["--dtype", "float32", "--block-size", "16", "--max-step-tokens", "16", "--num-blocks", "128"]
    async with neutral_processes(log_dir, smollm2, *options) as workers:
        registry = workers.registry
        async with direct_workers(registry, "a", "b") as (a, b):
            # To the end of the text, as `transformers` does.
            whole = {"ignore_eos": False}
            ways = [
                lambda n: hand_off(a, b, f"ab{n}", prompts[n], **whole),
                lambda n: hand_off(b, a, f"ba{n}", prompts[n], **whole),
                lambda n: a.local(f"a{n}", prompts[n], **whole),
                lambda n: b.local(f"b{n}", prompts[n], **whole),
            ]
            for pool in (registry_pb2.POOL_DECODE, registry_pb2.POOL_PREFILL):
                for member in registry.members.values():
                    registry.tell(member, pool)
                for way in ways if pool == registry_pb2.POOL_DECODE else ways[::-1]:
                    answers = await asyncio.gather(*(way(n) for n in range(len(prompts))))
                    assert list(answers) == expected
            mixed = await asyncio.gather(*(ways[n % 4](n) for n in range(len(prompts))))
            assert list(mixed) == expected
        await registry.assert_no_leaks()
