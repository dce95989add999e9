"""Histograms of durations, as counts between fixed bounds. They add, subtract and give percentiles."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from splitserve.latency_bounds import LATENCY_BOUNDS_S

__all__ = ["LATENCY_BOUNDS_S", "Histogram"]


@dataclass(frozen=True, slots=True)
class Histogram:
    """`counts[i]` values lie in (`bounds[i-1]`, `bounds[i]`]; the last count is of those above all bounds.

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
        """How many values."""
        return sum(self.counts)

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(self.bounds, tuple(a + b for a, b in zip(self.counts, other.counts, strict=True)))

    def __sub__(self, earlier: Histogram) -> Histogram:
        """What came since `earlier`. A counter that went back (its process restarted) counts from zero."""
        if any(a < b for a, b in zip(self.counts, earlier.counts, strict=True)):
            return self
        return Histogram(self.bounds, tuple(a - b for a, b in zip(self.counts, earlier.counts, strict=True)))

    def percentile(self, percent: float) -> float | None:
        """The value that `percent` of all do not exceed, linear inside its bucket; None without values."""
        total = self.total
        if total <= 0:
            return None
        wanted = total * percent / 100
        for index, reached in enumerate(accumulate(self.counts)):
            if reached >= wanted and self.counts[index] > 0:
                low = self.bounds[index - 1] if index > 0 else 0.0
                high = self.bounds[index] if index < len(self.bounds) else self.bounds[-1]
                inside = (wanted - (reached - self.counts[index])) / self.counts[index]
                return low + (high - low) * inside
        return self.bounds[-1]

    def share_within(self, limit: float) -> float | None:
        """The share of values of at most `limit`, linear inside a bucket; None without values."""
        total = self.total
        if total <= 0:
            return None
        index = bisect_left(self.bounds, limit)
        below = sum(self.counts[:index])
        if index < len(self.bounds):
            low = self.bounds[index - 1] if index > 0 else 0.0
            below += self.counts[index] * (limit - low) / (self.bounds[index] - low)
        return min(1.0, below / total)
