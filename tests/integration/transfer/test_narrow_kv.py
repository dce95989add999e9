"""KV as fp8 on the wire, with real weights over real NIXL: right answers from half the bytes, or a clear refusal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from splitserve.client import AsyncClient
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.waiting import PATIENCE_S

BLOCK = 16
WIRE_BLOCK_BYTES = 30 * 2 * 3 * BLOCK * (2 + 64)
"""SmolLM2-135M: 30 layers, 3 KV heads, 64 elements a head."""
PLAIN_BLOCK_BYTES = 30 * 2 * 3 * BLOCK * 64 * 2
NARROW = ("--wire-dtype", "fp8_e4m3")

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
async def cluster(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    options = [*NARROW, "--verify-kv", "all", "--num-blocks", "128", "--max-step-tokens", "64"]
    setup = Cluster(tmp_path_factory.mktemp("logs"), model=smollm2, engine="torch", worker_options=options)
    async with running(setup) as cluster:
        yield cluster


@pytest.mark.slow
async def test_a_fact_survives_and_half_the_bytes_travel(cluster: Cluster, smollm2: str) -> None:
    filler = sentences(30, seed=3)  # several chunks, and more than one write
    prompt = load_tokenizer(smollm2).encode(f"{filler}\n\nThe capital of France is")
    async with AsyncClient(cluster.target, timeout_s=PATIENCE_S) as client:
        answer = await client.generate(prompt, temperature=0.0, max_tokens=6)
        assert "Paris" in answer.text
        blocks = -(-len(prompt) // BLOCK)
        assert blocks > 8
        assert answer.timings.transfer_bytes == blocks * WIRE_BLOCK_BYTES
        assert 0.5 < answer.timings.transfer_bytes / (blocks * PLAIN_BLOCK_BYTES) < 0.52
        assert answer.served_by.attempts == 1
        # Decode keeps what it received: the next prompt that begins alike gets only what is new.
        again = await client.generate(prompt, temperature=0.0, max_tokens=6)
        assert again.token_ids == answer.token_ids
        assert again.timings.transfer_bytes == WIRE_BLOCK_BYTES * (len(prompt) % BLOCK > 0)
    await cluster.assert_no_leaks()


async def test_many_at_once_leave_nothing_behind(cluster: Cluster) -> None:
    async with AsyncClient(cluster.target, timeout_s=PATIENCE_S) as client:
        prompts = [f"{sentences(n, seed=n)} One, two, three, four, five," for n in range(1, 9)]
        answers = await asyncio.gather(
            *(client.generate(prompt, temperature=0.0, max_tokens=4) for prompt in prompts)
        )
    assert sum("six" in answer.text for answer in answers) >= len(prompts) - 1
    await cluster.assert_no_leaks()


async def test_workers_that_do_not_fit_end_with_one_line(cluster: Cluster) -> None:
    wire = cluster.add_worker("decode", "odd-wire", "--wire-dtype", "same", "--dtype", "bfloat16")
    dtype = cluster.add_worker("prefill", "odd-dtype", "--dtype", "float32")
    for odd in (wire, dtype):
        assert await asyncio.to_thread(odd.process.wait, PATIENCE_S) != 0
        assert "wire_dtype" in odd.log_tail()
        assert "Traceback" not in odd.log_tail()
    assert any(event["event"] == "worker.loading" for event in wire.events())
    assert not any(event["event"] == "worker.loading" for event in dtype.events()), "refused before it loads"
