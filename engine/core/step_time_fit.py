"""Fits the time of a decode step by least squares: a base, a cost per sequence, a cost per token of context.

Statistics are kept by batch size (powers of two), so that a long time at one load does not displace what was measured
at others. An input that did not vary enough, or that correlates too much with the other, gets no slope of its own: a
line through one point does not extrapolate.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.core.types import DecodeStepFit

_MEMORY_STEPS = 64
"""Time constant of the decay, in steps of a batch size."""
_FIT_EVERY = 16
"""Steps between fits."""
_MIN_SPREAD = 0.1
"""Standard deviation of an input over its mean, below which it gets no slope."""
_ALIKE = 0.98
"""Correlation above which the inputs count as one: a larger batch usually has more context."""
_OUTLIER = 3.0
"""A step counts as at most this multiple of the mean of its batch size: the process may have been stopped."""


class _Moments:
    """Decayed sums over steps: products of (1, sequences, context tokens) with each other and with the duration.

    Plain numbers, because arrays of nine would cost more than the rest of the measurement of a step.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 9

    def add(self, sequences: int, context: int, duration_s: float) -> None:
        keep = 1 - 1 / _MEMORY_STEPS
        squares = (sequences * sequences, sequences * context, context * context)
        new = (1.0, sequences, context, *squares, duration_s, sequences * duration_s, context * duration_s)
        self._sums = [old * keep + term for old, term in zip(self._sums, new, strict=True)]

    @property
    def mean_s(self) -> float:
        return self._sums[6] / self._sums[0] if self._sums[0] else 0.0

    @property
    def inputs(self) -> NDArray[np.float64]:
        one, s, c, ss, sc, cc = self._sums[:6]
        return np.array(((one, s, c), (s, ss, sc), (c, sc, cc)))

    @property
    def outputs(self) -> NDArray[np.float64]:
        return np.array(self._sums[6:])


class StepTimeFit:
    """Takes decode-only steps one by one; fits every _FIT_EVERY steps, because a fit costs more than a record."""

    def __init__(self) -> None:
        self.latest: DecodeStepFit | None = None
        """The latest fit, all costs at least 0; None until there is one."""
        self._by_size: dict[int, _Moments] = {}
        self._steps = 0

    def record(self, sequences: int, context_tokens: int, duration_s: float) -> None:
        """Records a step of `sequences` sequences that have `context_tokens` tokens together."""
        if sequences < 1 or duration_s <= 0:
            return
        moments = self._by_size.get(sequences.bit_length())
        if moments is None:
            moments = self._by_size[sequences.bit_length()] = _Moments()
        elif moments.mean_s:
            duration_s = min(duration_s, _OUTLIER * moments.mean_s)
        moments.add(sequences, context_tokens, duration_s)
        self._steps += 1
        if self._steps % _FIT_EVERY == 0:
            self.latest = self._fit()

    def _fit(self) -> DecodeStepFit:
        known = list(self._by_size.values())
        inputs = np.sum([moments.inputs for moments in known], axis=0)
        outputs = np.sum([moments.outputs for moments in known], axis=0)
        for chosen in _candidates(inputs):
            solved = _solve(inputs, outputs, chosen)
            if solved is not None:
                return DecodeStepFit(*solved)
        return DecodeStepFit(float(outputs[0] / inputs[0, 0]), 0.0, 0.0)


def _candidates(inputs: NDArray[np.float64]) -> list[tuple[int, ...]]:
    """The sets of inputs that may have slopes, as columns of `inputs`, the largest set first."""
    means = inputs[0] / inputs[0, 0]
    covariance = inputs / inputs[0, 0] - np.outer(means, means)
    spread = [
        column
        for column in (1, 2)
        if means[column] > 0 and covariance[column, column] > (_MIN_SPREAD * means[column]) ** 2
    ]
    if len(spread) < 2:
        return [(column,) for column in spread]
    alike = covariance[1, 2] / np.sqrt(covariance[1, 1] * covariance[2, 2])
    return [*([(1, 2)] if abs(alike) < _ALIKE else []), (1,), (2,)]


def _solve(
    inputs: NDArray[np.float64], outputs: NDArray[np.float64], chosen: Sequence[int]
) -> tuple[float, float, float] | None:
    """Base and slopes, solved for these columns. With a negative base the line goes through the origin instead.

    None for a negative slope or a singular system.
    """
    for columns in ((0, *chosen), tuple(chosen)):
        picked = list(columns)
        scale = np.sqrt(np.diag(inputs)[picked])
        matrix = inputs[np.ix_(picked, picked)] / np.outer(scale, scale)
        try:
            found = np.linalg.solve(matrix, outputs[picked] / scale) / scale
        except np.linalg.LinAlgError:
            return None
        costs = dict(zip(picked, found, strict=True))
        if any(costs[column] < 0 for column in chosen):
            return None
        if costs.get(0, 0.0) >= 0:
            return float(costs.get(0, 0.0)), float(costs.get(1, 0.0)), float(costs.get(2, 0.0))
    return None
