"""The measured rates of an engine."""

from __future__ import annotations

import pytest

from engine.core.sequence import Sequence
from engine.core.step_stats import StepMeter, StepRates
from tests.support.engine.engine_rig import request


def test_rates_are_averages_over_steps() -> None:
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


def test_a_lasting_slowdown_is_seen_soon() -> None:
    rates = StepRates()
    for _ in range(5):
        rates.record(100, 0.1)
        rates.record(0, 0.02)
    for _ in range(40):
        rates.record(100, 1.0)
        rates.record(0, 0.2)
    assert rates.prefill_tokens_per_s < 110
    assert rates.decode_step_s > 0.18


def test_a_short_prompt_alone_gives_no_rate() -> None:
    rates = StepRates()
    rates.record(16, 1.2)
    assert rates.prefill_tokens_per_s == 0
    rates.record(1000, 1.0)
    assert rates.prefill_tokens_per_s > 480


def test_short_prompts_give_a_rate_in_the_end() -> None:
    rates = StepRates()
    for _ in range(63):
        rates.record(1, 0.01)
        assert rates.prefill_tokens_per_s == 0
    rates.record(1, 0.01)
    assert rates.prefill_tokens_per_s == pytest.approx(100)


def test_a_step_is_expected_to_take_what_its_parts_took() -> None:
    meter = StepMeter()
    decoding, prompt = (Sequence(request(name), number) for number, name in enumerate("dp"))
    steps = {decoding: 1}, {prompt: 500}, {decoding: 1, prompt: 500}
    assert [meter.expected_s(step) for step in steps] == [None, None, None]
    meter.rates.record(0, 0.02)
    assert [meter.expected_s(step) for step in steps] == [0.02, None, None]
    meter.rates.record(1000, 1.0)
    assert [meter.expected_s(step) for step in steps] == pytest.approx([0.02, 0.52, 0.52])
