"""The cheapest mix of neutral workers of several classes, and on which side each leans. Pure.

One worker serves both sides, so both have the same classes, each with a speed of its own there. What runs, and what
there may be of a class, is of both sides together: a worker that changes sides is no start. So both sides are searched
at once, depth first over the classes of one and then of the other, with the bounds of `mix.py` (branch and bound). It
begins with the mixes that each side would have by itself; unless it ends at `MAX_NODES` or `MAX_LOOKS` it is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from autoscaler.classes.mix import (
    MAX_LOOKS,
    MAX_NODES,
    ChangeCost,
    ClassMix,
    ClassOffer,
    MixLack,
    MixRoom,
    affordable,
    cheapest_mix,
    fractional,
    mix_of,
    money_of,
    outwards,
    per_unit,
)

_TINY = 1e-9
JOIN_S = 1.0
"""What it costs that a side gets a worker that it does not have, in seconds of its price, and of a thousandth for those
that are free. So of mixes that cost the same the nearest is wanted."""

Counts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MixSide:
    """What one side is to have. Units are those of its own speeds."""

    offers: tuple[ClassOffer, ...]
    """In one order on both sides. `most` is 0 where a class must not be used on this side; `running` is of both."""
    units: float
    floor: float = 0.0
    leaning: Counts = ()
    """Replicas of each class that lean here now; empty: none."""

    @property
    def leans(self) -> Counts:
        """`leaning`, one entry a class."""
        return self.leaning or (0,) * len(self.offers)


@dataclass(frozen=True, slots=True)
class MixBudget:
    """What both sides may take together; None: any amount."""

    per_hour: float | None = None
    gpus: float | None = None

    @property
    def room(self) -> MixRoom:
        """All of it."""
        money = math.inf if self.per_hour is None else self.per_hour
        return MixRoom(money, math.inf if self.gpus is None else self.gpus)


NO_BUDGET, AT_ONCE = MixBudget(), ChangeCost()


def joint_mix(
    prefill: MixSide, decode: MixSide, budget: MixBudget = NO_BUDGET, change: ChangeCost = AT_ONCE
) -> tuple[ClassMix, ClassMix]:
    """The mixes of both sides that cost least together, with what it takes to come there. Where the classes or the
    budget do not reach so far: those that are short of the least floor, of these of the least units, of these the
    cheapest."""
    search = _JointSearch((prefill, decode), change)
    for seed in _seeds((prefill, decode), budget, change):
        search.take(seed)
    search.visit(0, (_lack(prefill), _lack(decode)), budget.room, 0.0, ())
    most = len(prefill.offers)
    return mix_of(prefill.offers, search.best[:most]), mix_of(decode.offers, search.best[most:])


def _lack(side: MixSide) -> MixLack:
    return MixLack(max(0.0, side.units), max(0.0, side.floor))


def _seeds(sides: tuple[MixSide, MixSide], budget: MixBudget, change: ChangeCost) -> Iterator[Counts]:
    """Each side by itself, the one after the other: of all that runs, and of what leans there."""
    for keeps in (True, False):
        for first in (0, 1):
            found: dict[int, ClassMix] = {}
            room, taken = budget.room, (0,) * len(sides[0].offers)
            for number in (first, 1 - first):
                side = sides[number]
                offers = [
                    replace(
                        one,
                        most=max(0, one.most - other),
                        running=leans if keeps else max(0, one.running - other),
                    )
                    for one, leans, other in zip(side.offers, side.leans, taken, strict=True)
                ]
                money = None if math.isinf(room.money) else max(0.0, room.money)
                gpus = None if math.isinf(room.gpus) else max(0.0, room.gpus)
                mix = cheapest_mix(offers, side.units, money, change, side.floor, gpus)
                found[number], taken = mix, mix.counts
                room = MixRoom(room.money - mix.price_per_hour, room.gpus - mix.gpus)
            yield (*found[0].counts, *found[1].counts)


@dataclass(slots=True)
class _JointSearch:
    """Counts of prefill's classes, then of decode's."""

    sides: tuple[MixSide, MixSide]
    change: ChangeCost
    best: Counts = ()
    _worth: tuple[float, float, float, int] = (math.inf, math.inf, math.inf, 0)
    """Of the best: floor and units that it lacks, money, replicas."""
    _order: tuple[int, ...] = field(init=False)
    """Classes, the cheapest for a unit first; the same on both sides."""
    _nodes: int = 0
    _looks: int = 0

    def __post_init__(self) -> None:
        pairs = list(zip(self.sides[0].offers, self.sides[1].offers, strict=True))
        self._order = tuple(
            sorted(range(len(pairs)), key=lambda each: (min(per_unit(one) for one in pairs[each]), each))
        )

    def visit(
        self, place: int, lacks: tuple[MixLack, MixLack], room: MixRoom, money: float, counts: Counts
    ) -> None:
        """Tries all counts at `place`; `counts` are those of the places before it."""
        if place == 2 * len(self._order):
            self.take(self._as_offered(counts))
            return
        self._nodes += 1
        number, offer, before = self._at(place, counts)
        lack = lacks[number]
        most = lack.most(replace(offer, most=max(0, offer.most - before)), room)
        is_last = place == 2 * len(self._order) - 1
        for count in (most,) if is_last else outwards(lack.first(offer, most), most):
            self._looks += 1
            if self._nodes > MAX_NODES or self._looks > MAX_LOOKS:
                return
            both = money_of(offer, before + count, self.change) - money_of(offer, before, self.change)
            after = lack.less(offer, count)
            rest = (after, lacks[1]) if number == 0 else (lacks[0], after)
            left, spent = room.less(offer, count), money + both
            if self._may_be_better(place + 1, rest, left, spent):
                self.visit(place + 1, rest, left, spent, (*counts, count))

    def take(self, counts: Counts) -> None:
        """Keeps these, in the order of the offers, where they are better."""
        lacks = [_lack(side) for side in self.sides]
        size, money = len(self._order), 0.0
        for index in range(size):
            pair = counts[index], counts[size + index]
            offer = self.sides[0].offers[index]
            money += money_of(offer, sum(pair), self.change)
            money += self._joins(index, pair) * (offer.price_per_hour + 1e-3) * JOIN_S / 3600
            for number, count in enumerate(pair):
                lacks[number] = lacks[number].less(self.sides[number].offers[index], count)
        floor = sum(max(0.0, lack.floor) for lack in lacks)
        short = sum(max(0.0, lack.units) for lack in lacks)
        found = floor, short, money, sum(counts)
        for new, old in zip(found, self._worth, strict=True):
            if new > old + _TINY:
                return
            if new < old - _TINY:
                self.best, self._worth = counts, found
                return

    def _joins(self, index: int, pair: tuple[int, int]) -> int:
        """Workers of one class that a side does not have yet."""
        leans = [side.leans[index] for side in self.sides]
        return sum(max(0, count - there) for count, there in zip(pair, leans, strict=True))

    def _at(self, place: int, counts: Counts) -> tuple[int, ClassOffer, int]:
        """Side and offer of a place, and how many of its class the other side has already."""
        number, which = divmod(place, len(self._order))
        offer = self.sides[number].offers[self._order[which]]
        return number, offer, counts[which] if number else 0

    def _as_offered(self, counts: Counts) -> Counts:
        size = len(self._order)
        found = [0] * (2 * size)
        for which, index in enumerate(self._order):
            found[index], found[size + index] = counts[which], counts[size + which]
        return tuple(found)

    def _may_be_better(self, place: int, lacks: tuple[MixLack, MixLack], room: MixRoom, money: float) -> bool:
        """By what each side could have alone of all that is left: no less than both can have together."""
        floor = short = spent = 0.0
        for number, lack in enumerate(lacks):
            begin = max(0, place - number * len(self._order))
            rest = [self.sides[number].offers[index] for index in self._order[begin:]]
            plain = sum(min(one.most, affordable(one, room)) * one.speed for one in rest if not one.spot)
            floor += max(0.0, lack.floor - plain)
            left, cost = fractional(rest, lack, room)
            short, spent = short + left, spent + cost
        known = self._worth
        if abs(floor - known[0]) > _TINY:
            return floor < known[0]
        if abs(short - known[1]) > _TINY:
            return short < known[1]
        return money + spent * self.change.payback_s / 3600 < known[2] - _TINY


def total_mix(mixes: Sequence[ClassMix], offers: Sequence[ClassOffer]) -> ClassMix:
    """Several mixes of the same classes as one."""
    return mix_of(offers, [sum(counts) for counts in zip(*(mix.counts for mix in mixes), strict=True)])


def class_limits(prefill: Sequence[ClassOffer], decode: Sequence[ClassOffer]) -> Mapping[str, int]:
    """How many there may be of each class on both sides together."""
    pairs = zip(prefill, decode, strict=True)
    return MappingProxyType({one.name: max(one.most, other.most) for one, other in pairs})
