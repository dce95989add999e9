"""The sampler against naive references; its result depends on its arguments only."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.model_runner import SampledToken, SamplingParams
from engine.runner.device_sampling import sample_rows
from engine.runner.gumbel_noise import noise_key, noise_of, noise_of_rows
from engine.runner.sampler import NanLogitsError, adjust, allowed_tokens, sample
from engine.runner.sampling_row import SamplingRow

# Few distinct values, so that ties are common, as they are in bfloat16.
LOGITS = st.lists(st.integers(-8, 8).map(lambda value: value / 2), min_size=1, max_size=40)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.7]),
    presence_penalty=st.sampled_from([0.0, -1.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 1.5]),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from([None, 0, 3]),
)


def row(sampling: SamplingParams, tokens: list[int] | None = None, prompt: int = 0) -> SamplingRow:
    tokens = tokens or []
    return SamplingRow(sampling, tokens, prompt, len(tokens))


def naive_allowed(logits: list[float], s: SamplingParams) -> set[int]:
    """Top-k, then top-p over what is left, then min-p, on ranked lists."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    ranked = ranked[: s.top_k or len(ranked)]
    weights = [math.exp(logits[token] - logits[ranked[0]]) for token in ranked]
    probabilities = [weight / sum(weights) for weight in weights]
    kept, mass = 0, 0.0
    while kept < len(ranked) and (mass < s.top_p - 1e-12 or kept == 0 or s.top_p == 1.0):
        mass += probabilities[kept]
        kept += 1
    return {
        token
        for token, probability in zip(ranked[:kept], probabilities[:kept], strict=True)
        if probability >= s.min_p * probabilities[0] * (1 - 1e-12)
    }


@given(LOGITS, PARAMS)
def test_filters_keep_what_a_naive_ranking_keeps(logits: list[float], s: SamplingParams) -> None:
    allowed = allowed_tokens(np.array(logits, dtype=np.float64), s)
    kept = set(range(len(logits))) if allowed is None else set(allowed.tolist())
    assert kept == naive_allowed(logits, s)


def test_nucleus_wider_than_the_first_guess() -> None:
    allowed = allowed_tokens(np.zeros(5000), SamplingParams(top_p=0.5))
    assert allowed is not None
    assert allowed.tolist() == list(range(2500))


@given(LOGITS, PARAMS, st.data())
def test_adjustments_equal_the_naive_ones(
    logits: list[float], s: SamplingParams, data: st.DataObject
) -> None:
    token = st.integers(0, len(logits) - 1)
    tokens = data.draw(st.lists(token, max_size=20))
    prompt = data.draw(st.integers(0, len(tokens)))
    banned = data.draw(st.frozensets(token, max_size=3))
    bias = data.draw(st.dictionaries(token, st.sampled_from([-100.0, 0.5, 7.0]), max_size=3))
    params = SamplingParams(
        repetition_penalty=s.repetition_penalty,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        logit_bias=tuple(bias.items()),
    )
    expected = [value + bias.get(index, 0.0) for index, value in enumerate(logits)]
    for index in set(tokens):
        factor = s.repetition_penalty
        expected[index] = expected[index] / factor if expected[index] > 0 else expected[index] * factor
    for index, count in Counter(tokens[prompt:]).items():
        expected[index] -= s.presence_penalty + count * s.frequency_penalty
    for index in banned:
        expected[index] = -math.inf
    # Later tokens of the shared list are not part of the sequence yet.
    shared = SamplingRow(params, [*tokens, 0, 0], prompt, len(tokens), banned)
    adjusted = adjust(torch.tensor(logits), shared)
    assert torch.allclose(adjusted, torch.tensor(expected), atol=1e-4)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(PARAMS, st.integers(0, 10)), min_size=1, max_size=6), st.randoms(use_true_random=False)
)
def test_a_row_does_not_depend_on_the_batch(
    rows: list[tuple[SamplingParams, int]], pick: random.Random
) -> None:
    vocabulary = 30
    logits = torch.tensor([[pick.choice([-1.0, 0.0, 0.5, 2.0]) for _ in range(vocabulary)] for _ in rows])
    made = [row(s, [pick.randrange(vocabulary) for _ in range(12)], prompt) for s, prompt in rows]
    together = sample(logits, made)
    order = pick.sample(range(len(rows)), len(rows))
    shuffled = sample(logits[order], [made[index] for index in order])
    for place, index in enumerate(order):
        assert shuffled[place] == together[index]
        assert sample(logits[index : index + 1], [made[index]]) == [together[index]]


