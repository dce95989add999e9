"""Times an engine's steps for what it reports of its speed."""

from __future__ import annotations

from collections.abc import Mapping

from engine.sequence import Sequence
from engine.step_fit import StepFit
from engine.step_rates import StepRates


class StepMeter:
    """Call `begin` and `end` around each step. Times in seconds on any one clock.

    Between steps that follow on each other, requests wait as much as during them, so a step counts from the end of
    the one before it. Only where the engine had nothing to do it counts from its own beginning.
    """

    def __init__(self) -> None:
        self.rates = StepRates()
        self.fit = StepFit()
        self._busy_since_s: float | None = None
        self._began_s = 0.0

    def begin(self, now: float) -> None:
        """A step begins."""
        self._began_s = now if self._busy_since_s is None else self._busy_since_s

    def end(self, now: float, num_new: Mapping[Sequence, int], more: bool) -> None:
        """It has ended and computed so many tokens of each sequence; `more` says that another can follow at once."""
        self._busy_since_s = now if more else None
        if not num_new:
            return
        decoding = sum(1 for tokens in num_new.values() if tokens == 1)
        prefill_tokens = sum(num_new.values()) - decoding
        duration_s = now - self._began_s
        self.rates.record(prefill_tokens, duration_s)
        if not prefill_tokens:
            context = sum(sequence.num_computed for sequence in num_new)
            self.fit.record(decoding, context, duration_s)
