"""What a decode step costs, fitted by least squares to measured steps: base, per sequence, per token of context.

Steps are remembered by the size of their batch (powers of two), so that a long time at one load does not wash out
what others have taught. Inputs that did not vary enough, or that cannot be told apart, get no slope of their own:
a line through one point would extrapolate nonsense.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.types import DecodeStepFit

_MEMORY_STEPS = 64
"""Steps, about, that each size of batch remembers."""
_FIT_EVERY = 16
_LEAST_SPREAD = 0.1
"""Standard deviation of an input over its mean, below which it has no slope."""
_ALIKE = 0.98
"""Correlation above which two inputs count as one: a batch that grows brings its context along."""
_OUTLIER = 3.0
"""A step counts as at most so many times as slow as its like: a process may be stopped in the middle of one."""


class _Moments:
    """Decayed sums over steps: products of (1, sequences, context tokens) with each other and with the duration.

    Plain numbers: of nine, arrays would cost a step more than all else that is measured of it.
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


class StepFit:
    """Takes pure decode steps one by one; fits now and then, for that costs more than to remember a step."""

    def __init__(self) -> None:
        self.latest: DecodeStepFit | None = None
        """The costs, none below 0, as of a few steps ago; None until there were some."""
        self._by_size: dict[int, _Moments] = {}
        self._steps = 0

    def record(self, sequences: int, context_tokens: int, duration_s: float) -> None:
        """Takes one step of `sequences` sequences that held `context_tokens` tokens together."""
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
    """The inputs that may have slopes, as sets of columns, the richest set first."""
    means = inputs[0] / inputs[0, 0]
    covariance = inputs / inputs[0, 0] - np.outer(means, means)
    spread = [
        column
        for column in (1, 2)
        if means[column] > 0 and covariance[column, column] > (_LEAST_SPREAD * means[column]) ** 2
    ]
    if len(spread) < 2:
        return [(column,) for column in spread]
    alike = covariance[1, 2] / np.sqrt(covariance[1, 1] * covariance[2, 2])
    return [*([(1, 2)] if abs(alike) < _ALIKE else []), (1,), (2,)]


def _solve(
    inputs: NDArray[np.float64], outputs: NDArray[np.float64], chosen: Sequence[int]
) -> tuple[float, float, float] | None:
    """Base and slopes of these columns; a negative base becomes a line through the origin, a negative slope None."""
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
