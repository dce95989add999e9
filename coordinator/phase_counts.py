"""Durations counted into buckets, one histogram a phase. Cheap to add to, cheap to copy out."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TypeAlias

from splitserve.latency_bounds import LATENCY_BOUNDS_S
from splitserve.v1 import scaling_pb2

Phase: TypeAlias = scaling_pb2.Phase.ValueType
PHASES: tuple[Phase, ...] = tuple(value for value in scaling_pb2.Phase.values() if value)
"""All phases, in order of the enum."""


def _no_counts() -> list[int]:
    return [0] * (len(LATENCY_BOUNDS_S) + 1)


@dataclass(slots=True)
class DurationCounts:
    """`counts[i]` values lie in (`LATENCY_BOUNDS_S[i-1]`, `LATENCY_BOUNDS_S[i]`]; the last are above all bounds."""

    counts: list[int] = field(default_factory=_no_counts)
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Counts one value."""
        self.counts[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    @property
    def total(self) -> int:
        """How many values."""
        return sum(self.counts)


@dataclass(slots=True)
class PhaseCounts:
    """One phase. Cold samples are counted apart: autoscaling leaves them out, clients saw them all the same."""

    warm: DurationCounts = field(default_factory=DurationCounts)
    cold: DurationCounts = field(default_factory=DurationCounts)

    def add(self, seconds: float, *, cold: bool) -> None:
        """Counts one value."""
        (self.cold if cold else self.warm).add(seconds)
