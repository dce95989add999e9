"""Branch and bound over the counts of classes, of one side or of both sides of neutral workers. Pure.

Depth first over the classes, in a given order, of one side and then of the other, the last class in one step. What
cannot be better than what is known by the bounds of the fractional problem (`bounds.py`) is not looked at. It is exact
unless it ends at `MAX_NODES` or `MAX_LOOKS`; what it has then is as good as the first mix that it finds, or as what it
was told to begin with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autoscaler.classes.search.bounds import Reach, Undecided
from autoscaler.classes.search.offer import TINY, ChangeCost, ClassOffer, Counts, MixRoom, MixSide

MAX_NODES = 20_000
MAX_LOOKS = 50_000


class MixSearch:
    """Counts of the first side's classes, then of the second's."""

    def __init__(
        self, sides: Sequence[MixSide], order: Sequence[int], change: ChangeCost, join_s: float = 0.0
    ) -> None:
        """`order`: places of the offers, those to try first before the others; the same on all sides. `join_s`: what it
        costs that a side gets a worker that it does not have, in seconds of its price, and of a thousandth for those
        that are free."""
        self.best: Counts = ()
        """In the order of the offers."""
        self.looks = 0
        """Counts that were looked at."""
        self._sides, self._order, self._change, self._join_s = sides, order, change, join_s
        self._offers = [[side.offers[index] for index in order] for side in sides]
        self._leans = [[side.leans[index] for index in order] for side in sides]
        self._worth: tuple[float, float, float, int] = (math.inf, math.inf, math.inf, 0)
        """Of the best: floor and units that it lacks, money, replicas."""
        self._nodes = 0
        self._bounds = [
            [self._undecided(side, at) for at in range(len(order) + 1)] for side in range(len(sides))
        ]
        """By side, then by how many of its classes are decided."""
        later = [one for offers in self._offers[1:] for one in offers]
        self._together = [Reach([*self._offers[0][at:], *later]) for at in range(len(order) + 1)]
        """Of all sides together, while the first is decided."""
        self._later = [
            [(side, self._bounds[after][0]) for after, side in enumerate(sides) if after > number]
            for number in range(len(sides))
        ]
        """Sides that come after another, with all their classes."""

    def run(self, room: MixRoom, seeds: Sequence[Counts] = ()) -> Counts:
        """The best counts within `room`, in the order of the offers."""
        for seed in seeds:
            self._take(seed)
        first = self._sides[0]
        self._visit(0, max(0.0, first.units), max(0.0, first.floor), (0.0, 0.0), room, 0.0, ())
        return self.best

    def _visit(
        self,
        place: int,
        units: float,
        floor: float,
        short: tuple[float, float],
        room: MixRoom,
        money: float,
        counts: Counts,
    ) -> None:
        """Tries all counts at `place`. `units` and `floor` are what its side lacks, `short` what the sides before it
        lack of units and of floors."""
        size = len(self._order)
        number, which = divmod(place, size) if size else (len(self._sides), 0)
        if which == 0 and place:
            short = short[0] + max(0.0, units), short[1] + max(0.0, floor)
            if number < len(self._sides):
                units, floor = max(0.0, self._sides[number].units), max(0.0, self._sides[number].floor)
        if number == len(self._sides):
            self._take(self._as_offered(counts))
            return
        self._nodes += 1
        offer, before = self._offers[number][which], counts[which] if number else 0
        lacking = units if offer.spot else max(units, floor)
        enough = max(0, math.ceil(lacking / offer.speed - TINY))
        most = int(min(offer.most - before, enough, room.holds(offer))) if offer.most > before else 0
        is_last = number == len(self._sides) - 1 and which == size - 1
        for count in (most,) if is_last else _outwards(_first(offer, units, floor, most), most):
            self.looks += 1
            if (self._nodes > MAX_NODES or self.looks > MAX_LOOKS) and self.best:
                return
            given = count * offer.speed
            rest = units - given, floor if offer.spot else floor - given
            left = room.less(offer, count)
            spent = money + self._money(number, which, before, count)
            if self._may_be_better(number, which + 1, *rest, short, left, spent, sum(counts) + count):
                self._visit(place + 1, *rest, short, left, spent, (*counts, count))

    def _may_be_better(
        self,
        number: int,
        which: int,
        units: float,
        floor: float,
        short: tuple[float, float],
        room: MixRoom,
        money: float,
        replicas: float,
    ) -> bool:
        """By floors and units that are lacking at the least, and the least money and replicas; `which` classes of side
        `number` are decided."""
        known_floor, known_short, known_money, known_replicas = self._worth
        here, cash, gpus = self._bounds[number][which], room.money, room.gpus
        later = self._later[number]
        lacks_floor = short[1] + max(0.0, floor - here.plain.within(cash, gpus))
        lacks = short[0] + max(0.0, units - here.all.within(cash, gpus))
        for side, bounds in later:
            lacks_floor += max(0.0, side.floor - bounds.plain.within(cash, gpus))
            lacks += max(0.0, side.units - bounds.all.within(cash, gpus))
        if abs(lacks_floor - known_floor) > TINY:
            return lacks_floor < known_floor
        if later:
            wanted = max(0.0, units) + sum(max(0.0, side.units) for side, _ in later)
            lacks = max(lacks, short[0] + wanted - self._together[which].within(cash, gpus))
        if abs(lacks - known_short) > TINY:
            return lacks < known_short
        # What the best lacks, this may lack on whatever side.
        allowed, allowed_floor = known_short - short[0], known_floor - short[1]
        money += here.least_money(units - allowed, floor - allowed_floor)
        for side, bounds in later:
            money += bounds.least_money(side.units - allowed, side.floor - allowed_floor)
        if abs(money - known_money) > TINY:
            return money < known_money
        replicas += here.least_replicas(units - allowed)
        replicas += sum(bounds.least_replicas(side.units - allowed) for side, bounds in later)
        return replicas < known_replicas - TINY

    def _take(self, counts: Counts) -> None:
        """Keeps these, in the order of the offers, where they are better."""
        size, money = len(self._order), 0.0
        lacks_floor = lacks = 0.0
        taken = [0] * size
        for number, side in enumerate(self._sides):
            units, floor = max(0.0, side.units), max(0.0, side.floor)
            for which, index in enumerate(self._order):
                count, offer = counts[number * size + index], side.offers[index]
                money += self._money(number, which, taken[which], count)
                taken[which] += count
                units -= count * offer.speed
                floor -= 0.0 if offer.spot else count * offer.speed
            lacks, lacks_floor = lacks + max(0.0, units), lacks_floor + max(0.0, floor)
        found = lacks_floor, lacks, money, sum(counts)
        for new, old in zip(found, self._worth, strict=True):
            if new > old + TINY:
                return
            if new < old - TINY:
                self.best, self._worth = counts, found
                return

    def _money(self, number: int, which: int, before: int, count: int) -> float:
        """What `count` replicas cost here in the time in which a change must pay, starts included; `before` of their
        class are on the side before."""
        offer, change = self._offers[number][which], self._change
        starts = max(0, count - max(0, offer.running - before))
        money = offer.price_per_hour * (count * change.payback_s + starts * change.cold_start_s) / 3600
        joins = count - self._leans[number][which]
        return money + joins * self._join(offer) if joins > 0 else money

    def _join(self, offer: ClassOffer) -> float:
        """What it costs that a side gets a worker that it does not have."""
        return (offer.price_per_hour + 1e-3) * self._join_s / 3600

    def _undecided(self, number: int, begin: int) -> Undecided:
        """Of the offers of a side from one on."""
        offers = self._offers[number][begin:]
        joins = [self._join(one) for one in offers]
        return Undecided(offers, self._leans[number][begin:], self._change, joins)

    def _as_offered(self, counts: Counts) -> Counts:
        size = len(self._order)
        found = [0] * (len(self._sides) * size)
        for number in range(len(self._sides)):
            for which, index in enumerate(self._order):
                found[number * size + index] = counts[number * size + which]
        return tuple(found)


def _first(offer: ClassOffer, units: float, floor: float, most: int) -> int:
    """The count to try first: what classes on spot machines are for is what is above the floor."""
    if not offer.spot:
        return most
    above = max(0.0, units - max(0.0, floor))
    return min(most, math.ceil(above / offer.speed - TINY))


def _outwards(first: int, most: int) -> Iterator[int]:
    """All from 0 to `most`, those next to `first` first."""
    yield first
    for away in range(1, most + 1):
        if first - away >= 0:
            yield first - away
        if first + away <= most:
            yield first + away
