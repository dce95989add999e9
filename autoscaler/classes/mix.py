"""The cheapest mix of replica classes for a capacity. Pure.

Capacity is counted in units: replicas of speed 1. A mix costs its price for the time in which a change must pay, and
the starts that it takes: a replica costs money while it starts, and the one in whose place it comes runs on
meanwhile. So a class that is a little cheaper replaces nothing that runs, and one that is much cheaper does. A part of
the units, the floor, must be of classes that are not on spot machines.

Search: depth first over the classes, the cheapest per unit first (where GPUs bind, that of fewest per unit), the last
class in one step, with the bounds of the fractional problem (branch and bound). It is exact unless it ends at
`MAX_NODES` or `MAX_LOOKS`, beyond some hundred replicas of several classes; the first mix that it finds is then that of
the first class, with the floor by the first that carries it, and what it has is as good or better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autoscaler.classes.replica_class import ReplicaClass

MAX_NODES = 20_000
MAX_LOOKS = 50_000
_TINY = 1e-9


@dataclass(frozen=True, slots=True)
class ClassOffer:
    """A class as it can be had."""

    name: str
    speed: float
    """Units of one replica."""
    price_per_hour: float
    most: int
    """Replicas at most; 0 for a class that must not be used."""
    running: int = 0
    """Replicas that are there or start."""
    spot: bool = False
    """Whether its machines may be taken away: it carries none of the floor."""
    gpus: int = 0
    """GPUs of one replica."""


@dataclass(frozen=True, slots=True)
class ChangeCost:
    """What a change of the mix is weighed against. Times in seconds."""

    payback_s: float = 1800.0
    cold_start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ClassMix:
    """So many replicas of each class, in the order of the offers."""

    counts: tuple[int, ...]
    units: float
    price_per_hour: float
    gpus: int = 0


NOTHING = ClassMix((), 0.0, 0.0)


def offers_of(
    classes: Sequence[ReplicaClass], running: Mapping[str, int] | None = None, gpus_each: int = 0
) -> list[ClassOffer]:
    """All of these classes, by how many run. `gpus_each`: GPUs of a replica whose class says nothing of them."""
    there = running or {}
    return [
        ClassOffer(
            one.name,
            one.speed,
            one.price_per_hour,
            one.max_replicas,
            there.get(one.name, 0),
            one.spot,
            one.gpus_or(gpus_each),
        )
        for one in classes
    ]


def cheapest_mix(
    offers: Sequence[ClassOffer],
    units: float,
    budget_per_hour: float | None = None,
    change: ChangeCost = ChangeCost(),
    floor: float = 0.0,
    gpus: float | None = None,
) -> ClassMix:
    """The mix of at least `units`, `floor` of them not on spot machines, that costs least, with what it takes to come
    there. Where the classes, the budget or `gpus` (None: any number) do not reach so far: the one that is short of the
    least floor, of those the one that is short of the least units, and of those the cheapest."""
    lack = MixLack(max(0.0, units), max(0.0, floor))
    room = MixRoom(math.inf if budget_per_hour is None else budget_per_hour)
    found = _searched(offers, lack, room, change, per_unit)
    if gpus is None or found.gpus <= gpus:
        return found
    return _searched(offers, lack, replace(room, gpus=gpus), change, _gpus_per_unit)


def _searched(
    offers: Sequence[ClassOffer],
    lack: MixLack,
    room: MixRoom,
    change: ChangeCost,
    first: Callable[[ClassOffer], float],
) -> ClassMix:
    """The best mix; where the search ends early one that begins with the classes that come `first`."""
    order = sorted(range(len(offers)), key=lambda index: (first(offers[index]), index))
    search = _Search([offers[index] for index in order], change)
    search.visit(0, lack, room, 0.0, ())
    counts = [0] * len(offers)
    for place, index in enumerate(order):
        counts[index] = search.best[place] if place < len(search.best) else 0
    return mix_of(offers, counts)


def mix_of(offers: Sequence[ClassOffer], counts: Sequence[int]) -> ClassMix:
    """These counts as a mix."""
    pairs = list(zip(offers, counts, strict=True))
    return ClassMix(
        tuple(counts),
        sum(one.speed * count for one, count in pairs),
        sum(one.price_per_hour * count for one, count in pairs),
        sum(one.gpus * count for one, count in pairs),
    )


def leanest_mix(offers: Sequence[ClassOffer], units: float, floor: float = 0.0) -> ClassMix:
    """As `cheapest_mix`, of fewest GPUs, and of those the cheapest."""
    # A price of the order of one hundred thousandth of a GPU decides between equals alone.
    dearest = max((one.price_per_hour for one in offers), default=0.0) or 1.0
    by_gpus = [replace(one, price_per_hour=one.gpus + 1e-5 * one.price_per_hour / dearest) for one in offers]
    return mix_of(offers, cheapest_mix(by_gpus, units, floor=floor).counts)


def without(offers: Sequence[ClassOffer], mix: ClassMix) -> list[ClassOffer]:
    """What can be had beside a mix."""
    return [
        replace(one, most=max(0, one.most - count), running=max(0, one.running - count))
        for one, count in zip(offers, mix.counts, strict=True)
    ]


def money_of(offer: ClassOffer, count: int, change: ChangeCost) -> float:
    """What `count` replicas of a class cost in the time in which a change must pay, starts included."""
    starts = max(0, count - offer.running)
    return offer.price_per_hour * (count * change.payback_s + starts * change.cold_start_s) / 3600


def per_unit(offer: ClassOffer) -> float:
    """The price of a unit of this class for an hour."""
    return offer.price_per_hour / offer.speed


def _gpus_per_unit(offer: ClassOffer) -> float:
    return offer.gpus / offer.speed


@dataclass(frozen=True, slots=True)
class MixLack:
    """Units that a mix is short of; negative: it has more."""

    units: float
    floor: float

    def less(self, offer: ClassOffer, count: float) -> MixLack:
        """With `count` replicas of a class."""
        units = count * offer.speed
        return MixLack(self.units - units, self.floor - (0.0 if offer.spot else units))

    def first(self, offer: ClassOffer, most: int) -> int:
        """The count to try first: what classes on spot machines are for is what is above the floor."""
        if not offer.spot:
            return most
        above = max(0.0, self.units - max(0.0, self.floor))
        return min(most, math.ceil(above / offer.speed - _TINY))

    def most(self, offer: ClassOffer, room: MixRoom) -> int:
        """More of this class alone are too many, or too dear."""
        lacking = self.units if offer.spot else max(self.units, self.floor)
        enough = max(0, math.ceil(lacking / offer.speed - _TINY))
        return int(min(offer.most, enough, affordable(offer, room)))


@dataclass(frozen=True, slots=True)
class MixRoom:
    """What may yet be spent."""

    money: float
    """For an hour."""
    gpus: float = math.inf

    def less(self, offer: ClassOffer, count: int) -> MixRoom:
        """With `count` replicas of a class."""
        return MixRoom(self.money - count * offer.price_per_hour, self.gpus - count * offer.gpus)


@dataclass(slots=True)
class _Search:
    offers: Sequence[ClassOffer]
    change: ChangeCost
    best: tuple[int, ...] = ()
    _short_floor: float = math.inf
    _short: float = math.inf
    """Units that the best mix lacks, of the floor and of all."""
    _money: float = math.inf
    _replicas: int = 0
    _nodes: int = 0
    _looks: int = 0

    def visit(self, place: int, lack: MixLack, room: MixRoom, money: float, counts: tuple[int, ...]) -> None:
        """Tries all counts of the class at `place`."""
        if place == len(self.offers):
            self._take(lack, money, counts)
            return
        self._nodes += 1
        offer = self.offers[place]
        most = lack.most(offer, room)
        is_last = place == len(self.offers) - 1
        for count in (most,) if is_last else outwards(lack.first(offer, most), most):
            spent = money + money_of(offer, count, self.change)
            rest, left = lack.less(offer, count), room.less(offer, count)
            self._looks += 1
            if (self._nodes > MAX_NODES or self._looks > MAX_LOOKS) and self.best:
                return
            if self._may_be_better(place + 1, rest, left, spent):
                self.visit(place + 1, rest, left, spent, (*counts, count))

    def _may_be_better(self, place: int, lack: MixLack, room: MixRoom, money: float) -> bool:
        """By the floor that the rest of the classes can give at most, then by the fractional problem: classes come in
        order of their price per unit."""
        plain = [offer for offer in self.offers[place:] if not offer.spot]
        most = sum(min(float(one.most), affordable(one, room)) * one.speed for one in plain)
        short_floor = max(0.0, lack.floor - most)
        if short_floor < self._short_floor - _TINY:
            return True
        if short_floor > self._short_floor + _TINY:
            return False
        left, spent = fractional(self.offers[place:], lack, room)
        left = max(left, lack.units - self._most_units(place, room.gpus))
        add = spent * self.change.payback_s / 3600
        if left > self._short + _TINY:
            return False
        return left < self._short - _TINY or money + add < self._money - _TINY

    def _most_units(self, place: int, gpus: float) -> float:
        """What the rest of the classes give on so many GPUs, if there were parts of replicas."""
        if math.isinf(gpus):
            return math.inf
        units = 0.0
        for offer in sorted(self.offers[place:], key=_gpus_per_unit):
            count = min(float(offer.most), gpus / offer.gpus if offer.gpus else math.inf)
            units, gpus = units + count * offer.speed, max(0.0, gpus - count * offer.gpus)
        return units

    def _take(self, lack: MixLack, money: float, counts: tuple[int, ...]) -> None:
        short_floor, short = max(0.0, lack.floor), max(0.0, lack.units)
        found = (short_floor, short, money, sum(counts))
        known = (self._short_floor, self._short, self._money, self._replicas)
        for new, old in zip(found, known, strict=True):
            if new > old + _TINY:
                return
            if new < old - _TINY:
                self.best, self._short_floor, self._short = counts, short_floor, short
                self._money, self._replicas = money, sum(counts)
                return


def fractional(rest: Sequence[ClassOffer], lack: MixLack, room: MixRoom) -> tuple[float, float]:
    """Units that these classes cannot give, and what the others cost an hour, if there were parts of replicas: first
    the floor by those that carry it, then the rest by all. Each class may have all GPUs."""
    left, spent = lack.units, 0.0
    by_price = sorted(rest, key=per_unit)
    free = [float(offer.most) for offer in by_price]
    for of_floor in (True, False):
        wanted = lack.floor if of_floor else left
        for each, offer in enumerate(by_price):
            if wanted <= _TINY or (of_floor and offer.spot):
                continue
            able = affordable(offer, MixRoom(room.money - spent, room.gpus))
            count = min(free[each], wanted / offer.speed, able)
            free[each] -= count
            wanted, left = wanted - count * offer.speed, left - count * offer.speed
            spent += count * offer.price_per_hour
    return max(0.0, left), spent


def outwards(first: int, most: int) -> Iterator[int]:
    """All from 0 to `most`, those next to `first` first."""
    yield first
    for away in range(1, most + 1):
        if first - away >= 0:
            yield first - away
        if first + away <= most:
            yield first + away


def affordable(offer: ClassOffer, room: MixRoom) -> float:
    """Replicas of this class, and parts of one, that there is room for."""
    by_money = max(0.0, room.money + _TINY) / offer.price_per_hour if offer.price_per_hour else math.inf
    return min(by_money, max(0.0, room.gpus + _TINY) / offer.gpus if offer.gpus else math.inf)
