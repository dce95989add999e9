"""Classes as they can be had, and mixes of them. Pure, plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoscaler.classes.replica_class import ReplicaClass

Counts = tuple[int, ...]
"""Replicas, one entry a class."""


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
    kinds: tuple[str, ...] = ()
    """Limits by kind that they count in."""

    @property
    def per_unit(self) -> float:
        """The price of a unit of this class for an hour."""
        return self.price_per_hour / self.speed

    @property
    def gpus_per_unit(self) -> float:
        """GPUs that a unit of this class takes."""
        return self.gpus / self.speed


@dataclass(frozen=True, slots=True)
class ChangeCost:
    """What a change of the mix is weighed against. Times in seconds."""

    payback_s: float = 1800.0
    cold_start_s: float = 0.0


AT_ONCE = ChangeCost()


@dataclass(frozen=True, slots=True)
class ClassMix:
    """So many replicas of each class, in the order of the offers."""

    counts: Counts
    units: float
    price_per_hour: float
    gpus: int = 0


NOTHING = ClassMix((), 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class MixSide:
    """What one side is to have: a pool, or one of the two between which neutral workers change. Units are those of its
    own speeds."""

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
class MixRoom:
    """What may yet be taken."""

    money: float = math.inf
    """For an hour."""
    gpus: float = math.inf
    kinds: Mapping[str, float] = field(default_factory=dict)
    """GPUs of a kind, by the name of its limit."""

    def less(self, offer: ClassOffer, count: int) -> MixRoom:
        """With `count` replicas of a class."""
        gpus, kinds = count * offer.gpus, self.kinds
        if kinds and gpus and offer.kinds:
            kinds = {name: left - (gpus if name in offer.kinds else 0) for name, left in kinds.items()}
        return MixRoom(self.money - count * offer.price_per_hour, self.gpus - gpus, kinds)

    def holds(self, offer: ClassOffer) -> float:
        """Replicas of this class, and parts of one, that there is room for."""
        room = math.inf
        if offer.price_per_hour:
            room = max(0.0, self.money + TINY) / offer.price_per_hour
        if not offer.gpus:
            return room
        for left in (self.gpus, *(self.kinds.get(name, math.inf) for name in offer.kinds)):
            room = min(room, max(0.0, left + TINY) / offer.gpus)
        return room

    def lacks_for(self, offers: Sequence[ClassOffer], counts: Counts) -> bool:
        """Whether so many of each take more GPUs than there are, of any kind or of one."""
        pairs = list(zip(offers, counts, strict=True))
        of_kinds = {
            name: sum(one.gpus * count for one, count in pairs if name in one.kinds) for name in self.kinds
        }
        over = any(of_kinds[name] > left + TINY for name, left in self.kinds.items())
        return over or sum(one.gpus * count for one, count in pairs) > self.gpus


TINY = 1e-9


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


def mix_of(offers: Sequence[ClassOffer], counts: Sequence[int]) -> ClassMix:
    """These counts as a mix."""
    pairs = list(zip(offers, counts, strict=True))
    return ClassMix(
        tuple(counts),
        sum(one.speed * count for one, count in pairs),
        sum(one.price_per_hour * count for one, count in pairs),
        sum(one.gpus * count for one, count in pairs),
    )


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
