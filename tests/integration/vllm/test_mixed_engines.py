"""splitserve's own engine and vLLM in one cluster: real weights, NIXL, tokens equal those of `transformers`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import pytest

from splitserve.client import AsyncClient
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import Reading, decoding_worker, prompts_under_way
from tests.support.engine.reference import Reference
from tests.support.waiting import PATIENCE_S

BLOCK, CHUNK, MAX_TOKENS = 32, 64, 6
LONG = 900
"""Seconds of chunks."""
PAIRS = [("torch", "vllm"), ("vllm", "torch")]
"""The engine of the prefill worker, and of the decode worker."""

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def mixed(log_dir: Path, model: str, *options: str) -> Cluster:
    """A coordinator, to which workers are added."""
    common = ["--dtype", "float32", "--context-tokens", "1024", "--max-step-tokens", str(CHUNK)]
    common += ["--kv-memory-bytes", "150000000", "--block-size", str(BLOCK), "--verify-kv", "all"]
    common += ["--heartbeat", "0.1", "--lease", "5", *options]
    return Cluster(log_dir, model=model, prefill=0, decode=0, worker_options=common)


@pytest.fixture(scope="module", params=PAIRS, ids=" to ".join)
async def cluster(
    request: pytest.FixtureRequest, smollm2: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Cluster]:
    async with running(mixed(tmp_path_factory.mktemp("logs"), smollm2)) as cluster:
        for pool, engine in zip(("prefill", "decode"), request.param, strict=True):
            cluster.add_worker(pool, f"{pool}-0", "--engine", engine)
        await cluster.wait_ready(prefill=1, decode=1)
        yield cluster


@pytest.fixture(scope="module")
def text_tokens(smollm2: str) -> list[int]:
    return load_tokenizer(smollm2).encode(sentences(250, seed=3))


@pytest.fixture(scope="module")
def reference(smollm2: str) -> Reference:
    return Reference(smollm2)


async def test_greedy_tokens_equal_transformers(
    cluster: Cluster, text_tokens: list[int], reference: Reference
) -> None:
    """At borders of blocks and chunks side by side, and once more with what both sides have cached by then."""
    prompts = {length: text_tokens[length : 2 * length] for length in (1, 31, 32, 33, 63, 64, 65, 97, 130)}
    prompts[95] = prompts[130][:BLOCK] + text_tokens[: 95 - BLOCK]
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        for _ in range(2):
            answers = await asyncio.gather(
                *(
                    client.generate(prompt, temperature=0.0, max_tokens=MAX_TOKENS)
                    for prompt in prompts.values()
                )
            )
            for (length, prompt), answer in zip(prompts.items(), answers, strict=True):
                assert list(answer.token_ids) == reference.greedy(prompt, MAX_TOKENS), length
                # Nothing travels where the decode worker has all blocks of the prompt cached.
                all_cached = answer.usage.decode_cached_tokens == length
                assert answer.served_by.transport == ("" if all_cached else "nixl"), length
        assert answers[-1].usage.cached_prompt_tokens == 64
    await cluster.assert_no_leaks()


async def test_clients_that_leave(cluster: Cluster, text_tokens: list[int], reference: Reference) -> None:
    """While prompts are computed, and while one is decoded; the next answer is right."""
    async with AsyncClient(cluster.target, timeout_s=300) as client:
        prompts = (text_tokens[n : n + LONG] for n in count())
        early = await prompts_under_way(cluster, client, prompts, 4, max_tokens=5)
        late = Reading(client, text_tokens[:40], max_tokens=300, ignore_eos=True)
        for reading in early:
            await reading.leave()
        await late.got(3)
        await late.leave()
        await cluster.assert_no_leaks()
        prompt = text_tokens[65:130]
        answer = await client.generate(prompt, temperature=0.0, max_tokens=MAX_TOKENS)
        assert list(answer.token_ids) == reference.greedy(prompt, MAX_TOKENS)
        await cluster.assert_no_leaks()


async def test_a_stream_is_resumed_on_the_other_engine(
    smollm2: str, text_tokens: list[int], reference: Reference, tmp_path: Path
) -> None:
    """Its decode worker is killed; the prompt with its tokens is handed to a worker of the other engine."""
    prompt, count = text_tokens[97:194], 24
    expected = reference.greedy(prompt, count)
    async with running(mixed(tmp_path, smollm2)) as cluster:
        cluster.add_worker("prefill", "prefill-0", "--engine", "torch")
        cluster.add_worker("decode", "own", "--engine", "torch")
        cluster.add_worker("decode", "vllm", "--engine", "vllm")
        await cluster.wait_ready(prefill=1, decode=2)
        async with AsyncClient(cluster.target, timeout_s=300) as client:
            reading = Reading(client, prompt, temperature=0.0, max_tokens=count)
            await reading.got(5)
            cluster.members[await decoding_worker(cluster)].kill()
            answer = await reading.task
            assert list(answer.token_ids) == expected
            await cluster.assert_no_leaks()


async def test_blocks_of_another_size_are_refused_with_both_sizes(smollm2: str, tmp_path: Path) -> None:
    """The worker that was there goes on."""
    async with running(mixed(tmp_path, smollm2)) as cluster:
        first = cluster.add_worker("prefill", "first", "--engine", "vllm")
        await asyncio.to_thread(first.wait_event, "registry.registered")
        odd = cluster.add_worker("decode", "odd", "--engine", "torch", "--block-size", "16")
        assert await asyncio.to_thread(odd.process.wait, PATIENCE_S) != 0
        told = odd.log_tail()
        assert "block_size_tokens: 16 here, 32 there; blocks in another axis_order" in told
        assert "Traceback" not in told
        assert first.process.poll() is None
