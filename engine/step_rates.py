"""How fast an engine computes, measured over its recent steps."""

from __future__ import annotations

_DECAY = 0.9
_OUTLIER = 2.0
"""A step counts as at most so many times as slow as expected. A process that was stopped for a minute in the
middle of a step would otherwise look slow until it gets work again, and so get none."""
_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 60.0


class StepRates:
    """Exponential means over steps; 0 until measured."""

    def __init__(self) -> None:
        self._prefill_tokens = 0.0
        self._prefill_s = 0.0
        self._decode_step_s = 0.0

    def record(self, prefill_tokens: int, duration_s: float) -> None:
        """Takes one step that took `duration_s` seconds; without prefill tokens it was a pure decode."""
        if duration_s <= 0:
            return
        if prefill_tokens:
            if rate := self.prefill_tokens_per_s:
                duration_s = min(duration_s, _OUTLIER * prefill_tokens / rate)
            # Tokens and seconds decay apart, so that a short chunk weighs little.
            self._prefill_tokens = self._prefill_tokens * _DECAY + prefill_tokens
            self._prefill_s = self._prefill_s * _DECAY + duration_s
        elif self._decode_step_s:
            duration_s = min(duration_s, _OUTLIER * self._decode_step_s)
            self._decode_step_s += (duration_s - self._decode_step_s) * (1 - _DECAY)
        else:
            self._decode_step_s = duration_s

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed a second, over the steps that had any."""
        return self._prefill_tokens / self._prefill_s if self._prefill_s else 0.0

    @property
    def decode_step_s(self) -> float:
        """Seconds of a step that only decodes."""
        return self._decode_step_s

    def retry_after_s(self, waiting_tokens: int) -> float:
        """Seconds until a queue of so many prompt tokens is worked off; a guess of 1 while unmeasured."""
        rate = self.prefill_tokens_per_s
        return min(max(waiting_tokens / rate if rate else 1.0, _MIN_RETRY_S), _MAX_RETRY_S)
