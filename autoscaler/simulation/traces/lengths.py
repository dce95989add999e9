"""Lengths of prompts or answers: one number, or a distribution through given percentiles."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

from autoscaler.simulation.traces.trace import Trace, TraceRequest
from splitserve.errors import InvalidArgumentError

MOST_TOKENS = 1_000_000
_NORMAL = NormalDist()
_TAIL_Z = _NORMAL.inv_cdf(0.999)
"""Where a distribution ends on either side: one request in a thousand would be longer."""


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Points (quantile as standard normal z, logarithm of the length), rising; between them and up to the 0.1st and
    99.9th percentile the logarithm goes on straight. Two points are a log-normal distribution, one is a fixed length.
    """

    points: Sequence[tuple[float, float]]

    @classmethod
    def parse(cls, name: str, text: str) -> LengthDistribution:
        """From `1200`, or `p50=800,p95=4000`. Raises InvalidArgumentError naming `name`."""
        pairs = [part.strip().partition("=") for part in text.split(",")]
        if len(pairs) == 1 and not pairs[0][1]:
            return cls([(0.0, math.log(_tokens(name, pairs[0][0])))])
        points = []
        for percentile, _, tokens in pairs:
            points.append((_NORMAL.inv_cdf(_share(name, percentile)), math.log(_tokens(name, tokens))))
        points.sort()
        if any(b[0] == a[0] or b[1] < a[1] for a, b in pairwise(points)):
            message = (
                f"{name}: percentiles must differ, and lengths may not fall from one to the next: {text!r}"
            )
            raise InvalidArgumentError(message, field=name)
        return cls(points)

    def sample(self, chance: random.Random) -> int:
        """A length, tokens."""
        if len(self.points) == 1:
            return round(math.exp(self.points[0][1]))
        z = max(-_TAIL_Z, min(_TAIL_Z, chance.gauss(0, 1)))
        left, right = self.points[0], self.points[1]
        for left, right in pairwise(self.points):  # noqa: B007 - the last ones are used after the loop
            if z <= right[0]:
                break
        slope = (right[1] - left[1]) / (right[0] - left[0])
        return max(1, min(MOST_TOKENS, round(math.exp(left[1] + slope * (z - left[0])))))


def steady(
    rate: float, duration_s: float, prompts: LengthDistribution, outputs: LengthDistribution, seed: int
) -> Trace:
    """Poisson arrivals at `rate` a second. The same for the same seed."""
    chance = random.Random(seed)
    requests, now_s = [], 0.0
    while (now_s := now_s + chance.expovariate(rate)) < duration_s:
        requests.append(TraceRequest(now_s, prompts.sample(chance), outputs.sample(chance)))
    return Trace(f"{rate:g} requests/s", requests)


def _tokens(name: str, text: str) -> int:
    try:
        tokens = int(text)
    except ValueError:
        tokens = 0
    if not 1 <= tokens <= MOST_TOKENS:
        message = f"{name}: a length must be a whole number of 1..{MOST_TOKENS} tokens, not {text!r}"
        raise InvalidArgumentError(message, field=name)
    return tokens


def _share(name: str, text: str) -> float:
    try:
        percentile = float(text.removeprefix("p")) if text.startswith("p") else math.nan
    except ValueError:
        percentile = math.nan
    if not 0 < percentile < 100:
        message = f"{name}: expected a number or percentiles as p50=800,p95=4000, not {text!r}"
        raise InvalidArgumentError(message, field=name)
    return percentile / 100
