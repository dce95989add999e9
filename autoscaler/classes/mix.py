"""The cheapest mix of replica classes for a capacity. Pure.

Capacity is counted in units: replicas of speed 1. A mix costs its price for the time in which a change must pay, and
the starts that it takes: a replica costs money while it starts, and the one in whose place it comes runs on
meanwhile. So a class that is a little cheaper replaces nothing that runs, and one that is much cheaper does. A part of
the units, the floor, must be of classes that are not on spot machines.

The search (`search/mix_search.py`) begins with the cheapest class per unit, where GPUs bind with that of fewest per
unit. It is exact unless it ends early, beyond some hundred replicas of several classes: what it has then is as good as
all of the first class, with the floor by the first that carries it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from autoscaler.classes.search.mix_search import MixSearch
from autoscaler.classes.search.offer import (
    AT_ONCE,
    ChangeCost,
    ClassMix,
    ClassOffer,
    MixRoom,
    MixSide,
    mix_of,
)


def cheapest_mix(
    offers: Sequence[ClassOffer],
    units: float,
    budget_per_hour: float | None = None,
    change: ChangeCost = AT_ONCE,
    floor: float = 0.0,
    gpus: float | None = None,
    kinds: Mapping[str, float] = MappingProxyType({}),
) -> ClassMix:
    """The mix of at least `units`, `floor` of them not on spot machines, that costs least, with what it takes to come
    there. Where the classes, the budget, `gpus` (None: any number) or GPUs of limited `kinds` do not reach so far: the
    one that is short of the least floor, of those the one that is short of the least units, and of those the
    cheapest."""
    side = MixSide(tuple(offers), units, floor)
    money = math.inf if budget_per_hour is None else budget_per_hour
    found = _searched(side, MixRoom(money), change, lambda one: one.per_unit)
    room = MixRoom(money, math.inf if gpus is None else gpus, kinds)
    if not room.lacks_for(side.offers, found.counts):
        return found
    return _searched(side, room, change, lambda one: one.gpus_per_unit)


def _searched(
    side: MixSide, room: MixRoom, change: ChangeCost, first: Callable[[ClassOffer], float]
) -> ClassMix:
    """The best mix; where the search ends early one that begins with the classes that come `first`."""
    order = sorted(range(len(side.offers)), key=lambda index: (first(side.offers[index]), index))
    return mix_of(side.offers, MixSearch((side,), order, change).run(room))


def leanest_mix(offers: Sequence[ClassOffer], units: float, floor: float = 0.0) -> ClassMix:
    """As `cheapest_mix`, of fewest GPUs, and of those the cheapest."""
    # A price of the order of one hundred thousandth of a GPU decides between equals alone.
    dearest = max((one.price_per_hour for one in offers), default=0.0) or 1.0
    by_gpus = [replace(one, price_per_hour=one.gpus + 1e-5 * one.price_per_hour / dearest) for one in offers]
    return mix_of(offers, cheapest_mix(by_gpus, units, floor=floor).counts)
