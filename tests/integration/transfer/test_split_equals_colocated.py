"""In bfloat16, one request at a time, the split pair gives what one engine gives alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.core.engine import EngineRequest, StopParams
from engine.core.engine_core import EngineCore
from engine.core.model_runner import SamplingParams
from engine.runner.device import multiplies_bfloat16
from engine.runner.torch_runner import build_torch_runner
from splitserve.client import AsyncClient
from splitserve.config.engine import EngineConfig
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.models.sources import checked_model
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.waiting import PATIENCE_S

CHUNK = 128
MAX_TOKENS = 24
LENGTHS = [1, 7, 16, 33, 100, 128, 129, 300] if multiplies_bfloat16() else [1, 16, 129]
"""Fewer where bfloat16 takes many times as long as float32, which is the default there."""
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, seed=11)
GREEDY = SamplingParams(temperature=0.0)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def _colocated(core: EngineCore, prompt: list[int], sampling: SamplingParams, name: str) -> list[int]:
    stop = StopParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    core.add_request(EngineRequest(name, tuple(prompt), sampling, stop))
    tokens: list[int] = []
    while core.has_work():
        for output in core.step().outputs:
            tokens.extend(output.token_ids)
    return tokens


async def test_bfloat16_split_equals_colocated(smollm2: str, log_dir: Path) -> None:
    config = EngineConfig(
        dtype="bfloat16",
        max_step_tokens=CHUNK,
        num_blocks=256,
        threads=1,
        prefix_cache=False,
    )
    tokenizer = load_tokenizer(smollm2)
    runner = build_torch_runner(config, checked_model(smollm2))
    core = EngineCore(runner, config, tokenizer)
    prompts = [tokenizer.encode(sentences(60, seed=n))[:length] for n, length in enumerate(LENGTHS)]
    greedy = [_colocated(core, prompt, GREEDY, f"g{n}") for n, prompt in enumerate(prompts)]
    sampled = [_colocated(core, prompt, SAMPLED, f"s{n}") for n, prompt in enumerate(prompts)]
    runner.close()

    options = [
        "--dtype",
        "bfloat16",
        "--max-step-tokens",
        str(CHUNK),
        "--num-blocks",
        "256",
        "--no-prefix-cache",
    ]
    cluster = Cluster(log_dir, model=smollm2, engine="torch", worker_options=options)
    async with running(cluster), AsyncClient(cluster.target, timeout_s=PATIENCE_S) as client:
        for n, prompt in enumerate(prompts):
            answer = await client.generate(prompt, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
            assert list(answer.token_ids) == greedy[n]
            answer = await client.generate(
                prompt, temperature=1.0, top_p=0.95, seed=11, max_tokens=MAX_TOKENS, ignore_eos=True
            )
            assert list(answer.token_ids) == sampled[n]
        await cluster.assert_no_leaks()