@given(LOGITS, PARAMS)
def test_the_chosen_token_is_allowed(logits: list[float], s: SamplingParams) -> None:
    s = SamplingParams(temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p, seed=s.seed)
    (chosen,) = sample(torch.tensor([logits]), [row(s)])
    if s.greedy:
        assert chosen.token_id == logits.index(max(logits))
    else:
        assert chosen.token_id in naive_allowed([value / s.temperature for value in logits], s)


@pytest.mark.parametrize(
    ("kept", "params"),
    [
        ([0, 1, 2, 3, 4], SamplingParams()),
        ([0, 1, 2], SamplingParams(top_k=3)),
        ([0, 1, 2, 3], SamplingParams(top_p=0.96)),
        ([0, 1], SamplingParams(min_p=0.4)),
    ],
)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
def test_frequencies_follow_the_probabilities_of_what_is_left(
    kept: list[int], params: SamplingParams, temperature: float
) -> None:
    """Over many seeds and positions, on the host and as rows of one batch."""
    probabilities = np.array([0.5, 0.25, 0.15, 0.07, 0.03])
    logits = torch.tensor(temperature * np.log(probabilities))[None]
    rows = [
        row(replace(params, temperature=temperature, seed=seed), [0] * position)
        for seed in range(2**64 - 20, 2**64 + 20)
        for position in range(100)
    ]
    wanted = len(rows) * probabilities[kept] / probabilities[kept].sum()
    on_host = [token.token_id for token in sample(logits.expand(len(rows), -1), rows)]
    at_once = [
        cast(SampledToken, token).token_id for token in sample_rows(logits.expand(len(rows), -1), rows)
    ]
    assert at_once == on_host
    counts = np.bincount(on_host, minlength=5)
    assert counts.sum() == counts[kept].sum()
    assert (
        (counts[kept] - wanted) ** 2 / wanted
    ).sum() < 24  # 99.99% of a chi-square with 4 degrees of freedom


@pytest.mark.parametrize("other", [(0, 1), (1, 0), (2**32, 0), (2**63, 0), (1, -1), (0, 2**16)])
def test_draws_of_other_positions_and_seeds_are_independent(other: tuple[int, int]) -> None:
    """A contingency table of draws at (seed, position) and at a place next to it or far away."""
    logits = torch.zeros(1, 5)
    pairs = np.zeros((5, 5))
    for seed in range(0, 400, 2):
        for position in range(1, 21, 2):
            places = (seed, position), ((seed + other[0]) % 2**64, position + other[1])
            one, two = (
                sample(logits, [SamplingRow(SamplingParams(seed=s), [], 0, p)])[0].token_id for s, p in places
            )
            pairs[one, two] += 1
    wanted = pairs.sum(0) * pairs.sum(1)[:, None] / pairs.sum()
    assert ((pairs - wanted) ** 2 / wanted).sum() < 45  # 99.99% of a chi-square with 16 degrees of freedom


def test_a_rounding_of_the_logits_changes_few_draws() -> None:
    """An inverse of the cumulative distribution would change every fourth draw here: all boundaries move a little."""
    numbers = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(400, 1000, generator=numbers)
    rounded = logits + 0.01 * torch.randn(logits.shape, generator=numbers)
    rows = [row(SamplingParams(seed=seed)) for seed in range(400)]
    drawn = zip(sample(logits, rows), sample(rounded, rows), strict=True)
    assert sum(one != other for one, other in drawn) <= 8


