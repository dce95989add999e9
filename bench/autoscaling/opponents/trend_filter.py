"""A Kalman filter of a level with a trend: one value observed, the next one forecast."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]
_STEP: Matrix = np.array([[1.0, 1.0], [0.0, 1.0]])


@dataclass(frozen=True, slots=True, eq=False)
class TrendFilter:
    """x(t) = x(t-1) + v(t-1), both with noise; R. E. Kalman, "A New Approach to Linear Filtering" (1960). The variances
    are the defaults of Dynamo's planner."""

    state: Matrix | None = None
    """[level, trend]; None before the first value."""
    covariance: Matrix | None = None
    level_noise: float = 1.0
    trend_noise: float = 0.1
    value_noise: float = 10.0

    def observed(self, value: float) -> TrendFilter:
        """The filter after one more value."""
        if self.state is None or self.covariance is None:
            return TrendFilter(
                np.array([value, 0.0]),
                np.eye(2) * 1000.0,
                self.level_noise,
                self.trend_noise,
                self.value_noise,
            )
        state = _STEP @ self.state
        spread = _STEP @ self.covariance @ _STEP.T + np.diag([self.level_noise, self.trend_noise])
        gain = spread[:, 0] / (spread[0, 0] + self.value_noise)
        left = np.eye(2) - np.outer(gain, [1.0, 0.0])
        moved = state + gain * (value - state[0])
        return TrendFilter(moved, left @ spread, self.level_noise, self.trend_noise, self.value_noise)

    @property
    def forecast(self) -> float:
        """The next value; 0 before the first one."""
        return 0.0 if self.state is None else float(self.state.sum())
