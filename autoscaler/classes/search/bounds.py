"""What the classes that a search has not decided yet can give at best: the bounds of its fractional problem. Pure.

Each is a ladder, a function of straight pieces that is made once for a search: parts of replicas in the order of what
they take for a unit. A search asks for it at each count that it looks at, so no list is sorted or built there.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from autoscaler.classes.search.offer import TINY, ChangeCost, ClassOffer

OfferedPart = tuple[float, float, bool]
"""What a unit costs, so many units, and whether they are not on spot machines."""


class Ladder:
    """A function from 0 on, of straight pieces, flat behind the last."""

    __slots__ = ("_slopes", "_xs", "_ys", "end")

    def __init__(self, steps: Sequence[tuple[float, float]], first: float = 0.0) -> None:
        """`steps`: length and slope of each piece. `first`: the value at 0."""
        self._xs, self._ys, self._slopes = [0.0], [first], list[float]()
        for length, slope in steps:
            self._xs.append(self._xs[-1] + length)
            self._ys.append(self._ys[-1] + length * slope)
            self._slopes.append(slope)
        self._slopes.append(0.0)
        self.end = self._ys[-1]
        """The value behind the last piece."""

    def __call__(self, x: float) -> float:
        """The value at `x`; below 0 that at 0."""
        if x >= self._xs[-1]:
            return self.end
        if x <= 0:
            return self._ys[0]
        at = bisect_right(self._xs, x) - 1
        return self._ys[at] + (x - self._xs[at]) * self._slopes[at]


def _reach(offers: Sequence[ClassOffer], takes: Callable[[ClassOffer], float]) -> Ladder:
    """Units for an amount of what a unit `takes`."""
    free = sum(one.most * one.speed for one in offers if not takes(one))
    paid = sorted((takes(one), one.most * one.speed) for one in offers if takes(one))
    return Ladder([(each * units, 1 / each) for each, units in paid], free)


class Reach:
    """Units that these offers give at most."""

    __slots__ = ("_by_gpus", "_by_money", "_offers", "units")

    def __init__(self, offers: Sequence[ClassOffer]) -> None:
        self._offers = offers
        self.units = sum(one.most * one.speed for one in offers)
        """With any amount of money and GPUs."""
        self._by_money: Ladder | None = None
        self._by_gpus: Ladder | None = None

    def within(self, money: float, gpus: float) -> float:
        """Of so much; infinite: any amount."""
        units = self.units
        if money < math.inf:
            if self._by_money is None:
                self._by_money = _reach(self._offers, lambda one: one.per_unit)
            units = min(units, self._by_money(money + TINY))
        if gpus < math.inf:
            if self._by_gpus is None:
                self._by_gpus = _reach(self._offers, lambda one: one.gpus_per_unit)
            units = min(units, self._by_gpus(gpus + TINY))
        return units


def parts_of(offer: ClassOffer, leans: int, change: ChangeCost, join: float) -> Iterator[OfferedPart]:
    """The parts of an offer, by what another unit of it costs: what runs, and what is to be started; `join` is added
    for each beyond those that lean here."""
    edges = sorted({0, offer.most, *(min(one, offer.most) for one in (leans, offer.running))})
    for begin, end in pairwise(edges):
        time_s = change.payback_s + (change.cold_start_s if begin >= offer.running else 0.0)
        each = offer.price_per_hour * time_s / 3600 + (join if begin >= leans else 0.0)
        yield each / offer.speed, (end - begin) * offer.speed, not offer.spot


class Undecided:
    """What one side can have of these offers at best, and for what."""

    __slots__ = ("_change", "_free", "_joins", "_leans", "_offers", "_parts", "all", "plain")

    def __init__(
        self,
        offers: Sequence[ClassOffer],
        leans: Sequence[int],
        change: ChangeCost,
        joins: Sequence[float],
    ) -> None:
        """`joins`: what each costs that the side does not have."""
        self._offers, self._leans, self._change, self._joins = offers, leans, change, joins
        self.all = Reach(offers)
        self.plain = Reach([one for one in offers if not one.spot])
        """Not on spot machines."""
        self._parts: list[OfferedPart] | None = None
        self._free = Ladder(())

    def least_replicas(self, units: float) -> float:
        """That give so many units, parts of replicas among them."""
        fastest = max((one.speed for one in self._offers if one.most), default=math.inf)
        return max(0.0, units) / fastest

    def least_money(self, units: float, floor: float) -> float:
        """For so many units, `floor` of them not on spot machines; as far as the offers go."""
        if self._parts is None:
            given = zip(self._offers, self._leans, self._joins, strict=True)
            self._parts = sorted(
                part for one, leans, join in given for part in parts_of(one, leans, self._change, join)
            )
            self._free = Ladder([(able, each) for each, able, _ in self._parts])
        if floor <= TINY:
            return self._free(units)
        spent, left = 0.0, units
        rest = list[tuple[float, float]]()
        for each, able, is_plain in self._parts:
            count = min(able, floor) if is_plain and floor > TINY else 0.0
            spent, floor, left = spent + count * each, floor - count, left - count
            rest.append((each, able - count))
        for each, able in rest:
            if left <= TINY:
                break
            count = min(able, left)
            spent, left = spent + count * each, left - count
        return spent
