"""The fitted time of a decode step: correct where steps differ, without slopes where they do not."""

from __future__ import annotations

import random

import pytest

from engine.pacing.step_time_fit import StepTimeFit

BASE_S, SEQUENCE_S, TOKEN_S = 8e-3, 2e-4, 1e-6


def cost(sequences: int, context: int) -> float:
    return BASE_S + SEQUENCE_S * sequences + TOKEN_S * context


def fitted(steps: list[tuple[int, int, float]]) -> StepTimeFit:
    fit = StepTimeFit()
    for step in steps:
        fit.record(*step)
    return fit


def varied(noise: float, seed: int = 1) -> list[tuple[int, int, float]]:
    chance = random.Random(seed)
    steps = []
    for _ in range(400):
        sequences = chance.randint(1, 40)
        context = sum(chance.randint(50, 2000) for _ in range(sequences)) + chance.randint(0, 20000)
        steps.append((sequences, context, cost(sequences, context) * chance.gauss(1, noise)))
    return steps


def test_a_few_steps_give_no_fit() -> None:
    assert fitted([(1, 10, 0.01)] * 15).latest is None


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 1e-6), (0.03, 0.25)])
def test_costs_are_found_where_steps_differ(noise: float, tolerance: float) -> None:
    fit = fitted(varied(noise)).latest
    assert fit is not None
    assert fit.base_s == pytest.approx(BASE_S, rel=tolerance)
    assert fit.sequence_s == pytest.approx(SEQUENCE_S, rel=2 * tolerance)
    assert fit.context_token_s == pytest.approx(TOKEN_S, rel=tolerance)


def test_equal_steps_give_a_base_alone() -> None:
    fit = fitted([(4, 800, 0.02)] * 64).latest
    assert fit is not None
    assert (fit.base_s, fit.sequence_s, fit.context_token_s) == (pytest.approx(0.02), 0.0, 0.0)


def test_correlated_inputs_get_one_slope() -> None:
    steps = [(n, 500 * n, cost(n, 500 * n)) for n in range(1, 33)] * 4
    fit = fitted(steps).latest
    assert fit is not None
    assert fit.context_token_s == 0.0
    assert fit.base_s + fit.sequence_s * 20 == pytest.approx(cost(20, 10000), rel=1e-6)


def test_context_alone_gets_its_slope() -> None:
    fit = fitted([(8, context, cost(8, context)) for context in range(1000, 65000, 1000)]).latest
    assert fit is not None
    assert fit.sequence_s == 0.0
    assert fit.context_token_s == pytest.approx(TOKEN_S, rel=1e-6)


def test_a_long_time_at_one_load_forgets_nothing() -> None:
    fit = fitted([*varied(0.0), *[(8, 8000, cost(8, 8000))] * 20_000]).latest
    assert fit is not None
    assert fit.base_s + fit.sequence_s * 32 + fit.context_token_s * 32000 == pytest.approx(
        cost(32, 32000), rel=0.02
    )


def test_costs_are_never_negative_and_a_frozen_step_hardly_counts() -> None:
    falling = fitted([(n, 100, 0.05 - 0.001 * n) for n in range(1, 33)] * 2).latest
    assert falling is not None
    assert min(falling.base_s, falling.sequence_s, falling.context_token_s) >= 0
    steps = varied(0.0)
    frozen = fitted([*steps, (20, 20000, 600.0), *steps[:15]]).latest
    assert frozen is not None
    assert frozen.base_s + frozen.sequence_s * 20 + frozen.context_token_s * 20000 < 2 * cost(20, 20000)
