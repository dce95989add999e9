"""Greedy float32 output through one prefill and one decode worker equals `transformers`' generate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from splitserve.client import AsyncClient, Completion
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.engine.reference import Reference

BLOCK = 16
CHUNK = 128
MAX_TOKENS = 12
CONCURRENT = 8
BORDERS = [
    *(1, 2, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 48, 49, 65, 90, 112),
    *(CHUNK - 1, CHUNK, CHUNK + 1, 200, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 513, 900),
]
"""Around the borders of blocks and of chunks."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
async def cluster(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    options = ["--dtype", "float32", "--block-size", str(BLOCK), "--max-step-tokens", str(CHUNK)]
    setup = Cluster(tmp_path_factory.mktemp("logs"), model=smollm2, engine="torch", worker_options=options)
    async with running(setup) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def prompts(smollm2: str) -> dict[int, list[int]]:
    """One prompt a length; the texts differ, so that nothing is shared."""
    tokenizer = load_tokenizer(smollm2)
    return {length: tokenizer.encode(sentences(length // 6 + 8, seed=length))[:length] for length in BORDERS}


@pytest.fixture(scope="module")
def reference(smollm2: str) -> Reference:
    return Reference(smollm2)


async def _complete(client: AsyncClient, prompt: list[int]) -> Completion:
    return await client.generate(prompt, temperature=0.0, max_tokens=MAX_TOKENS)


@pytest.mark.slow
async def test_batches_of_mixed_lengths(
    cluster: Cluster, prompts: dict[int, list[int]], reference: Reference
) -> None:
    expected = {length: reference.greedy(prompts[length], MAX_TOKENS) for length in BORDERS}
    gate = asyncio.Semaphore(CONCURRENT)

    async def run(client: AsyncClient, length: int) -> tuple[int, Completion]:
        async with gate:
            return length, await _complete(client, prompts[length])

    # Long next to short: the order by remainder mixes lengths in every batch.
    order = sorted(BORDERS, key=lambda length: (length * 7919) % 101)
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        answers = dict(await asyncio.gather(*(run(client, length) for length in order)))
    wrong = {
        n: (list(a.token_ids), expected[n]) for n, a in answers.items() if list(a.token_ids) != expected[n]
    }
    assert not wrong
    for answer in answers.values():
        assert answer.served_by.prefill_worker == "prefill-0"
        assert answer.served_by.decode_worker == "decode-0"
        # Nothing travels where the decode worker has all blocks of the prompt cached.
        assert answer.served_by.transport == ("nixl" if answer.timings.transfer_bytes else "")
        assert answer.timings.transfer_bytes > 0 or answer.usage.decode_cached_tokens > 0
    await cluster.assert_no_leaks()


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK])
async def test_full_prefix_hits(
    cluster: Cluster, prompts: dict[int, list[int]], reference: Reference, length: int
) -> None:
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        await _complete(client, prompts[length])
        again = await _complete(client, prompts[length])
    assert list(again.token_ids) == reference.greedy(prompts[length], MAX_TOKENS)
    # Prefill must compute at least the last token; decode may hold every full block.
    assert again.usage.cached_prompt_tokens == (length - 1) // BLOCK * BLOCK
    assert again.usage.decode_cached_tokens == length // BLOCK * BLOCK


@pytest.mark.parametrize("shared", [BLOCK - 1, BLOCK, BLOCK + 1, CHUNK])
async def test_partial_prefix_hits(
    cluster: Cluster, prompts: dict[int, list[int]], reference: Reference, shared: int
) -> None:
    base = prompts[2 * CHUNK]
    prompt = base[:shared] + prompts[200][:90]
    expected = reference.greedy(prompt, MAX_TOKENS)
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        await _complete(client, base)
        answer = await _complete(client, prompt)
    assert list(answer.token_ids) == expected
    assert answer.usage.decode_cached_tokens == shared // BLOCK * BLOCK
    await cluster.assert_no_leaks()
