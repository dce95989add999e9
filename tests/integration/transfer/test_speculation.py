"""A split pair with real weights in float32 that speculates answers as `transformers` does, also after a handoff."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.engine.speculation.draft_pairs import deeper
from splitserve.client import AsyncClient
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.integration.transfer.test_split_parity import BORDERS, MAX_TOKENS, MORE
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.engine.reference import Reference
from tests.support.engine.runner_driver import prompt_of
from tests.support.engine.tiny_models import make_tiny_model
from tests.support.waiting import PATIENCE_S

ALL = [*BORDERS, *MORE]
"""The prompts of `test_split_parity.py`."""
TOGETHER = 4
"""Requests at a time: more would not be drafted for."""
LONG = 40
"""Tokens of the answer that repeats its prompt."""


def speculated(cluster: Cluster) -> dict[str, float]:
    port = cluster.members["decode-0"].wait_event("metrics.ready")["port"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as page:
        families = text_string_to_metric_families(page.read().decode())
        (family,) = (each for each in families if each.name == "splitserve_speculated_tokens")
    return {sample.labels["tokens"]: sample.value for sample in family.samples}


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_answers_are_those_of_transformers(log_dir: Path, smollm2: str) -> None:
    tokenizer, reference = load_tokenizer(smollm2), Reference(smollm2)
    options = ["--dtype", "float32", "--max-step-tokens", "128", "--metrics-port", "0"]
    options += ["--speculation", "prompt-lookup"]
    prompts = [tokenizer.encode(sentences(length // 6 + 8, seed=length))[:length] for length in ALL]
    text = tokenizer.encode(sentences(8, seed=6))
    repeating = [*text, *text, *text[: len(text) // 2]]
    expected = [reference.greedy(prompt, MAX_TOKENS) for prompt in prompts]
    expected.append(reference.greedy(repeating, LONG))
    setup = Cluster(log_dir, model=smollm2, engine="torch", worker_options=options)
    async with running(setup) as cluster:
        async with AsyncClient(cluster.target, timeout_s=300) as client:

            async def ask(prompt: list[int], count: int) -> list[int]:
                answer = await client.generate(prompt, temperature=0.0, max_tokens=count)
                return list(answer.token_ids)

            gate = asyncio.Semaphore(TOGETHER)

            async def ask_beside(prompt: list[int], count: int) -> list[int]:
                async with gate:
                    return await ask(prompt, count)

            asked = [(prompt, MAX_TOKENS) for prompt in prompts] + [(repeating, LONG)]
            alone = [await ask(*each) for each in asked]
            together = await asyncio.gather(*(ask_beside(*each) for each in asked))
            # An answer that another attempt began goes on with drafts from what it said.
            resumed = await client.generate(
                [*repeating, *expected[-1][:10]], temperature=0.0, max_tokens=LONG - 10
            )
        assert alone == expected
        assert together == expected
        assert list(resumed.token_ids) == expected[-1][10:]
        counts = speculated(cluster)
        assert counts["drafted"] >= counts["accepted"] > 20
        await cluster.assert_no_leaks()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_draft_model_on_the_decode_worker_reads_prompts_that_were_handed_over(
    log_dir: Path, tmp_path: Path
) -> None:
    """A model of 22 layers, of which the last 20 change little, and its first two as the draft model."""
    draft = make_tiny_model("llama", tmp_path)
    model = deeper(draft, tmp_path / "deeper", more=20, scale=0.02)
    reference = Reference(str(model))
    prompts = [prompt_of(length) for length in (5, 70, 200)]
    expected = [reference.greedy(prompt, 80) for prompt in prompts]
    options = ["--dtype", "float32", "--max-step-tokens", "64", "--metrics-port", "0"]
    options += ["--speculation", "draft-model", "--draft-model", str(draft)]
    setup = Cluster(log_dir, model=str(model), engine="torch", worker_options=options)
    async with running(setup) as cluster:
        async with AsyncClient(cluster.target, timeout_s=120) as client:

            async def ask(prompt: list[int], begun: Sequence[int] = ()) -> list[int]:
                count = 80 - len(begun)
                answer = await client.generate(
                    [*prompt, *begun], temperature=0.0, max_tokens=count, tpot_ms=500
                )
                return list(answer.token_ids)

            alone = [await ask(prompt) for prompt in prompts]
            together = await asyncio.gather(*(ask(prompt) for prompt in prompts))
            resumed = await ask(prompts[1], expected[1][:30])
        assert alone == expected
        assert together == expected
        assert resumed == expected[1][30:]
        counts = speculated(cluster)
        assert counts["drafted"] > counts["accepted"] > 20
        await cluster.assert_no_leaks()
