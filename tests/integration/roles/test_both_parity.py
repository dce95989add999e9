"""Greedy float32 output of two workers of role both equals `transformers`' generate, whoever does what."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.v1 import registry_pb2
from tests.support.clients.text import sentences
from tests.support.engine.reference import Reference
from tests.support.roles.both_processes import both_processes
from tests.support.roles.direct_requests import MAX_TOKENS, direct_workers, hand_off
from tests.support.waiting import LEAST_TIMEOUT_S

LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33]
"""Around the borders of blocks and of chunks."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LEAST_TIMEOUT_S)]


async def test_all_four_ways_at_once_and_those_of_each_role(short_smollm2: str, log_dir: Path) -> None:
    tokenizer, reference = load_tokenizer(short_smollm2), Reference(short_smollm2)
    prompts = [tokenizer.encode(sentences(n // 6 + 8, seed=n))[:n] for n in LENGTHS]
    expected = [reference.greedy(prompt, MAX_TOKENS) for prompt in prompts]
    options = ["--dtype", "float32", "--block-size", "16", "--max-step-tokens", "16", "--num-blocks", "128"]
    async with both_processes(log_dir, short_smollm2, *options) as workers:
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
            for way in ways:
                answers = await asyncio.gather(*(way(n) for n in range(len(prompts))))
                assert list(answers) == expected
            roles = registry_pb2.ROLE_PREFILL, registry_pb2.ROLE_DECODE
            for prefill, decode, named in (("a", "b", (ways[0], ways[3])), ("b", "a", (ways[1], ways[2]))):
                for name, role in zip((prefill, decode), roles, strict=True):
                    member = registry.members[name]
                    registry.tell(member, role)
                    await registry.until(lambda m=member, r=role: m.report.role == r, "it has its role")
                for way in named:
                    answers = await asyncio.gather(*(way(n) for n in range(len(prompts))))
                    assert list(answers) == expected
            for member in registry.members.values():
                registry.tell(member, registry_pb2.ROLE_BOTH)
                await registry.until(
                    lambda m=member: m.report.role == registry_pb2.ROLE_BOTH, "it has its role"
                )
            mixed = await asyncio.gather(*(ways[n % 4](n) for n in range(len(prompts))))
            assert list(mixed) == expected
        await registry.assert_no_leaks()
