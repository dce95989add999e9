"""Histograms of durations with fixed bounds; they support addition, subtraction and percentiles."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

LATENCY_BOUNDS_S: tuple[float, ...] = tuple(0.0005 * 1.15**i for i in range(104))
"""0.5 ms to about 15 minutes in steps of 15%, which bounds the relative error of percentiles."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """`counts[i]` values are in (`bounds[i-1]`, `bounds[i]`]; the last count is of values above all bounds.

    `len(counts) == len(bounds) + 1`. Values and bounds in seconds.
    """

    bounds: tuple[float, ...]
    counts: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float], bounds: tuple[float, ...] = LATENCY_BOUNDS_S) -> Histogram:
        """The histogram of these values."""
        counts = [0.0] * (len(bounds) + 1)
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        return cls(bounds, tuple(counts))

    @property
    def total(self) -> float:
        """Number of values."""
        return sum(self.counts)

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(self.bounds, tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)))

    def __sub__(self, earlier: Histogram) -> Histogram:
        """The values since `earlier`. If a count decreased, its process restarted: all values are new."""
        if any(a < b for a, b in zip(self.counts, earlier.counts, strict=True)):
            return self
        return Histogram(self.bounds, tuple(a - b for a, b in zip(self.counts, earlier.counts, strict=True)))

    def percentile(self, percent: float) -> float | None:
        """The value that `percent` of all values do not exceed, interpolated within its bucket; None if empty."""
        total = self.total
        if total <= 0:
            return None
        wanted = total * percent / 100
        for index, count_to_here in enumerate(accumulate(self.counts)):
            if count_to_here >= wanted and self.counts[index] > 0:
                low = self.bounds[index - 1] if index > 0 else 0.0
                high = self.bounds[index] if index < len(self.bounds) else self.bounds[-1]
                inside = (wanted - (count_to_here - self.counts[index])) / self.counts[index]
                return low + (high - low) * inside
        return self.bounds[-1]

    def share_within(self, seconds: float) -> float | None:
        """Share of the values that are at most `seconds`, interpolated within its bucket; None if empty."""
        total = self.total
        if total <= 0:
            return None
        index = bisect_left(self.bounds, seconds)
        count = sum(self.counts[:index])
        if index < len(self.bounds):
            low = self.bounds[index - 1] if index > 0 else 0.0
            count += self.counts[index] * (seconds - low) / (self.bounds[index] - low)
        return count / total


@dataclass(slots=True)
class DurationCounts:
    """A mutable histogram with `LATENCY_BOUNDS_S`; `counts` as in `Histogram`."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Counts one value."""
        self.counts[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def include(self, other: DurationCounts) -> None:
        """Adds all counts of another histogram."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.sum_s += other.sum_s

    @property
    def total(self) -> int:
        """Number of values."""
        return sum(self.counts)
