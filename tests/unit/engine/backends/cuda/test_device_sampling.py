"""Tokens drawn for many rows at once, against the sampler's for each row."""

from __future__ import annotations

import pytest
import torch

from engine.backends.cuda import sampling as draw
from engine.backends.cuda.sampling import draw_tokens
from engine.core.types import SamplingParams
from engine.runner.sampler import SamplingRow, sample, uniform

VOCABULARY = 400
FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_p": 0.5},
    {"top_p": 0.999999},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.05},
    {"temperature": 4.0, "top_p": 0.95},
]


def both(logits: torch.Tensor, sampling: list[SamplingParams]) -> tuple[list[int], list[int]]:
    rows = [SamplingRow(params, [0] * (3 + index), 1, 3 + index) for index, params in enumerate(sampling)]
    expected = [token.token_id for token in sample(logits, rows)]
    uniforms = [uniform(row.sampling.seed, row.position) for row in rows]
    return draw_tokens(logits, sampling, uniforms), expected


@pytest.mark.parametrize("guess", [draw.GUESS, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tokens_are_the_samplers(dtype: torch.dtype, guess: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All filters in one batch, also where the first guess at their width is too small.

    bfloat16 has many equal logits, and which of them come first is a matter of token ids.
    """
    monkeypatch.setattr(draw, "GUESS", guess)
    numbers = torch.Generator().manual_seed(1)
    for seed in range(8):
        sampling = [SamplingParams(**({"temperature": 1.0, "seed": seed} | given)) for given in FILTERS]
        logits = (2 * torch.randn(len(sampling), VOCABULARY, generator=numbers)).to(dtype)
        found, expected = both(logits, sampling)
        assert found == expected


def test_rows_of_equal_logits_and_rows_that_allow_one_token() -> None:
    nothing = float("-inf")
    logits = torch.full((3, 6), nothing)
    logits[0] = 1.0
    logits[1, 4] = 0.0
    logits[2, [0, 5]] = 3.0
    sampling = [SamplingParams(temperature=1.0, seed=seed, top_p=0.4) for seed in range(3)]
    found, expected = both(logits, sampling)
    assert found == expected
    assert found[1] == 4


def test_more_rows_than_are_drawn_at_once() -> None:
    rows = 2 * draw.ROWS_AT_ONCE + 3
    logits = torch.randn(rows, 50, generator=torch.Generator().manual_seed(2))
    sampling = [SamplingParams(temperature=1.0, seed=seed, top_k=9) for seed in range(rows)]
    found, expected = both(logits, sampling)
    assert found == expected
    assert draw_tokens(logits[:0], [], []) == []


def test_the_ends_of_the_random_number() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, float("-inf")]]).expand(2, 4)
    sampling = [SamplingParams(temperature=1.0)] * 2
    assert draw_tokens(logits, sampling, [0.0, 1.0 - 2**-53]) == [0, 2]
