"""The sampler against naive references; its result depends on its arguments only."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.model_runner import SampledToken, SamplingParams
from engine.runner import sampler
from engine.runner.gumbel_noise import noise_key, noise_of
from engine.runner.sampler import NanLogitsError, adjusted, changes_of, kept_by_filters, sample, sample_rows
from engine.runner.sampling_row import SamplingRow
from engine.runner.structured_output import mask_of

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


@given(LOGITS, PARAMS, st.sampled_from([sampler.GUESS, 2]))
def test_filters_keep_what_a_naive_ranking_keeps(logits: list[float], s: SamplingParams, guess: int) -> None:
    """Also where the first guess at the width of a prefix is too small."""
    scaled = torch.tensor([logits], dtype=torch.float64) - max(logits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "GUESS", guess)
        kept = kept_by_filters(scaled, [s])
    assert set(kept[0].nonzero().flatten().tolist()) == naive_allowed(logits, s)


def test_nucleus_wider_than_the_first_guess() -> None:
    kept = kept_by_filters(torch.zeros(1, 5000).double(), [SamplingParams(top_p=0.5)])
    assert kept[0].nonzero().flatten().tolist() == list(range(2500))


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
    found = adjusted(torch.tensor([logits]), [params], [changes_of(shared, len(logits))])
    assert torch.allclose(found[0], torch.tensor(expected), atol=1e-4)


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
    """Over many seeds and positions."""
    probabilities = np.array([0.5, 0.25, 0.15, 0.07, 0.03])
    logits = torch.tensor(temperature * np.log(probabilities))[None]
    rows = [
        row(replace(params, temperature=temperature, seed=seed), [0] * position)
        for seed in range(2**64 - 20, 2**64 + 20)
        for position in range(100)
    ]
    wanted = len(rows) * probabilities[kept] / probabilities[kept].sum()
    drawn = sample_rows(logits.expand(len(rows), -1), rows, at_once=len(rows))
    tokens = [token.token_id for token in drawn if isinstance(token, SampledToken)]
    counts = np.bincount(tokens, minlength=5)
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
    noise = noise_of(keys, 50_000, torch.device("cpu")).numpy()
    assert len(np.unique(noise)) == noise.size
    assert noise.mean(axis=1) == pytest.approx([0.5772] * 4, abs=0.03)
    assert noise.var(axis=1) == pytest.approx([math.pi**2 / 6] * 4, abs=0.06)
    shares = np.exp(-np.exp(-np.sort(noise.ravel())))
    assert np.abs(shares - np.linspace(0, 1, shares.size)).max() < 1.95 / math.sqrt(shares.size)  # 99.9%
    # Fixed values: a change would break the resumption of requests across versions.
    assert keys[0] == -2152535657050944081
    assert noise[0, 0] == pytest.approx(-0.2364111687124282, abs=1e-12)


def random_row(chance: random.Random, vocabulary: int) -> SamplingRow:
    """A row with any of all parameters."""
    context = [chance.randrange(vocabulary) for _ in range(chance.randrange(2, 30))]
    biased = chance.sample(range(vocabulary), 3) if chance.random() < 0.5 else []
    params = SamplingParams(
        temperature=chance.choice([0.0, 0.05, 0.7, 1.0, 4.0]),
        top_k=chance.choice([0, 0, 1, 5, 1000]),
        top_p=chance.choice([1.0, 0.9, 1e-9]),
        min_p=chance.choice([0.0, 0.05]),
        repetition_penalty=chance.choice([1.0, 1.3, 0.8]),
        presence_penalty=chance.choice([0.0, 0.7, -1.1]),
        frequency_penalty=chance.choice([0.0, 0.3, -0.4]),
        logit_bias=tuple((token, chance.uniform(-9, 9)) for token in biased),
        seed=chance.randrange(2**63),
        logprobs=chance.choice([None, None, 0, 4, 20]),
    )
    allowed = set(chance.sample(range(vocabulary), chance.choice([1, 50]))) if chance.random() < 0.4 else None
    banned = frozenset(chance.sample(range(vocabulary), chance.choice([0, 2])))
    prompt, mask = chance.randrange(1, len(context)), None if allowed is None else mask_of(tuple(allowed))
    return SamplingRow(params, context, prompt, len(context), banned, mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_sampled_together_are_those_sampled_alone(dtype: torch.dtype) -> None:
    """As on a GPU. bfloat16 has many equal logits. Log-probabilities are sums of equal numbers in another order."""
    chance = random.Random(4)
    for seed in range(12):
        rows = [random_row(chance, 400) for _ in range(40)]
        logits = (3 * torch.randn(40, 400, generator=torch.Generator().manual_seed(seed))).to(dtype)
        for one, other in zip(sample_rows(logits, rows, at_once=17), sample(logits, rows), strict=True):
            assert isinstance(one, SampledToken)
            assert one.token_id == other.token_id
            assert (one.logprob is None) == (other.logprob is None)
            if one.logprob is not None and other.logprob is not None:
                assert [token for token, _ in one.logprob.top] == [token for token, _ in other.logprob.top]
                values = [one.logprob.logprob, *(value for _, value in one.logprob.top)]
                assert values == pytest.approx(
                    [other.logprob.logprob, *(value for _, value in other.logprob.top)], abs=1e-9
                )
    assert sample_rows(logits[:0], []) == []


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1.0, 100.0])
def test_the_ends_of_temperatures_and_seeds(temperature: float, seed: int) -> None:
    logits = torch.tensor([[-80.0, 1.0, 30.0, float("-inf"), 90.0, 89.999]]).expand(4, 6)
    rows = [row(SamplingParams(temperature=temperature, seed=seed, top_k=k)) for k in (0, 1, 3, 6)]
    found = [token.token_id for token in sample(logits, rows)]
    assert 3 not in found
    if temperature < 1.0:
        assert found == [4] * 4


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
