"""Figures of the handoff benchmark from known samples."""

from __future__ import annotations

import pytest

from bench.asking import AskedAnswer
from bench.handoff.rows import Handoff, Samples, make_row


def _answer(first_s: float, gap_s: float = 0.03) -> AskedAnswer:
    return AskedAnswer("r", (first_s, first_s + gap_s, first_s + gap_s + 0.02, first_s + gap_s + 0.04))


def test_a_row_holds_medians_and_ratios() -> None:
    samples = Samples(
        prompt_tokens=512,
        split=[_answer(0.503), _answer(0.604), _answer(0.902)],
        colocated=[_answer(0.5), _answer(0.6), _answer(0.9)],
        handoffs=[Handoff(10_000_000, 1, 1, 5.0, 5.0 + s) for s in (0.002, 0.001, 0.004)],
        raw_s=[0.001, 0.002, 0.001],
        other_load=[0.0, 0.0, 0.03],
    )
    row = make_row(samples)
    assert (row.prompt_tokens, row.repeats, row.bytes) == (512, 3, 10_000_000)
    assert row.exposed_ms_p50 == pytest.approx(2.0)
    assert row.exposed_ms_p95 == pytest.approx(3.8)
    assert (row.gb_per_s, row.raw_gb_per_s) == (pytest.approx(5.0), pytest.approx(10.0))
    assert row.bandwidth_share_of_raw == pytest.approx(0.5)
    assert (row.descriptors, row.contiguous_runs) == (1, 1)
    assert row.ttft_split_minus_colocated_ms == pytest.approx(3.0), "of neighbours, not of medians"
    assert row.second_token_gap_ms_p50 == pytest.approx(30.0)
    assert row.normal_step_ms_p50 == pytest.approx(20.0)
    assert set(row.as_json()) >= {"prompt_tokens", "exposed_ms_p95", "raw_gb_per_s", "normal_step_ms_p50"}
