"""Workers with blocks of different sizes: real weights, real lanes, tokens equal those of `transformers`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.runner.simulated_runner import expected_tokens
from splitserve.client import AsyncClient
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import Reading, tokens
from tests.support.engine.reference import Reference

SIZES = [(16, 32), (32, 16)]
"""Tokens in a block of the prefill worker and of the decode worker."""
CHUNK, MAX_TOKENS = 48, 6
LENGTHS = [1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 95, 97, 130]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=SIZES, ids=lambda sizes: f"{sizes[0]} to {sizes[1]}")
def sizes(request: pytest.FixtureRequest) -> tuple[int, int]:
    found: tuple[int, int] = request.param
    return found


@pytest.fixture(scope="module")
async def cluster(
    sizes: tuple[int, int], smollm2: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    options = ["--dtype", "float32", "--max-step-tokens", str(CHUNK), "--verify-kv", "all"]
    options += ["--kv-memory-bytes", "100000000"]
    setup = Cluster(
        tmp_path_factory.mktemp("logs"),
        model=smollm2,
        engine="torch",
        prefill=0,
        decode=0,
        worker_options=options,
    )
    async with running(setup) as cluster:
        for pool, size in zip(("prefill", "decode"), sizes, strict=True):
            cluster.add_worker(pool, f"{pool}-0", "--block-size", str(size))
        await cluster.wait_ready(prefill=1, decode=1)
        yield cluster


@pytest.fixture(scope="module")
def reference(smollm2: str) -> Reference:
    return Reference(smollm2)


def text_tokens(model: str, seed: int, count: int) -> list[int]:
    return load_tokenizer(model).encode(sentences(count // 6 + 8, seed=seed))[:count]


async def test_tokens_equal_transformers_at_the_borders_of_both_sizes(
    cluster: Cluster, smollm2: str, reference: Reference
) -> None:
    prompts = {length: text_tokens(smollm2, length, length) for length in LENGTHS}
    expected = {length: reference.greedy(prompt, MAX_TOKENS) for length, prompt in prompts.items()}
    async with AsyncClient(cluster.target, timeout_s=200) as client:
        answers = await asyncio.gather(
            *(client.generate(prompt, temperature=0.0, max_tokens=MAX_TOKENS) for prompt in prompts.values())
        )
    found = {length: list(answer.token_ids) for length, answer in zip(prompts, answers, strict=True)}
    assert found == expected
    for answer in answers:
        assert answer.served_by.transport == "nixl"
        assert answer.timings.transfer_bytes > 0
    await cluster.assert_no_leaks()


@pytest.mark.parametrize("shared", [0, 16, 31, 33, 48, 100])
async def test_prefix_hits_are_each_worker_s_own(
    cluster: Cluster, sizes: tuple[int, int], smollm2: str, reference: Reference, shared: int
) -> None:
    """None, in part, and all that a worker's blocks can hold. The decode worker's are what need not be sent."""
    base = text_tokens(smollm2, 1000 + shared, 100)
    prompt = base[:shared] + text_tokens(smollm2, 2000 + shared, 100 - shared)
    expected = reference.greedy(prompt, MAX_TOKENS)
    async with AsyncClient(cluster.target, timeout_s=200) as client:
        await client.generate(base, temperature=0.0, max_tokens=MAX_TOKENS)
        answer = await client.generate(prompt, temperature=0.0, max_tokens=MAX_TOKENS)
    assert list(answer.token_ids) == expected
    prefill, decode = sizes
    assert answer.usage.cached_prompt_tokens == min(shared, 99) // prefill * prefill
    assert answer.usage.decode_cached_tokens == shared // decode * decode
    await cluster.assert_no_leaks()


async def test_a_client_that_leaves_frees_the_blocks_of_both(
    cluster: Cluster, smollm2: str, reference: Reference
) -> None:
    prompt = text_tokens(smollm2, 77, 200)
    async with AsyncClient(cluster.target, timeout_s=200) as client:
        decoding = Reading(client, prompt, temperature=0.0, max_tokens=400)
        await decoding.got(2)
        await decoding.leave()
        early = asyncio.create_task(client.generate(text_tokens(smollm2, 78, 300), max_tokens=4))
        await asyncio.sleep(0)
        early.cancel()
        await asyncio.gather(early, return_exceptions=True)
        answer = await client.generate(prompt, temperature=0.0, max_tokens=MAX_TOKENS)
    assert list(answer.token_ids) == reference.greedy(prompt, MAX_TOKENS)
    await cluster.assert_no_leaks()


async def test_pools_of_several_sizes_serve_in_all_pairs(log_dir: Path) -> None:
    """Two prefill and three decode workers in turn, until each of the six pairs has served."""
    setup = Cluster(
        log_dir,
        prefill=0,
        decode=0,
        worker_options=["--verify-kv", "all"],
        coordinator_options=["--routing", "round-robin"],
    )
    async with running(setup) as cluster, AsyncClient(cluster.target) as client:
        for pool, of_pool in (("prefill", (8, 32)), ("decode", (16, 64, 4))):
            for size in of_pool:
                cluster.add_worker(pool, f"{pool}-{size}", "--block-size", str(size))
        await cluster.wait_ready(prefill=2, decode=3)
        pairs: set[tuple[str, str]] = set()
        for number in range(200):
            prompt = tokens(40 * (number % 20) + 7, seed=number)
            answer = await client.generate(prompt, max_tokens=5)
            assert list(answer.token_ids) == expected_tokens(prompt, 5)
            pairs.add((answer.served_by.prefill_worker, answer.served_by.decode_worker))
            if number >= 11 and len(pairs) == 6:
                break
        assert len(pairs) == 6
        await cluster.assert_no_leaks()
