"""How long simulated replicas take to start, and which never come up. By seed, and the same for every policy."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

from splitserve.errors import InvalidArgumentError

_P95_Z = NormalDist().inv_cdf(0.95)


@dataclass(frozen=True, slots=True)
class DrawnStart:
    """What becomes of one order."""

    took_s: float
    """From the order until the replica is ready, or until its process ends."""
    fails: bool = False


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Log-normal: above 0, skewed to the right as the pulls and loads that it sums up are, and given by two
    percentiles. The n-th replica of a pool draws the same time under every policy.

    A failed start takes its time like any other and then ends instead of becoming ready, as a worker that finds too
    little memory once its weights are loaded.
    """

    median_s: float = 60.0
    p95_s: float | None = None
    """None: all take `median_s`."""
    failing: float = 0.0
    """Share of starts that fail."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.median_s) and self.median_s >= 0):
            raise InvalidArgumentError(
                f"cold_start must be at least 0, not {self.median_s:g}", field="cold_start"
            )
        if self.p95_s is not None and not (math.isfinite(self.p95_s) and self.p95_s >= self.median_s > 0):
            message = (
                f"cold_start_p95 must be at least the median, which must be above 0 ({self.median_s:g}),"
                f" not {self.p95_s:g}"
            )
            raise InvalidArgumentError(message, field="cold_start_p95")
        if not 0 <= self.failing < 1:
            raise InvalidArgumentError(
                f"failed_starts must be at least 0 and below 1, not {self.failing:g}", field="failed_starts"
            )

    @property
    def spread(self) -> float:
        """Standard deviation of the logarithm."""
        return 0.0 if self.p95_s is None else math.log(self.p95_s / self.median_s) / _P95_Z

    @property
    def mean_s(self) -> float:
        """Mean time of a start, seconds."""
        return self.median_s * math.exp(self.spread**2 / 2)

    def of(self, name: str) -> DrawnStart:
        """The start of the replica of this name."""
        if not self.spread and not self.failing:
            return DrawnStart(self.median_s)
        chance = random.Random(f"{self.seed} {name}")
        took_s = self.median_s * math.exp(chance.gauss(0.0, self.spread))
        return DrawnStart(took_s, chance.random() < self.failing)

    def __str__(self) -> str:
        text = f"{self.median_s:g} s"
        if self.p95_s is not None:
            text += f", p95 {self.p95_s:g} s"
        return f"{text}, {self.failing:.0%} fail" if self.failing else text
