"""The cheapest mix of neutral workers of several classes, and on which side each leans. Pure.

One worker serves both sides, so both have the same classes, each with a speed of its own there. What runs, and what
there may be of a class, is of both sides together: a worker that changes sides is no start. So both sides are searched
at once. The search begins with the mixes that each side would have by itself; it is exact unless it ends early.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from autoscaler.classes.mix import cheapest_mix
from autoscaler.classes.search.mix_search import MixSearch
from autoscaler.classes.search.offer import (
    AT_ONCE,
    ChangeCost,
    ClassMix,
    ClassOffer,
    Counts,
    MixRoom,
    MixSide,
    mix_of,
)

JOIN_S = 1.0
"""What it costs that a side gets a worker that it does not have, in seconds of its price. So of mixes that cost the
same the nearest is wanted."""


@dataclass(frozen=True, slots=True)
class MixBudget:
    """What both sides may take together; None: any amount."""

    per_hour: float | None = None
    gpus: float | None = None
    kinds: Mapping[str, float] = field(default_factory=dict)
    """GPUs of a kind, by the name of its limit."""

    @property
    def room(self) -> MixRoom:
        """All of it."""
        money = math.inf if self.per_hour is None else self.per_hour
        return MixRoom(money, math.inf if self.gpus is None else self.gpus, self.kinds)


NO_BUDGET = MixBudget()


def joint_mix(
    prefill: MixSide, decode: MixSide, budget: MixBudget = NO_BUDGET, change: ChangeCost = AT_ONCE
) -> tuple[ClassMix, ClassMix]:
    """The mixes of both sides that cost least together, with what it takes to come there. Where the classes or the
    budget do not reach so far: those that are short of the least floor, of these of the least units, of these the
    cheapest."""
    sides, pairs = (prefill, decode), list(zip(prefill.offers, decode.offers, strict=True))
    order = sorted(range(len(pairs)), key=lambda each: (min(one.per_unit for one in pairs[each]), each))
    search = MixSearch(sides, order, change, JOIN_S)
    best, most = search.run(budget.room, list(_seeds(sides, budget, change))), len(pairs)
    return mix_of(prefill.offers, best[:most]), mix_of(decode.offers, best[most:])


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
                mix = cheapest_mix(offers, side.units, money, change, side.floor, gpus, room.kinds)
                found[number], taken = mix, mix.counts
                for one, count in zip(offers, mix.counts, strict=True):
                    room = room.less(one, count)
            yield (*found[0].counts, *found[1].counts)


def total_mix(mixes: Sequence[ClassMix], offers: Sequence[ClassOffer]) -> ClassMix:
    """Several mixes of the same classes as one."""
    return mix_of(offers, [sum(counts) for counts in zip(*(mix.counts for mix in mixes), strict=True)])


def class_limits(prefill: Sequence[ClassOffer], decode: Sequence[ClassOffer]) -> Mapping[str, int]:
    """How many there may be of each class on both sides together."""
    pairs = zip(prefill, decode, strict=True)
    return MappingProxyType({one.name: max(one.most, other.most) for one, other in pairs})
