"""Checkpoints with quantized weights run on both sides of a handoff with `--engine vllm`, by vLLM's own kernels."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from splitserve.client import AsyncClient
from splitserve.models.hf_tokenizer import load_tokenizer
from tests.integration.vllm.quantized_models import METHODS, make_quantized_model
from tests.support.clients.text import sentences
from tests.support.cluster.real_cluster import Cluster, running

MAX_TOKENS = 8
NEAR = 0.2
"""A chosen token may be so much less likely than the reference's best one, as a share of the spread of its logits:
vLLM computes in bfloat16."""

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def worst_share(
    reference: Path, prompt: Sequence[int], answer: Sequence[int], *, rounds_inputs: bool
) -> float:
    """How far the answer's worst token lies below the reference's best, as a share of the logits' spread.

    `rounds_inputs`: the reference rounds what goes into the quantized layers, as `int8` checkpoints ask for.
    """
    model = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32).eval()
    if rounds_inputs:
        for name, layer in model.named_modules():
            if name.endswith("_proj"):
                layer.register_forward_pre_hook(in_8_bits)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    best, least = logits.amax(dim=1), logits.amin(dim=1)
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return float(((best - chosen) / (best - least)).max())


def in_8_bits(_layer: torch.nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    """The inputs of a layer, each token's as 8-bit integers with a scale of its own."""
    scales = inputs[0].abs().amax(dim=-1, keepdim=True) / 127
    return (inputs[0] / scales).round() * scales


def require_four_bit_kernels() -> None:
    """vLLM's build for processors without AVX-512 has no kernels for weights of four bits."""
    import_module("vllm._custom_ops")
    try:
        torch.ops._C.cpu_gemm_wna16  # noqa: B018 (its lookup is the question)
    except AttributeError:
        pytest.skip("vLLM has no kernels for weights of four bits for this processor")


@pytest.mark.parametrize(
    "method",
    [pytest.param(method, marks=() if method == "gptq" else pytest.mark.slow) for method in METHODS],
)
async def test_answers_follow_the_quantized_weights(method: str, tmp_path: Path) -> None:
    if method != "int8":
        require_four_bit_kernels()
    checkpoint, reference = make_quantized_model(method, tmp_path)
    options = ["--context-tokens", "512", "--max-step-tokens", "64", "--kv-memory-bytes", "30000000"]
    setup = Cluster(
        tmp_path, model=str(checkpoint), engine="vllm", prefill=1, decode=1, worker_options=options
    )
    tokens = load_tokenizer(str(checkpoint)).encode(sentences(40, seed=5))
    async with running(setup) as cluster, AsyncClient(cluster.target, timeout_s=300) as client:
        for length in (33, 64, 130, 130):
            prompt = tokens[length : 2 * length]
            answer = await client.generate(prompt, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
            assert answer.timings.transfer_bytes > 0
            share = worst_share(reference, prompt, answer.token_ids, rounds_inputs=method == "int8")
            assert share < NEAR, length
        await cluster.assert_no_leaks()
