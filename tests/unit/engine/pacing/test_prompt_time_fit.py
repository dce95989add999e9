"""The fitted time of prompts: correct where chunks differ, safe where they do not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.pacing.step_time_fit import PromptFit, PromptTimeFit, pairs_of

TRUE = PromptFit(base_s=8e-3, token_s=1.2e-3, pair_s=4e-7)


def fitted(noise: float, *, stopped_every: int = 0) -> PromptFit:
    """The fit after 400 chunks of TRUE's cost; one in `stopped_every` was stopped for a minute."""
    chance, fit = random.Random(1), PromptTimeFit()
    for step in range(400):
        tokens, context = chance.randint(8, 512), chance.choice((0, 0, 512, 2048, 4096))
        duration_s = TRUE.chunk_s(tokens, context) * chance.gauss(1, noise)
        if stopped_every and step % stopped_every == stopped_every - 1:
            duration_s += 60.0
        fit.record(tokens, pairs_of(tokens, context), duration_s)
    assert fit.latest is not None
    return fit.latest


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 1e-6), (0.03, 0.1)])
def test_costs_are_found_where_chunks_differ(noise: float, tolerance: float) -> None:
    found = fitted(noise)
    assert found.token_s == pytest.approx(TRUE.token_s, rel=tolerance)
    assert found.pair_s == pytest.approx(TRUE.pair_s, rel=2 * tolerance)
    assert found.chunk_s(300, 1000) == pytest.approx(TRUE.chunk_s(300, 1000), rel=tolerance)


def test_a_process_that_was_stopped_hardly_counts() -> None:
    found = fitted(0.02, stopped_every=80)
    for tokens, context in ((32, 0), (256, 0), (512, 4096)):
        assert found.chunk_s(tokens, context) == pytest.approx(TRUE.chunk_s(tokens, context), rel=0.35)


def test_the_first_step_of_a_size_counts_for_nothing() -> None:
    fit = PromptTimeFit()
    fit.record(100, 5000, 5.0)
    for _ in range(4):
        fit.record(100, 5000, 0.1)
    assert fit.latest == PromptFit(0.0, pytest.approx(1e-3), 0.0)


def test_a_few_steps_give_no_fit() -> None:
    fit = PromptTimeFit()
    for _ in range(4):
        fit.record(100, 5000, 0.1)
    assert fit.latest is None
    fit.record(0, 0, 0.1)
    fit.record(100, 5000, 0.0)
    assert fit.latest is None


@pytest.mark.parametrize("extra_s", [9e-3, -5e-3])
def test_what_mixing_costs_is_a_mean_over_mixed_steps(extra_s: float) -> None:
    fit = PromptTimeFit()
    fit.record_mixed(64, 2048, 0.02, 0.5)  # nothing is known yet
    for tokens in (100, 100, 200, 200, 400, 400, 100, 200, 300, 400):
        fit.record(tokens, pairs_of(tokens, 0), 0.01 + 1e-3 * tokens)
    for _ in range(60):
        fit.record_mixed(200, pairs_of(200, 0), 0.02, 0.01 + 0.2 + 0.02 + extra_s)
    assert fit.latest is not None
    assert fit.latest.mixing_s == pytest.approx(extra_s, rel=0.02)


def test_what_a_chunk_adds_to_steps_that_decode_is_told_by_these_alone() -> None:
    """Prompts came alone only while the machine was busy: 0.1 s each. Beside decodes they take what they do."""
    fit = PromptTimeFit()
    for tokens in (30, 30, 60, 60, 30, 60):
        fit.record(tokens, pairs_of(tokens, 0), 0.1 + 1e-4 * tokens)
    assert fit.beside is None
    for tokens in (40, 80, 120) * 20:
        fit.record_mixed(tokens, pairs_of(tokens, 0), 0.02, 0.02 + 0.004 + 4e-4 * tokens)
    assert fit.beside is not None
    for tokens in (40, 100):
        assert fit.beside.chunk_s(tokens, 0) == pytest.approx(0.004 + 4e-4 * tokens, rel=0.05)
    assert fit.beside.mixing_s == 0.0


@given(
    base_s=st.floats(0, 0.1),
    token_s=st.floats(1e-6, 1e-2),
    pair_s=st.floats(0, 1e-5),
    seconds=st.floats(-0.1, 2.0),
    context=st.integers(0, 100_000),
)
def test_the_longest_chunk_within_a_time(
    base_s: float, token_s: float, pair_s: float, seconds: float, context: int
) -> None:
    fit = PromptFit(base_s, token_s, pair_s)
    tokens = fit.tokens_within(seconds, context)
    assert fit.chunk_s(tokens, context) <= max(seconds, 0.0) + 1e-9
    assert fit.chunk_s(tokens + 2, context) > seconds


def test_steps_beside_streams_give_a_fit_where_there_are_no_others() -> None:
    """On a worker that always has streams."""
    fit, chance = PromptTimeFit(), random.Random(1)
    for _ in range(400):
        tokens, context = chance.randint(8, 256), chance.choice((0, 0, 512, 2048))
        fit.record_mixed(
            tokens, pairs_of(tokens, context), 0.02, 0.02 + TRUE.chunk_s(tokens, context) - TRUE.base_s
        )
    assert fit.latest is not None
    assert fit.latest.chunk_s(100, 500) == pytest.approx(TRUE.chunk_s(100, 500) - TRUE.base_s, rel=0.05)
    for _ in range(8):
        for tokens in (50, 100, 200):
            fit.record(tokens, pairs_of(tokens, 0), TRUE.chunk_s(tokens, 0))
    assert fit.latest.chunk_s(100, 0) == pytest.approx(TRUE.chunk_s(100, 0), rel=0.05)


def test_slow_first_steps_beside_streams_are_not_believed_for_good() -> None:
    fit, seconds = PromptTimeFit(), TRUE.chunk_s(64, 0)
    for step in range(600):
        fit.record_mixed(64, pairs_of(64, 0), 0.02, 0.02 + seconds * (3 if step < 16 else 1))
    assert fit.latest is not None
    assert fit.latest.chunk_s(64, 0) == pytest.approx(seconds, rel=0.1)


def test_a_worker_with_more_compute_takes_less_of_all_parts() -> None:
    fit = PromptFit(1.0, 2.0, 3.0, -0.5)
    assert fit.faster(2.0) == PromptFit(0.5, 1.0, 1.5, -0.25)
    assert fit.faster(1.0) is fit
