"""Concurrent streams, 30% of the clients leave at random moments: the rest are right, nothing leaks."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from splitserve.client import AsyncClient, Completion
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.engine.reference import Reference

MAX_TOKENS = 16
STREAMS, LEAVERS = 32, 10

pytestmark = pytest.mark.timeout(300)


async def _stream(client: AsyncClient, prompt: list[int], leave_after: float | None) -> list[int] | None:
    """Token ids of a whole answer, or None when the client left after some tokens or seconds."""
    tokens: list[int] = []
    stream = client.stream(prompt, temperature=0.0, max_tokens=MAX_TOKENS)
    try:
        async with asyncio.timeout(leave_after):
            async for item in stream:
                if isinstance(item, Completion):
                    return list(item.token_ids)
                tokens.extend(item.token_ids)
    except TimeoutError:
        return None
    finally:
        await stream.aclose()
    raise AssertionError(f"stream ended without its last message after {len(tokens)} tokens")


@pytest.mark.slow
async def test_disconnects_leave_the_rest_correct(smollm2: str, log_dir: Path) -> None:
    tokenizer = load_tokenizer(smollm2)
    pick = random.Random(3)
    prompts = [tokenizer.encode(sentences(pick.randint(1, 16), seed=n)) for n in range(STREAMS)]
    reference = Reference(smollm2)
    expected = [reference.greedy(prompt, MAX_TOKENS) for prompt in prompts]
    leavers = set(pick.sample(range(STREAMS), LEAVERS))
    options = ["--dtype", "float32", "--max-step-tokens", "128", "--num-blocks", "600"]
    cluster = Cluster(log_dir, model=smollm2, engine="torch", worker_options=options)
    async with running(cluster), AsyncClient(cluster.target, timeout_s=200) as client:
        # From "before prefill" to "while decoding": one pass over all streams takes longer than that.
        leave = {n: pick.uniform(0.01, 6.0) for n in leavers}
        tasks = [_stream(client, prompt, leave.get(n)) for n, prompt in enumerate(prompts)]
        answers = await asyncio.gather(*tasks)
        for n, answer in enumerate(answers):
            assert answer == expected[n] or (answer is None and n in leavers), n
        assert sum(answer is None for answer in answers) >= LEAVERS // 2
        await cluster.assert_no_leaks()
        again = await client.generate(prompts[0], temperature=0.0, max_tokens=MAX_TOKENS)
        assert list(again.token_ids) == expected[0]
