"""Models of many families with random weights: a pair of workers answers as vLLM alone does, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitserve.client import AsyncClient
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.integration.vllm.vllm_alone import answers
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.engine.tiny_models import VLLM_FAMILIES, make_tiny_model

LENGTHS = (1, 31, 32, 33, 63, 64, 65, 97, 130, 200)
"""At the borders of blocks, windows and chunks."""
MAX_TOKENS = 12
IN_SHORT = {"vllm_gpt_oss"}
OPTIONS = ["--dtype", "float32", "--context-tokens", "512", "--max-step-tokens", "64", "--threads", "1"]
OPTIONS += ["--kv-memory-bytes", "100000000"]

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in IN_SHORT else pytest.mark.slow) for name in VLLM_FAMILIES],
)
async def test_a_pair_answers_as_vllm_alone(family: str, tmp_path: Path) -> None:
    await assert_answers_as_alone(str(make_tiny_model(family, tmp_path)), tmp_path)


@pytest.mark.slow
async def test_kv_of_eight_bits(tmp_path: Path) -> None:
    model = str(make_tiny_model("vllm_gemma3", tmp_path))
    await assert_answers_as_alone(model, tmp_path, kv_cache_dtype="fp8")


async def assert_answers_as_alone(model: str, log_dir: Path, **options: str) -> None:
    """Twice: with nothing cached, and with what both sides have cached by then. `options`: of all vLLM engines."""
    text = load_tokenizer(model).encode(sentences(60, seed=3))
    prompts = [text[length : 2 * length] for length in LENGTHS]
    expected = answers(model, prompts, MAX_TOKENS, **options)
    words = [f"--{name.replace('_', '-')} {value}" for name, value in options.items()]
    setup = Cluster(
        log_dir, model=model, engine="vllm", worker_options=[*OPTIONS, f"--engine-args={' '.join(words)}"]
    )
    async with running(setup) as cluster, AsyncClient(cluster.target, timeout_s=300) as client:
        for _ in range(2):
            for prompt, right in zip(prompts, expected, strict=True):
                answer = await client.generate(
                    prompt, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True
                )
                assert list(answer.token_ids) == right, len(prompt)
                assert answer.timings.transfer_bytes > 0
        await cluster.assert_no_leaks()
