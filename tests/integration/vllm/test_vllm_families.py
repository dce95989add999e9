"""Models of many families with random weights: a pair of workers answers as vLLM alone does, in float32."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from splitserve.client import AsyncClient, Completion
from splitserve.client.request_builder import build_request
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.v1.inference_pb2_grpc import InferenceServiceStub
from tests.integration.vllm.vllm_alone import Choice, answers
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.engine.tiny_models import VLLM_FAMILIES, make_tiny_model
from tests.support.waiting import PATIENCE_S

LENGTHS = (1, 31, 32, 33, 63, 64, 65, 97, 127, 128, 129, 200)
"""At the borders of blocks, windows and chunks."""
SHARED = 64
"""With so many tokens of a cached prompt another one begins."""
KNOWN = 5
"""Tokens that a resumed answer has, if it is longer."""
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 7}
GRAMMAR: dict[str, Any] = {"regex": "(red|blue|green){5}!", "max_tokens": 30, "ignore_eos": False}
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.4}
ENDING: dict[str, Any] = {"stop_token_ids": list(range(97, 127)), "ignore_eos": False, "max_tokens": 60}
"""An answer ends with the first letter."""
SHAPES: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 3},
    "penalties": PENALTIES,
    "repetition": {"repetition_penalty": 1.3},
    "bias": {"logit_bias": {65: 4.0, 66: -100.0}},
    "stop token": ENDING,
    "min_tokens": ENDING | {"min_tokens": 9},
    "min_tokens, penalties": ENDING | PENALTIES | {"min_tokens": 9},
    "grammar": GRAMMAR,
    "grammar, logprobs, penalties": GRAMMAR | PENALTIES | {"logprobs": 2},
    "seed": SEEDED,
    "grammar, seed": GRAMMAR | SEEDED | {"temperature": 2.0},
}
"""What requests ask for beside `GREEDY`."""
RESUMED = ("logprobs", "repetition", "bias", "stop token", "min_tokens", "grammar")
"""Shapes that go on exactly after a resume. Penalties count the last attempt only, and draws are fresh."""
CHOICES: dict[str, Any] = {"n": 3} | SEEDED
MLA_DIFFERS = "vLLM's MLA on CPU in float32 answers otherwise in other batches, alone too"
MARKS: dict[str, Any] = {
    "vllm_gpt_oss": (),
    "vllm_deepseek_v3": (pytest.mark.slow, pytest.mark.xfail(reason=MLA_DIFFERS, raises=AssertionError)),
}
"""Of single families; the others are slow."""
ENGINES = {"vllm_deepseek_v3": {"attention_backend": "CPU_MLA"}}
"""vLLM's options for single families: on CPU its other backend for MLA takes no float32. This one caches no prefix."""
OPTIONS = ["--dtype", "float32", "--context-tokens", "512", "--max-step-tokens", "64", "--threads", "1"]
OPTIONS += ["--kv-memory-bytes", "100000000"]

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=MARKS.get(name, pytest.mark.slow)) for name in VLLM_FAMILIES]
)
async def test_a_pair_answers_as_vllm_alone(family: str, tmp_path: Path) -> None:
    await assert_answers_as_alone(str(make_tiny_model(family, tmp_path)), tmp_path, **ENGINES.get(family, {}))


@pytest.mark.slow
async def test_kv_of_eight_bits(tmp_path: Path) -> None:
    model = str(make_tiny_model("vllm_gemma3", tmp_path))
    await assert_answers_as_alone(model, tmp_path, kv_cache_dtype="fp8")


async def assert_answers_as_alone(model: str, log_dir: Path, **options: str) -> None:
    """Each request twice: with nothing cached, and with what both sides have cached by then. `options`: of all vLLM
    engines."""
    tokenizer = load_tokenizer(model)
    text = tokenizer.encode(sentences(60, seed=3))
    prompts = {str(length): text[length : 2 * length] for length in LENGTHS}
    beginning = prompts["200"][:SHARED] + text[700:733]
    shaped = {name: text[1000 + 100 * n : 1070 + 101 * n] for n, name in enumerate(SHAPES)}
    asked = {name: (prompt, GREEDY) for name, prompt in prompts.items()}
    asked |= {name: (prompt, GREEDY | SHAPES[name]) for name, prompt in shaped.items()}
    asked |= {"beginning": (beginning, GREEDY), "choices": (text[2500:2600], GREEDY | CHOICES)}
    right = dict(zip(asked, answers(model, list(asked.values()), **options), strict=True))
    words = [f"--{name.replace('_', '-')} {value}" for name, value in options.items()]
    setup = Cluster(
        log_dir,
        model=model,
        engine="vllm",
        worker_options=[*OPTIONS, f"--engine-args={' '.join(words)}"],
        http=True,
    )
    async with running(setup) as cluster, AsyncClient(cluster.target, timeout_s=300) as client:

        async def cached_tokens(name: str) -> int:
            prompt, shape = asked[name]
            answer = await client.generate(prompt, **shape)
            assert_is(answer, right[name][0], name)
            assert answer.timings.transfer_bytes > 0
            return answer.usage.cached_prompt_tokens

        async def goes_on(name: str) -> None:
            tokens = right[name][0].tokens
            known = min(KNOWN, len(tokens) - 1)
            assert await rest_of(cluster, *asked[name], tokens[:known]) == tokens[known:], name

        for part in (prompts, shaped):
            cached = await asyncio.gather(*map(cached_tokens, part))
            assert not any(cached)
            cached = await asyncio.gather(*map(cached_tokens, part))
            long = [
                tokens for tokens, prompt in zip(cached, part.values(), strict=True) if len(prompt) > SHARED
            ]
            assert any(cached) == all(long) == ("CPU_MLA" not in options.values())
        # Of layers with a window vLLM keeps the end of a prompt alone.
        assert await cached_tokens("beginning") in (0, SHARED)
        await asyncio.gather(*map(goes_on, RESUMED))
        texts = [tokenizer.decode(choice.tokens) for choice in right["choices"]]
        assert await choices_of(cluster, *asked["choices"]) == texts
        await cluster.assert_no_leaks()


def assert_is(answer: Completion, choice: Choice, name: str) -> None:
    """`name`: of the request."""
    assert list(answer.token_ids) == choice.tokens, name
    logprobs = [[entry.logprob, *(logprob for _, logprob in entry.top)] for entry in answer.logprobs]
    for mine, vllms in zip(logprobs, choice.logprobs, strict=True):
        assert mine == pytest.approx(vllms, abs=1e-3), name


async def rest_of(cluster: Cluster, prompt: Sequence[int], options: Any, have: Sequence[int]) -> list[int]:
    """The tokens of a resumed answer after those that it has."""
    request = build_request(prompt, options)
    request.resume.token_ids.extend(have)
    async with grpc.aio.insecure_channel(cluster.target) as channel:
        call = InferenceServiceStub(channel).Generate(request, timeout=PATIENCE_S)
        return [token async for message in call for token in message.delta.token_ids]


async def choices_of(cluster: Cluster, prompt: Sequence[int], options: Any) -> list[str]:
    """The texts of a completion's choices, over HTTP."""
    async with httpx.AsyncClient(base_url=cluster.base_url, timeout=PATIENCE_S) as client:
        answer = await client.post("/completions", json={"prompt": list(prompt)} | options)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]
