"""Rows with a grammar's mask: only allowed tokens, otherwise as without a mask, other rows unaffected."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.model_runner import RowsFailedError, SamplingParams
from engine.runner.sampler import adjusted, changes_of, sample
from engine.runner.sampling_row import SamplingRow
from engine.runner.structured_output import GrammarFailedError, mask_of

VOCABULARY = 70
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    top_k=st.integers(0, 80),
    top_p=st.sampled_from([0.05, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.7]),
    frequency_penalty=st.sampled_from([0.0, 1.5]),
    logit_bias=st.sampled_from([(), ((3, -100.0), (4, 100.0))]),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from([None, 0, 3]),
)
ALLOWED = st.sets(st.integers(0, VOCABULARY - 1), min_size=1)
LOGITS = st.lists(st.integers(-8, 8).map(lambda value: value / 2), min_size=VOCABULARY, max_size=VOCABULARY)


def row(
    params: SamplingParams, allowed: set[int] | None, banned: frozenset[int] = frozenset()
) -> SamplingRow:
    return SamplingRow(
        params, [1, 2, 3, 3], 2, 4, banned, None if allowed is None else mask_of(tuple(allowed))
    )


@settings(max_examples=60)
@given(LOGITS, PARAMS, ALLOWED, st.frozensets(st.integers(0, VOCABULARY - 1), max_size=5))
def test_a_masked_row_is_the_row_of_a_smaller_vocabulary(
    logits: list[float], params: SamplingParams, allowed: set[int], banned: frozenset[int]
) -> None:
    left = (allowed - banned) or allowed
    (chosen,) = sample(torch.tensor([logits]), [row(params, allowed, banned)])
    assert chosen.token_id in left
    # The same without a mask, where the logits rule the other tokens out.
    (bare,) = adjusted(torch.tensor([logits]), [params], [changes_of(row(params, None), VOCABULARY)])
    bare[[token for token in range(VOCABULARY) if token not in left]] = -math.inf
    plain = SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
    )
    (expected,) = sample(bare[None], [row(plain, None)])
    assert chosen.token_id == expected.token_id
    if params.logprobs is not None:
        raw = torch.log_softmax(torch.tensor(logits).double(), 0)
        assert chosen.logprob is not None
        assert chosen.logprob.logprob == pytest.approx(float(raw[chosen.token_id]), abs=1e-6)


@given(st.lists(st.tuples(LOGITS, PARAMS, st.none() | ALLOWED), min_size=2, max_size=6))
@settings(max_examples=20)
def test_rows_do_not_depend_on_each_other(
    made: list[tuple[list[float], SamplingParams, set[int] | None]],
) -> None:
    logits = torch.tensor([values for values, _, _ in made])
    rows = [row(params, allowed) for _, params, allowed in made]
    together = sample(logits, rows)
    for index, each in enumerate(rows):
        assert sample(logits[index : index + 1], [each]) == [together[index]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nothing_to_choose_fails_alone(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    logits = torch.zeros(3, VOCABULARY)
    logits[1, 5] = -math.inf  # the only token that the grammar allows there
    rows = [row(params, {5}), row(params, {5}), row(params, None)]
    with pytest.raises(GrammarFailedError) as caught:
        sample(logits, rows)
    assert caught.value.rows == (1,)
    assert sample(logits[[0, 2]], [rows[0], rows[2]])[0].token_id == 5


def test_a_row_that_cannot_be_sampled_fails_alone() -> None:
    logits = torch.zeros(3, VOCABULARY)
    rows = [
        SamplingRow(SamplingParams(seed=seed, logit_bias=bias), (1, 2), 1, 2)
        for seed, bias in enumerate([(), ((VOCABULARY + 5, 1.0),), ()])
    ]
    with pytest.raises(RowsFailedError, match="incident") as failed:
        sample(logits, rows)
    assert (failed.value.rows, failed.value.reason) == ((1,), "INTERNAL")
