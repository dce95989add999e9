"""Measured steps: what is expected of the next ones, and what is hinted to those who wait."""

from __future__ import annotations

import pytest

from engine.scheduling.step_times import StepMeter, StepPart
from splitserve.latency_model import DecodeLatency, LatencyModel, PrefillLatency


def test_a_step_is_expected_to_take_what_its_parts_took() -> None:
    meter = StepMeter()
    decoding, prompt = StepPart(100, 1), StepPart(0, 500)
    steps = [decoding], [prompt], [decoding, prompt]
    assert [meter.expect(step) for step in steps] == [None, None, None]
    meter.latency.model = LatencyModel(decode=DecodeLatency(0.02))
    assert [meter.expect(step) for step in steps] == [0.02, None, None]
    meter.latency.model = LatencyModel(PrefillLatency(0.0, 1e-3), DecodeLatency(0.02))
    assert [meter.expect(step) for step in steps] == pytest.approx([0.02, 0.5, 0.52])


def test_a_step_that_prepared_others_counts_in_no_fit() -> None:
    meter, now = StepMeter(), 0.0
    for part in (StepPart(9, 1), StepPart(0, 100)):
        for duration_s, is_first in (*[(5.0, True)] * 4, *[(0.1, False)] * 16):
            meter.begin(now)
            meter.expect([part])
            now += duration_s
            meter.end(now, more=True, is_first=is_first)
    assert meter.latency.model.decode_step_s(1, 10) == pytest.approx(0.1)
    assert meter.latency.model.prefill_s(100) == pytest.approx(0.1)
    assert meter.totals["decode"].sequences == 20, "it is a step all the same"


def test_the_retry_hint_is_the_time_of_the_queue_within_bounds() -> None:
    meter = StepMeter()
    assert meter.retry_after_s(10) == 1.0, "nothing is measured"
    meter.latency.model = LatencyModel(PrefillLatency(0.0, 1e-3))
    assert [meter.retry_after_s(tokens) for tokens in (10, 5000, 10**6)] == pytest.approx([0.1, 5.0, 60.0])
