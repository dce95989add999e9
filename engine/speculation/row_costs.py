"""What steps that only decode take, measured by their number of rows, drafted tokens included."""

from __future__ import annotations

FORGET_AFTER = 1024
"""Steps after which a time that was not measured again is forgotten: it may have been of other contexts."""
_PRIOR_ROW_COST = 0.08
"""A further row, as a share of a step of one row, before it was measured."""
_LEAST_ROW_COST = 0.02
"""A further row costs at least this share: where steps seem to cost the same, the measurement is noisy."""
_SMOOTHING = 0.15
_OUTLIER = 1.5
_KEPT_STEPS = 8
"""Steps for which ratios are kept once they were asked for."""


class RowCosts:
    """Times of steps that only decode, in seconds, by their number of rows."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._measured_at: dict[int, int] = {}
        self._ratios: dict[tuple[int, int], float] = {}
        self._steps = 0

    def record(self, rows: int, seconds: float) -> None:
        """A step over `rows` rows took so long. One that took much longer than expected counts as a bit longer."""
        expected = self.step_s(rows)
        if expected:
            seconds = min(seconds, _OUTLIER * expected)
        known = self._seconds.get(rows, seconds)
        self._seconds[rows] = known + (seconds - known) * _SMOOTHING
        self._steps += 1
        self._measured_at[rows] = self._steps
        if self._steps % _KEPT_STEPS == 0:
            self._ratios.clear()
        if self._steps % (FORGET_AFTER // 8) == 0:
            for old in [each for each, at in self._measured_at.items() if at < self._steps - FORGET_AFTER]:
                del self._seconds[old], self._measured_at[old]

    def ratio(self, rows: int, more: int) -> float:
        """t(rows + more) / t(rows), above 1; what was not measured lies on the line between its neighbours."""
        kept = self._ratios.get((rows, more))
        if kept is None:
            kept = self._ratios[rows, more] = self._ratio(rows, more)
        return kept

    def step_s(self, rows: int) -> float:
        """Seconds of a step over so many rows; 0 before anything was measured."""
        measured = self._seconds
        if (exact := measured.get(rows)) is not None:
            return exact
        below = max((known for known in measured if known < rows), default=None)
        above = min((known for known in measured if known > rows), default=None)
        if below is not None and above is not None:
            low, high = measured[below], measured[above]
            return low + (high - low) * (rows - below) / (above - below)
        if below is not None:
            return measured[below] * (1 + _PRIOR_ROW_COST * (rows - below))
        return measured[above] / (1 + _PRIOR_ROW_COST * (above - rows)) if above is not None else 0.0

    def _ratio(self, rows: int, more: int) -> float:
        plain, least = self.step_s(rows), 1.0 + _LEAST_ROW_COST * more
        return max(least, self.step_s(rows + more) / plain) if plain else 1.0 + _PRIOR_ROW_COST * more
