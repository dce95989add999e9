"""Tokens chosen on the device against those that the host's sampler chooses from the same logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from engine.backends.cuda.forward import AsyncArgmax
from engine.core.types import SampledToken, SamplingParams
from engine.kv_cache.memory import DTYPES
from engine.runner.device_sampling.row_sampler import sample_rows
from engine.runner.sampler import sample
from engine.runner.sampling_row import SamplingRow
from engine.runner.self_test.verdict import WrongResultError
from splitserve.errors import SplitserveError

SampleRows = Callable[[torch.Tensor, Sequence[SamplingRow]], list[SampledToken | SplitserveError | None]]
Argmax = Callable[[torch.Tensor], Callable[[], list[int]]]
_PARAMETERS: Sequence[SamplingParams] = (
    SamplingParams(),
    SamplingParams(temperature=0.05),
    SamplingParams(top_k=7),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.999),
    SamplingParams(min_p=0.05),
    SamplingParams(top_k=20, top_p=0.8, min_p=0.01),
    SamplingParams(temperature=4.0, top_p=0.95),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(logit_bias=((3, 9.0), (5, 8.0)), frequency_penalty=-0.5),
    SamplingParams(temperature=0.0, logprobs=5),
)
_CONTEXT = (1, 2, 3, 3, 5, 5, 5)
_PROMPT_TOKENS = 3
_NEAR = 1e-6
"""Log-probabilities are float64 sums of equal numbers in another order."""


def check_sampling(
    vocabulary: int,
    dtype: str,
    device: torch.device,
    on_device: SampleRows = sample_rows,
    argmax: Argmax = AsyncArgmax,
) -> None:
    """Tokens and log-probabilities of random logits with `vocabulary` entries, and the largest logits. Raises
    WrongResultError.

    A row with a NaN must be told apart: its request fails, and no other.
    """
    numbers = torch.Generator().manual_seed(11)
    on_host = (3 * torch.randn(len(_PARAMETERS), vocabulary, generator=numbers)).to(DTYPES[dtype])
    rows = [_row(replace(params, seed=seed)) for seed, params in enumerate(_PARAMETERS)]
    expected = sample(on_host, rows)
    for row, (found, wanted) in enumerate(zip(on_device(on_host.to(device), rows), expected, strict=True)):
        if not isinstance(found, SampledToken) or not _alike(found, wanted):
            raise WrongResultError(f"row {row}: sampled {found}, the host samples {wanted}")
    greedy = [_row(SamplingParams(temperature=0.0)) for _ in rows]
    best = [token.token_id for token in sample(on_host, greedy)]
    on_host[1, vocabulary // 2] = float("nan")
    best[1] = -1
    largest = argmax(on_host.to(device))()
    if largest != best:
        raise WrongResultError(f"the largest logits are those of {largest}, on the host of {best}")


def _row(params: SamplingParams) -> SamplingRow:
    return SamplingRow(params, _CONTEXT, _PROMPT_TOKENS, len(_CONTEXT), frozenset({7}))


def _alike(one: SampledToken, other: SampledToken) -> bool:
    if one.token_id != other.token_id or one.logprob is None or other.logprob is None:
        return one == other
    mine, theirs = (dict(each.top) | {-1: each.logprob} for each in (one.logprob, other.logprob))
    return mine.keys() == theirs.keys() and all(abs(mine[key] - theirs[key]) < _NEAR for key in mine)
