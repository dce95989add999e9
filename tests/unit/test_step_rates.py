"""How fast an engine says it is."""

from __future__ import annotations

import pytest

from engine.step_rates import StepRates


def test_rates_are_means_of_steps() -> None:
    rates = StepRates()
    assert (rates.prefill_tokens_per_s, rates.decode_step_s) == (0.0, 0.0)
    for _ in range(5):
        rates.record(100, 0.1)
        rates.record(0, 0.02)
    assert rates.prefill_tokens_per_s == pytest.approx(1000)
    assert rates.decode_step_s == pytest.approx(0.02)


def test_a_step_that_was_frozen_hardly_counts() -> None:
    rates = StepRates()
    for _ in range(5):
        rates.record(100, 0.1)
        rates.record(0, 0.02)
    rates.record(100, 60.0)
    rates.record(0, 60.0)
    assert rates.prefill_tokens_per_s > 700
    assert rates.decode_step_s < 0.025


def test_a_lasting_slowdown_shows_soon() -> None:
    rates = StepRates()
    for _ in range(5):
        rates.record(100, 0.1)
        rates.record(0, 0.02)
    for _ in range(40):
        rates.record(100, 1.0)
        rates.record(0, 0.2)
    assert rates.prefill_tokens_per_s < 110
    assert rates.decode_step_s > 0.18
