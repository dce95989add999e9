"""Least squares of the time of steps: a base and two slopes.

Statistics are kept by bucket of similar steps, so that a long time at one load does not displace what was measured
at others. An input that did not vary enough, or that correlates too much with the other, gets no slope of its own: a
line through one point does not extrapolate.

What was measured long ago was of a machine that may have been busier or less so. A bucket that does not come any more
follows those that do: it counts as so much longer or shorter as they have become since. And it weighs less with time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_Bucket = tuple[int, ...]

_MEMORY_STEPS = 64
"""Time constant of the decay, in steps of a bucket; that of a younger one is its age, because first steps are slow."""
_MIN_SPREAD = 0.1
"""Standard deviation of an input over its mean, below which it gets no slope."""
_ALIKE = 0.98
"""Correlation above which the inputs count as one."""
_OUTLIER = 3.0
"""A step counts as at most this multiple of the mean of its bucket: the process may have been stopped."""
_YOUNG_STEPS = 8
_OUTDONE = 1.5
"""A step of a bucket with fewer than `_YOUNG_STEPS` displaces those that took more than this multiple of it, whatever
its size among them: they were slow for a reason that has gone, as a cold cache."""
_REFUTED = 3.0
"""So many steps in a row displace an older bucket if they are as many times as short: a neighbour has left the cores.
Between steps with and without one there is less."""
_HALF_LIFE_STEPS = 512
"""Steps of any size in which a bucket that does not come weighs half."""
_LEAST_WEIGHT = 1.0
"""What a bucket weighs at least, in steps: other sizes may tell nothing about it."""
_NEIGHBOURS = 8
"""A bucket follows at most this many others, those that came last."""
_NOISE = 0.1
"""Logarithm of a change that is none; one of twice that counts in full."""


class FittedLine(NamedTuple):
    """Seconds: base_s + first_s * the first input + second_s * the second. All at least 0."""

    base_s: float
    first_s: float
    second_s: float

    def of(self, first: float, second: float) -> float:
        """Seconds of a step with these inputs."""
        return self.base_s + self.first_s * first + self.second_s * second


_FLAT = FittedLine(1.0, 0.0, 0.0)


class _Means(NamedTuple):
    """Of a bucket at some time: the means of its duration and inputs, and the number of its steps until then."""

    duration_s: float
    first: float
    second: float
    steps: int


class _Moments:
    """Decayed sums over steps: products of (1, first, second input) with each other and with the duration.

    Plain numbers, because arrays of nine would cost more than the rest of the measurement of a step.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 9
        self.steps = 0
        self.latest = 0
        """The number of its latest step among those of all buckets."""
        self.around: Mapping[_Bucket, _Means] = {}
        """What all buckets had at its latest step."""
        self._successor: _Moments | None = None
        """Of the latest steps, if all of them were much shorter than those before."""

    def add(self, first: float, second: float, duration_s: float) -> None:
        self.steps += 1
        keep = 1 - 1 / min(self.steps, _MEMORY_STEPS)
        squares = (first * first, first * second, second * second)
        new = (1.0, first, second, *squares, duration_s, first * duration_s, second * duration_s)
        self._sums = [old * keep + term for old, term in zip(self._sums, new, strict=True)]

    def displaced_by(
        self, first: float, second: float, duration_s: float, *, old_too: bool
    ) -> _Moments | None:
        """Sums that take the place of these, to which the step is then added: the steps before were slow, this one is
        not. `old_too`: they may be many."""
        mean = self.means
        share = min(1.0, first / mean.first, second / mean.second if mean.second > 0 else 1.0)
        expected_s = mean.duration_s * share
        if self.steps < _YOUNG_STEPS:
            return _Moments() if duration_s * _OUTDONE < expected_s else None
        if not old_too or duration_s * _REFUTED >= expected_s:
            self._successor = None
            return None
        successor = self._successor or _Moments()
        if successor.steps + 1 >= _YOUNG_STEPS:
            return successor
        successor.add(first, second, duration_s)
        self._successor = successor
        return None

    def scale(self, factor: float) -> None:
        """All steps until now count as so many times as long."""
        if factor != 1:
            self._successor = None
        self._sums[6:] = [term * factor for term in self._sums[6:]]

    @property
    def means(self) -> _Means:
        one = self._sums[0]
        return _Means(self._sums[6] / one, self._sums[1] / one, self._sums[2] / one, self.steps)

    @property
    def weight(self) -> float:
        return self._sums[0]

    @property
    def inputs(self) -> NDArray[np.float64]:
        one, a, b, aa, ab, bb = self._sums[:6]
        return np.array(((one, a, b), (a, aa, ab), (b, ab, bb)))

    @property
    def outputs(self) -> NDArray[np.float64]:
        return np.array(self._sums[6:])


