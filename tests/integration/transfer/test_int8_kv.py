"""KV blocks in int8, with real weights over real NIXL: one engine's answers from half the bytes, or a clear refusal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from engine.core.engine_core import EngineCore
from engine.core.types import EngineRequest, SamplingParams, StopParams
from engine.runner.torch_runner import build_torch_runner
from kv_transfer.layout import INT8
from splitserve.client import AsyncClient
from splitserve.config.engine import EngineConfig
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.models.sources import resolve_model
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.waiting import PATIENCE_S

BLOCK, CHUNK, TOKENS = 16, 64, 16
BLOCK_BYTES = 30 * 2 * 3 * BLOCK * (2 + 64)
"""SmolLM2-135M: 30 layers, 3 KV heads, 64 elements a head."""
WIDE_BLOCK_BYTES = 30 * 2 * 3 * BLOCK * 64 * 2
NARROW = ("--kv-cache-dtype", INT8)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
async def cluster(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    options = [*NARROW, "--verify-kv", "all", "--num-blocks", "128", "--max-step-tokens", str(CHUNK)]
    setup = Cluster(tmp_path_factory.mktemp("logs"), model=smollm2, engine="torch", worker_options=options)
    async with running(setup) as cluster:
        yield cluster


def _alone(smollm2: str, prompts: list[list[int]]) -> list[list[int]]:
    """One engine's greedy answers, one after the other."""
    config = EngineConfig(
        dtype="bfloat16", kv_cache_dtype=INT8, num_blocks=128, threads=1, max_step_tokens=CHUNK
    )
    runner = build_torch_runner(config, resolve_model(smollm2), lambda _fraction: None)
    core = EngineCore(runner, config, load_tokenizer(smollm2))
    answers = []
    for number, prompt in enumerate(prompts):
        stop, tokens = StopParams(max_tokens=TOKENS, ignore_eos=True), []
        core.add_request(EngineRequest(str(number), tuple(prompt), SamplingParams(temperature=0.0), stop))
        while core.has_work():
            for output in core.step().outputs:
                tokens.extend(output.token_ids)
        answers.append(tokens)
    runner.close()
    return answers


async def test_a_pair_answers_as_one_engine_and_half_the_bytes_travel(cluster: Cluster, smollm2: str) -> None:
    tokenizer = load_tokenizer(smollm2)
    fact = tokenizer.encode(
        f"{sentences(30, seed=3)}\n\nThe capital of France is"
    )  # several chunks and writes
    prompts = [fact, *(tokenizer.encode(sentences(60, seed=n))[:length] for n, length in enumerate((7, 129)))]
    async with AsyncClient(cluster.target, timeout_s=PATIENCE_S) as client:
        for prompt, expected in zip(prompts, _alone(smollm2, prompts), strict=True):
            answer = await client.generate(prompt, temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
            assert list(answer.token_ids) == expected
            blocks = -(-len(prompt) // BLOCK)
            assert answer.timings.transfer_bytes == blocks * BLOCK_BYTES
            assert answer.served_by.attempts == 1
            if prompt is fact:
                assert "Paris" in answer.text
    assert 0.5 < BLOCK_BYTES / WIDE_BLOCK_BYTES < 0.52
    await cluster.assert_no_leaks()


async def test_workers_that_do_not_fit_end_with_one_line(cluster: Cluster) -> None:
    wide = cluster.add_worker("decode", "odd-kv", "--kv-cache-dtype", "auto", "--dtype", "bfloat16")
    exact = cluster.add_worker("prefill", "odd-dtype", "--dtype", "float32")
    for odd, why in (
        (wide, "dtype: 'bfloat16'"),
        (exact, "engine.kv_cache_dtype: int8 is for dtype bfloat16"),
    ):
        assert await asyncio.to_thread(odd.process.wait, PATIENCE_S) != 0
        assert why in odd.log_tail()
        assert "Traceback" not in odd.log_tail()
    assert not any(event["event"] == "worker.loading" for event in exact.events()), "refused before it loads"
