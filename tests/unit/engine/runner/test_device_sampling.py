"""Tokens sampled for many rows at once, against the sampler's for each row."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.core.model_runner import SampledToken, SamplingParams
from engine.runner import device_sampling
from engine.runner.device_sampling import sample_rows
from engine.runner.sampler import sample
from engine.runner.sampling_row import SamplingRow
from splitserve.errors import SplitserveError

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
    return ids(sample_rows(logits, rows)), ids(sample(logits, rows))


def ids(results: Sequence[SampledToken | SplitserveError | None]) -> list[int]:
    assert all(isinstance(result, SampledToken) for result in results)
    return [result.token_id for result in results if isinstance(result, SampledToken)]


@pytest.mark.parametrize("guess", [device_sampling.GUESS, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tokens_are_the_samplers(dtype: torch.dtype, guess: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All filters in one batch, also where the first guess at their width is too small.

    bfloat16 has many equal logits, and which of them come first is a matter of token ids.
    """
    monkeypatch.setattr(device_sampling, "GUESS", guess)
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
    rows = 2 * device_sampling.ROWS_AT_ONCE + 3
    logits = torch.randn(rows, 50, generator=torch.Generator().manual_seed(2))
    sampling = [SamplingParams(temperature=1.0, seed=seed, top_k=9) for seed in range(rows)]
    found, expected = both(logits, sampling)
    assert found == expected
    assert sample_rows(logits[:0], []) == []


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1.0, 100.0])
def test_the_ends_of_temperatures_and_seeds(temperature: float, seed: int) -> None:
    logits = torch.tensor([[-80.0, 1.0, 30.0, float("-inf"), 90.0, 89.999]]).expand(4, 6)
    sampling = [SamplingParams(temperature=temperature, seed=seed, top_k=k) for k in (0, 1, 3, 6)]
    found, expected = both(logits, sampling)
    assert found == expected
    assert 3 not in found
    if temperature < 1.0:
        assert found == [4] * 4


def bits(allowed: set[int]) -> np.ndarray:
    flags = np.zeros(-(-VOCABULARY // 32) * 32, np.uint8)
    flags[list(allowed)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


def random_row(chance: random.Random) -> SamplingRow:
    """A row with any of all parameters."""
    context = [chance.randrange(VOCABULARY) for _ in range(chance.randrange(2, 30))]
    params = SamplingParams(
        temperature=chance.choice([0.0, 0.7, 1.0]),
        top_k=chance.choice([0, 0, 5]),
        top_p=chance.choice([1.0, 0.9]),
        repetition_penalty=chance.choice([1.0, 1.3, 0.8]),
        presence_penalty=chance.choice([0.0, 0.7, -1.1]),
        frequency_penalty=chance.choice([0.0, 0.3, -0.4]),
        logit_bias=tuple((token, chance.uniform(-9, 9)) for token in chance.sample(range(VOCABULARY), 3))
        if chance.random() < 0.5
        else (),
        seed=chance.randrange(2**63),
        logprobs=chance.choice([None, None, 0, 4, 20]),
    )
    allowed = set(chance.sample(range(VOCABULARY), chance.choice([1, 50]))) if chance.random() < 0.4 else None
    banned = frozenset(chance.sample(range(VOCABULARY), chance.choice([0, 2])))
    return SamplingRow(
        params,
        context,
        chance.randrange(1, len(context)),
        len(context),
        banned,
        None if allowed is None else bits(allowed),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_parameters_together(dtype: torch.dtype) -> None:
    """Tokens are equal; log-probabilities are sums of equal numbers in another order."""
    chance = random.Random(4)
    for seed in range(12):
        rows = [random_row(chance) for _ in range(40)]
        logits = (3 * torch.randn(40, VOCABULARY, generator=torch.Generator().manual_seed(seed))).to(dtype)
        before = logits.clone()
        found, expected = sample_rows(logits, rows), sample(logits, rows)
        assert torch.equal(logits, before)
        assert ids(found) == ids(expected)
        for one, other in zip(found, expected, strict=True):
            assert isinstance(one, SampledToken)
            assert (one.logprob is None) == (other.logprob is None)
            if one.logprob is not None and other.logprob is not None:
                assert [token for token, _ in one.logprob.top] == [token for token, _ in other.logprob.top]
                assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-9)
                assert [value for _, value in one.logprob.top] == pytest.approx(
                    [value for _, value in other.logprob.top], abs=1e-9
                )


def test_a_grammar_that_leaves_nothing_and_a_token_outside_fail_their_rows_alone() -> None:
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(3))
    logits[1, 9] = float("-inf")
    outside = SamplingParams(logit_bias=((VOCABULARY, 1.0),), logprobs=2)
    negative = SamplingParams(repetition_penalty=1.2)
    rows = [
        SamplingRow(SamplingParams(temperature=0.0), [1], 1, 1),
        SamplingRow(SamplingParams(logprobs=3), [1], 1, 1, mask=bits({9})),
        SamplingRow(outside, [1], 1, 1),
        SamplingRow(negative, [-1], 1, 1),
    ]
    plain, stuck, broken, below = sample_rows(logits, rows)
    assert plain == sample(logits[:1], rows[:1])[0]
    assert stuck is None
    assert isinstance(broken, SplitserveError)
    assert isinstance(below, SplitserveError)
