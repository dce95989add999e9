"""Decode steps that are measured before the first request."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.core.model_runner import warm_up
from engine.core.types import RowsFailedError, SampledToken, ScheduledSequence
from engine.pacing.step_time_fit import StepTimeFit
from engine.runner.simulated_runner import SimulatedRunner
from engine.worker.warm_up.decode_steps import LIMIT_S, measure_decode_steps
from splitserve.config.engine import EngineConfig


class Timed(SimulatedRunner):
    """Each step takes what `seconds` say, on a clock of its own."""

    def __init__(self, base_s: float, sequence_s: float, **settings: int) -> None:
        super().__init__(EngineConfig(kind="simulated", simulated_step_s=0.0, **settings))  # type: ignore[arg-type]
        self.base_s, self.sequence_s = base_s, sequence_s
        self.now = 100.0
        self.batches: list[int] = []
        self.fails = False

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        if self.fails:
            raise RowsFailedError("NaN", (0,), reason="NUMERICS")
        self.batches.append(len(batch))
        first = self.batches.count(len(batch)) == 1
        self.now += self.base_s + self.sequence_s * len(batch) + (0.02 if first else 0.0)
        return super().execute(batch)


def measured(runner: Timed, max_streams: int = 64) -> StepTimeFit:
    fit = StepTimeFit()
    prompt = warm_up(runner, None)
    runner.batches.clear()
    measure_decode_steps(runner, fit, prompt, max_streams, lambda: runner.now)
    return fit


def test_the_first_fit_tells_a_stream_s_price_and_not_what_compiling_took() -> None:
    runner = Timed(0.004, 0.001)
    fit = measured(runner).latest
    assert fit is not None
    assert fit.step_s(1, 64) == pytest.approx(0.005)
    assert fit.step_s(4, 256) == pytest.approx(0.008)
    assert runner.batches == [1] * 5 + [4] * 5


def test_few_streams_few_measured() -> None:
    runner = Timed(0.004, 0.001)
    fit = measured(runner, max_streams=2).latest
    assert fit is not None
    assert fit.step_s(2, 128) == pytest.approx(0.006)


def test_a_slow_device_is_not_kept_from_starting() -> None:
    runner = Timed(0.1, 0.0)
    fit = measured(runner).latest
    assert len(runner.batches) <= LIMIT_S / 0.1 + 1
    assert fit is not None
    assert fit.step_s(1, 64) == pytest.approx(0.1)
    assert measured(Timed(1.0, 0.0)).latest is None


def test_the_tokens_of_a_prompt_do_not_change() -> None:
    """The measured steps write what is there already."""
    runner = Timed(0.001, 0.0)
    warm_up(runner, None)
    before = runner.pool.copy()
    measure_decode_steps(runner, StepTimeFit(), 64, 8, lambda: runner.now)
    assert (runner.pool == before).all()


def test_a_model_without_a_warm_up_or_that_fails_on_it_has_no_fit() -> None:
    assert measured(Timed(0.001, 0.0, context_tokens=1)).latest is None
    runner = Timed(0.001, 0.0)
    runner.fails = True
    fit = StepTimeFit()
    measure_decode_steps(runner, fit, 64, 8, lambda: runner.now)
    assert fit.latest is None
