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


def test_steps_that_only_compute_prompts_are_fitted_apart_from_mixed_ones() -> None:
    meter, now = StepMeter(), 0.0
    decodes = [Sequence(request(f"d{index}", [1] * 10), index) for index in range(2)]
    prompt = Sequence(request("p", [1] * 1000), 9)

    def step(tokens: int, duration_s: float, decoding: int) -> None:
        nonlocal now
        prompt.num_computed = tokens
        work = dict.fromkeys(decodes[:decoding], 1) | ({prompt: tokens} if tokens else {})
        meter.begin(now)
        now += duration_s
        meter.end(now, work, more=True)

    for _ in range(16):
        step(0, 0.02, decoding=2)
    for _ in range(5):
        step(100, 0.1, decoding=0)
    for _ in range(80):
        step(100, 0.13, decoding=2)
    fit = meter.prompt_fit.latest
    assert fit is not None
    assert (fit.base_s, fit.token_s, fit.pair_s) == (0.0, pytest.approx(1e-3), 0.0)
    assert fit.mixing_s == pytest.approx(0.01, rel=0.01)


def test_a_step_that_prepared_others_counts_in_no_fit() -> None:
    meter, now = StepMeter(), 0.0
    decode, prompt = Sequence(request("d", [1] * 10), 0), Sequence(request("p", [1] * 1000), 1)
    for work in ({decode: 1}, {prompt: 100}):
        for duration_s, is_first in (*[(5.0, True)] * 4, *[(0.1, False)] * 16):
            meter.begin(now)
            now += duration_s
            prompt.num_computed = 100
            assert meter.end(now, work, more=True, is_first=is_first) == pytest.approx(duration_s)
    assert meter.fit.latest is not None
    assert meter.fit.latest.step_s(1, 10) == pytest.approx(0.1)
    assert meter.prompt_fit.latest is not None
    assert meter.prompt_fit.latest.chunk_s(100, 0) == pytest.approx(0.1)
    assert meter.totals["decode"].sequences == 20, "it is a step all the same"


def test_lent_cores_are_counted_on_while_the_latest_step_had_them() -> None:
    meter, now = StepMeter(), 0.0
    stream = Sequence(request("a", [5]), 0, 16)

    def step(tokens: int, speedup: float) -> None:
        nonlocal now
        meter.begin(now)
        now += 0.02
        meter.end(now, {stream: tokens}, more=True, speedup=speedup)

    assert (meter.decode_speed, meter.prompt_speed) == (1.0, 1.0)
    for _ in range(20):
        step(1, 2.0)
        step(100, 2.0)
    # What a step brings beyond its own cores was measured for none of them: `PRIOR` of it counts.
    assert (meter.decode_speed, meter.prompt_speed) == pytest.approx((1.5, 1.5))
    assert meter.steady.value < meter.decode_speed, "admission counts on less"
    step(1, 1.0)
    assert (meter.decode_speed, meter.prompt_speed) == (1.0, 1.0)
    step(1, 1.1)
    assert 1.0 < meter.decode_speed < 1.06, "no more than what it had of them"
