"""Shares, their intervals over seeds, paired differences and goodput. Pure.

Seeds are the independent samples: requests of one run share its queue, so that an interval over them would be far too
narrow. Intervals are percentile bootstraps over seeds (Efron and Tibshirani 1993, chapter 13).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Literal

DRAWS = 4000
TAILS = (0.025, 0.975)


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95% interval over seeds; no bounds from one seed, which tells nothing of others."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class GoodputRate:
    """The highest rate with the wanted share attained.

    `rate`: between two tried rates, interpolated linearly between the last one that attains it and the next one, which
    does not; later rates that attain it again do not count. `tried`: that last one itself. `bound` `at least`: every
    tried rate attains it, and both are the highest. `below`: the lowest does not, `rate` is the lowest and `tried` 0.
    """

    rate: float
    tried: float
    bound: Literal["between", "at least", "below"]


def bootstrap(seeds: int, figure: Callable[[Sequence[int]], float]) -> Estimate:
    """`figure` of all seeds, given as their numbers, and of DRAWS samples of as many with replacement."""
    value = figure(range(seeds))
    if seeds < 2:
        return Estimate(value, None, None)
    chance = random.Random(seeds)
    drawn = sorted(figure(chance.choices(range(seeds), k=seeds)) for _ in range(DRAWS))
    low, high = (drawn[round(tail * (DRAWS - 1))] for tail in TAILS)
    return Estimate(value, low, high)


def mean_over_seeds(shares: Sequence[float]) -> Estimate:
    """The mean of one share a seed. Every seed weighs the same."""
    return bootstrap(len(shares), lambda picked: fmean(shares[n] for n in picked))


def difference(own: Sequence[float], others: Sequence[Sequence[float]]) -> Estimate:
    """own less the best of the others, by their means over the same seeds; all sequences have one share a seed."""

    def figure(picked: Sequence[int]) -> float:
        means = [fmean(shares[n] for n in picked) for shares in (own, *others)]
        return means[0] - max(means[1:])

    if any(len(other) != len(own) for other in others):
        raise ValueError("a paired difference needs the same seeds of all")
    return bootstrap(len(own), figure)


def goodput(attained: Mapping[float, float], wanted: float = 0.9) -> GoodputRate:
    """The highest rate that attains the wanted share. Raises ValueError where there is no rate."""
    if not attained:
        raise ValueError("no rate was tried")
    rates = sorted(attained)
    if attained[rates[0]] < wanted:
        return GoodputRate(rates[0], 0.0, "below")
    for lower, upper in pairwise(rates):
        if attained[upper] < wanted:
            share = (attained[lower] - wanted) / (attained[lower] - attained[upper])
            return GoodputRate(lower + share * (upper - lower), lower, "between")
    return GoodputRate(rates[-1], rates[-1], "at least")


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least this share of them does not exceed; None where there are none."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else None
