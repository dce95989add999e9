"""Tokens chosen on the device against those that the host's sampler chooses from the same logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.backends.cuda.forward import AsyncArgmax
from engine.backends.cuda.sampling import draw_tokens
from engine.core.types import SamplingParams
from engine.kv_cache.memory import DTYPES
from engine.runner.sampler import SamplingRow, sample, uniform
from engine.runner.self_test.verdict import WrongResultError

Draw = Callable[[torch.Tensor, Sequence[SamplingParams], Sequence[float]], list[int]]
Argmax = Callable[[torch.Tensor], Callable[[], list[int]]]
_FILTERS: Sequence[dict[str, float]] = (
    {},
    {"temperature": 0.05},
    {"top_k": 7},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 4.0, "top_p": 0.95},
)


def check_sampling(
    vocabulary: int,
    dtype: str,
    device: torch.device,
    draw: Draw = draw_tokens,
    argmax: Argmax = AsyncArgmax,
) -> None:
    """Greedy and drawn tokens of random logits with `vocabulary` entries. Raises WrongResultError.

    A row with a NaN must be told apart: its request fails, and no other.
    """
    numbers = torch.Generator().manual_seed(11)
    on_host = (3 * torch.randn(len(_FILTERS), vocabulary, generator=numbers)).to(DTYPES[dtype])
    sampling = [
        SamplingParams(**({"temperature": 1.0, "seed": seed} | given))  # type: ignore[arg-type]
        for seed, given in enumerate(_FILTERS)
    ]
    rows = [SamplingRow(params, [0, 0], 1, 2) for params in sampling]
    uniforms = [uniform(row.sampling.seed, row.position) for row in rows]
    expected = [token.token_id for token in sample(on_host, rows)]
    found = draw(on_host.to(device), sampling, uniforms)
    if found != expected:
        raise WrongResultError(f"drew the tokens {found}, the host draws {expected}")
    greedy = [SamplingRow(SamplingParams(temperature=0.0), [0, 0], 1, 2) for _ in rows]
    best = [token.token_id for token in sample(on_host, greedy)]
    on_host[1, vocabulary // 2] = float("nan")
    best[1] = -1
    found = argmax(on_host.to(device))()
    if found != best:
        raise WrongResultError(f"the largest logits are those of {found}, on the host of {best}")