def test_temperature_sharpens_and_flattens() -> None:
    logits = torch.tensor([[2.0, 0.0]])

    def share(temperature: float) -> float:
        drawn = [
            sample(logits, [row(SamplingParams(temperature=temperature, seed=s))])[0] for s in range(1000)
        ]
        return sum(token.token_id == 0 for token in drawn) / 1000

    for temperature in (0.5, 1.0, 4.0):
        assert share(temperature) == pytest.approx(1 / (1 + math.exp(-2 / temperature)), abs=0.05)


def test_noise_is_gumbels_the_same_on_every_device_and_in_every_version() -> None:
    keys = [noise_key(seed, position) for seed in (0, 2**64 - 1) for position in (0, 12345)]
    tokens = np.arange(50_000)
    noise = np.stack([noise_of(tokens, key) for key in keys])
    assert np.abs(noise_of_rows(keys, tokens.size, torch.device("cpu")).numpy() - noise).max() < 1e-12
    assert noise_of(tokens[[7, 49_999]], keys[0]).tolist() == noise[0, [7, 49_999]].tolist()
    assert len(np.unique(noise)) == noise.size
    assert noise.mean(axis=1) == pytest.approx([0.5772] * 4, abs=0.03)
    assert noise.var(axis=1) == pytest.approx([math.pi**2 / 6] * 4, abs=0.06)
    shares = np.exp(-np.exp(-np.sort(noise.ravel())))
    assert np.abs(shares - np.linspace(0, 1, shares.size)).max() < 1.95 / math.sqrt(shares.size)  # 99.9%
    # Fixed values: a change would break the resumption of requests across versions.
    assert keys[0] == -2152535657050944081
    assert noise[0, 0] == pytest.approx(-0.2364111687124282, abs=1e-12)


def test_bans_and_bias_steer_the_greedy_choice() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    greedy = SamplingParams(temperature=0.0)
    assert sample(logits, [row(greedy)])[0].token_id == 1
    assert sample(logits, [SamplingRow(greedy, [], 0, 0, frozenset({1, 2}))])[0].token_id == 3
    biased = SamplingParams(temperature=0.0, logit_bias=((0, 5.0),))
    assert sample(logits, [row(biased)])[0].token_id == 0


def test_logprobs_come_from_the_raw_logits() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]], dtype=torch.bfloat16)
    params = SamplingParams(temperature=0.0, logit_bias=((3, 100.0),), logprobs=3)
    (chosen,) = sample(logits, [row(params)])
    expected = torch.log_softmax(logits[0].double(), 0)
    assert chosen.token_id == 3
    assert chosen.logprob is not None
    assert chosen.logprob.logprob == pytest.approx(float(expected[3]))
    assert [token for token, _ in chosen.logprob.top] == [1, 2, 3]
    assert chosen.logprob.top[0][1] == pytest.approx(float(expected[1]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_named(bad: float) -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2] = bad
    rows = [row(SamplingParams(temperature=t)) for t in (0.0, 1.0, 0.0)]
    with pytest.raises(NanLogitsError) as failure:
        sample(logits, rows)
    assert failure.value.rows == (1,)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_many_greedy_rows_take_the_first_of_the_largest(dtype: torch.dtype) -> None:
    pick = random.Random(0)
    values = [[pick.randrange(-40, -3) / 4 for _ in range(200)] for _ in range(21)]
    chosen = sample(torch.tensor(values, dtype=dtype), [row(SamplingParams(temperature=0.0))] * 21)
    assert [token.token_id for token in chosen] == [each.index(max(each)) for each in values]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_nan_of_either_sign_is_found_in_any_of_many_rows(dtype: torch.dtype) -> None:
    logits = torch.ones(21, 50, dtype=dtype)
    logits[3, 40] = math.nan
    logits[20, 49] = -math.nan
    logits[9] = -math.inf
    logits[10, 1:] = -math.inf
    with pytest.raises(NanLogitsError) as failure:
        sample(logits, [row(SamplingParams(temperature=0.0))] * 21)
    assert failure.value.rows == (3, 9, 20)


def test_logits_are_left_unchanged() -> None:
    logits = torch.zeros(1, 4)
    sample(logits, [row(SamplingParams(logit_bias=((1, 5.0),), frequency_penalty=1.0), [1, 1, 2])])
    assert not logits.any()