class TwoSlopeFit:
    """Sums by bucket, and the lines through them. Without a step there is no line: ask after the first `record`."""

    def __init__(self, *, forgets_slow: bool = False) -> None:
        """`forgets_slow`: many slow steps are forgotten too once much shorter ones refute them."""
        self._forgets_slow = forgets_slow
        self._buckets: dict[_Bucket, _Moments] = {}
        self._now: Mapping[_Bucket, _Means] = {}
        self._steps = 0
        self._followed: dict[_Bucket, float] = {}
        """How much longer those count that follow others, as of the latest fit."""
        self._line: FittedLine | None = None

    def record(self, bucket: _Bucket, first: float, second: float, duration_s: float) -> bool:
        """Records a step with these inputs, the first above 0, that took `duration_s`, above 0. Returns whether it
        displaces what was known of such steps."""
        self._steps += 1
        moments, displacing = self._buckets.get(bucket), None
        if moments is not None:
            moments.scale(self._followed.pop(bucket, 1.0))
            duration_s = min(duration_s, _OUTLIER * moments.means.duration_s)
            displacing = moments.displaced_by(first, second, duration_s, old_too=self._forgets_slow)
        if moments is None or displacing is not None:
            moments = self._buckets[bucket] = displacing or _Moments()
        moments.add(first, second, duration_s)
        moments.latest = self._steps
        self._now = moments.around = {**self._now, bucket: moments.means}
        return displacing is not None

    def means(self) -> tuple[float, float, float]:
        """The means of the duration and of both inputs, in this order."""
        inputs, outputs = self._sums()
        one, first, second = (float(value) for value in inputs[0])
        return float(outputs[0]) / one, first / one, second / one

    def line(self, allowed: Sequence[tuple[int, ...]]) -> FittedLine | None:
        """The line with the first of these sets of inputs (1, 2) whose slopes can be told; None if no set has any.

        With a negative base the line goes through the origin instead. A set with a negative slope is passed over.
        """
        if self._forgets_slow:
            self._forget_refuted()
        self._follow()
        possible = _telling(np.sum([moments.inputs for moments in self._buckets.values()], axis=0))
        inputs, outputs = self._sums()
        solved = (_solve(inputs, outputs, chosen) for chosen in allowed if chosen in possible)
        self._line = next((line for line in solved if line is not None), None)
        return self._line

    def _forget_refuted(self) -> None:
        """Forgets the buckets that newer ones of larger inputs refute: more work is not done in much less time."""
        for bucket, old in list(self._buckets.items()):
            slow = self._now[bucket]
            if any(
                newer.steps >= _YOUNG_STEPS
                and newer.latest >= old.latest + _YOUNG_STEPS
                and self._now[other].first >= slow.first
                and self._now[other].second >= slow.second
                and self._now[other].duration_s * _REFUTED < slow.duration_s
                for other, newer in self._buckets.items()
            ):
                del self._buckets[bucket]

    def _follow(self) -> None:
        """Finds how much longer the buckets count that did not come since the latest fit. A bucket follows all the
        more the longer that is, and fully after as many steps as it has itself."""
        newest = sorted(self._buckets, key=lambda bucket: self._buckets[bucket].latest, reverse=True)
        line = _FLAT if self._line is None else self._line
        self._followed = {}
        for place, bucket in enumerate(newest):
            moments = self._buckets[bucket]
            most = _largest_slopes(moments.around.values())
            total = weight = 0.0
            for other in newest[: min(place, _NEIGHBOURS)]:
                before, after = moments.around.get(other), self._now[other]
                if before is None or (more := _further_steps(before, after)) <= 0:
                    continue
                change = _change(before, after, line, most) + math.log(self._followed.get(other, 1.0))
                total, weight = total + more * change, weight + more
            if weight:
                share = (self._steps - moments.latest) / min(moments.steps, _MEMORY_STEPS)
                self._followed[bucket] = math.exp(min(1.0, share) * _beyond_noise(total / weight))

    def _sums(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        inputs, outputs = np.zeros((3, 3)), np.zeros(3)
        for bucket, moments in self._buckets.items():
            fading = 0.5 ** ((self._steps - moments.latest) / _HALF_LIFE_STEPS)
            share = max(fading, min(1.0, _LEAST_WEIGHT / moments.weight))
            inputs += share * moments.inputs
            outputs += share * self._followed.get(bucket, 1.0) * moments.outputs
        return inputs, outputs


def _further_steps(before: _Means, after: _Means) -> int:
    """The steps of a bucket since, as far as it remembers them; all, where it began anew."""
    return min(after.steps - before.steps if after.steps >= before.steps else after.steps, _MEMORY_STEPS)


def _largest_slopes(known: Collection[_Means]) -> tuple[float, float]:
    """Seconds per unit of either input that no bucket's mean refutes; infinite for an input that is 0 in all."""
    return (
        min((means.duration_s / means.first for means in known if means.first > 0), default=math.inf),
        min((means.duration_s / means.second for means in known if means.second > 0), default=math.inf),
    )


def _change(before: _Means, after: _Means, line: FittedLine, most: tuple[float, float]) -> float:
    """The logarithm of how much longer steps of a bucket have become beyond what their inputs tell. An input without a
    slope may have any up to `most` of it."""
    old_s, new_s = line.of(before.first, before.second), line.of(after.first, after.second)
    low = high = math.log(new_s / old_s) if old_s > 0 and new_s > 0 else 0.0
    inputs = (line.first_s, before.first, after.first), (line.second_s, before.second, after.second)
    for (slope, old, new), steepest in zip(inputs, most, strict=True):
        if slope == 0 and old > 0 and new > 0:
            part = min(1.0, steepest * old / before.duration_s)
            told = math.log(1 + part * (new / old - 1))
            low, high = low + min(0.0, told), high + max(0.0, told)
    change = math.log(after.duration_s / before.duration_s)
    return change - min(max(change, low), high)


def _beyond_noise(change: float) -> float:
    return math.copysign(max(0.0, min(abs(change), 2 * (abs(change) - _NOISE))), change)


def _telling(inputs: NDArray[np.float64]) -> set[tuple[int, ...]]:
    """The sets of inputs that may have slopes, as columns of `inputs`."""
    means = inputs[0] / inputs[0, 0]
    covariance = inputs / inputs[0, 0] - np.outer(means, means)
    spread = [
        column
        for column in (1, 2)
        if means[column] > 0 and covariance[column, column] > (_MIN_SPREAD * means[column]) ** 2
    ]
    found: set[tuple[int, ...]] = {(column,) for column in spread}
    if len(spread) == 2:
        alike = covariance[1, 2] / np.sqrt(covariance[1, 1] * covariance[2, 2])
        if abs(alike) < _ALIKE:
            found.add((1, 2))
    return found


def _solve(
    inputs: NDArray[np.float64], outputs: NDArray[np.float64], chosen: tuple[int, ...]
) -> FittedLine | None:
    """Base and slopes, solved for these columns; None for a negative slope or a singular system."""
    for columns in ((0, *chosen), chosen):
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
            return FittedLine(*(float(costs.get(column, 0.0)) for column in range(3)))
    return None
