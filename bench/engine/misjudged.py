"""A meter whose fits are wrong by a factor: what a worker believes when it misjudges its own speed."""

from __future__ import annotations

from engine.core.step_stats import StepMeter
from engine.pacing.step_time_fit import PromptTimeFit, StepTimeFit


def misjudging_meter(factor: float) -> StepMeter:
    """A meter that takes each step for `factor` times as long as it was, decodes and prompts alike."""
    meter = StepMeter()
    meter.fit, meter.prompt_fit = _StepTimes(factor), _PromptTimes(factor)
    return meter


class _StepTimes(StepTimeFit):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def record(self, sequences: int, context_tokens: int, duration_s: float) -> None:
        super().record(sequences, context_tokens, duration_s * self._factor)


class _PromptTimes(PromptTimeFit):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def record(self, tokens: int, pairs: float, duration_s: float) -> None:
        super().record(tokens, pairs, duration_s * self._factor)

    def record_mixed(self, tokens: int, pairs: float, decode_s: float, duration_s: float) -> None:
        """`decode_s` is of the fit above, so it is wrong by the factor already."""
        super().record_mixed(tokens, pairs, decode_s, duration_s * self._factor)
