"""Work over capacity of the two sides, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.admission.entry import Held
from coordinator.leanings.pressure import WorkerWork, pressure_on
from coordinator.workers.snapshot import PoolName
from engine.pacing.step_time_fit import DecodeStepFit

FIT = DecodeStepFit(0.01, 0.001, 0.0)
TTFT_S, TPOT_S = 1.0, 0.05
LIMIT_S = 0.85 * 0.9 * TPOT_S


def work(
    name: str, pool: PoolName, prompt_s: float = 0.0, streams: int = 0, fit: DecodeStepFit | None = FIT
) -> WorkerWork:
    return WorkerWork((name, 1), pool, True, prompt_s, streams, 0, fit, step_s=0.02)


def test_prompts_count_wherever_they_are_and_share_the_workers_that_lean_to_them() -> None:
    works = [work("a", "prefill", 0.5), work("b", "prefill", 0.25), work("c", "decode", 0.25)]
    assert pressure_on(works, TTFT_S, TPOT_S).prefill == pytest.approx(1.0)


def test_streams_count_wherever_they_are_and_spread_over_the_workers_that_lean_to_them() -> None:
    works = [work("a", "prefill", streams=4), work("b", "decode", streams=10), work("c", "decode", streams=6)]
    assert pressure_on(works, TTFT_S, TPOT_S).decode == pytest.approx(0.02 / LIMIT_S)


def test_without_a_fit_it_is_the_step_that_was_measured() -> None:
    works = [work("a", "prefill", fit=None), work("b", "decode", streams=10, fit=None)]
    assert pressure_on(works, TTFT_S, TPOT_S).decode == pytest.approx(0.02 / LIMIT_S)


def test_a_side_without_workers_is_pressed_without_limit_if_it_has_work() -> None:
    assert pressure_on([work("a", "decode", 0.1)], TTFT_S, TPOT_S).prefill == float("inf")
    assert pressure_on([work("a", "prefill", streams=1)], TTFT_S, TPOT_S).decode == float("inf")
    idle = pressure_on([work("a", "decode")], TTFT_S, TPOT_S)
    assert (idle.prefill, idle.decode) == (0.0, 0.0)


def test_what_is_held_back_counts_for_the_side_that_it_waits_for() -> None:
    works = [work("a", "prefill"), work("b", "decode", streams=10)]
    free = pressure_on(works, TTFT_S, TPOT_S)
    prompts = pressure_on(works, TTFT_S, TPOT_S, Held(5, 1000.0, "prefill"), 1000.0)
    assert prompts.prefill == pytest.approx(free.prefill + 2.0)
    assert prompts.decode == free.decode
    tokens = pressure_on(works, TTFT_S, TPOT_S, Held(5, 1000.0, "decode"), 1000.0)
    assert tokens.prefill == free.prefill
    assert tokens.decode == pytest.approx(0.025 / LIMIT_S)


def test_a_fast_worker_counts_by_its_own_rate_of_prompts() -> None:
    """Three seconds of a slow one's prompts, for one that is three times as fast: 0.5 s of the mean of both."""
    slow = replace(work("a", "decode", 3.0), prompt_tokens_per_s=1000.0)
    fast = replace(work("b", "prefill"), prompt_tokens_per_s=3000.0)
    assert pressure_on([slow, fast], TTFT_S, TPOT_S).prefill == pytest.approx(1.0 / 0.5)
    alone = replace(slow, pool="prefill"), replace(fast, pool="decode")
    assert pressure_on(alone, TTFT_S, TPOT_S).prefill == pytest.approx(3.0 / 0.5)


def test_streams_are_spread_by_what_each_worker_could_have() -> None:
    """One whose sequences take a third of the time has three of four of them."""
    fast = work("a", "decode", streams=20, fit=DecodeStepFit(0.01, 0.001, 0.0))
    slow = work("b", "decode", streams=20, fit=DecodeStepFit(0.01, 0.003, 0.0))
    both = pressure_on([fast, slow], TTFT_S, TPOT_S).decode
    assert both == pytest.approx((0.01 + 0.03) / LIMIT_S)


def test_a_worker_whose_base_is_beyond_the_target_gets_none() -> None:
    fast = work("a", "decode", streams=8)
    never = work("b", "decode", fit=DecodeStepFit(1.0, 0.001, 0.0))
    assert pressure_on([fast, never], TTFT_S, TPOT_S).decode == pytest.approx(0.018 / LIMIT_S)
    assert pressure_on([never, work("c", "prefill", streams=2)], TTFT_S, TPOT_S).decode > 20
