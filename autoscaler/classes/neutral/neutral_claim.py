"""What neutral workers of several classes claim where several models share a limit: one claim for both sides. Pure.

A worker that changes sides stays the model's: two claims would let another model take it in between. So the ladder goes
up on both sides, a step where it saves most of what is predicted, and each rung is a capacity for both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from autoscaler.classes.class_demand import ClassedDemand, at_most, fewer_of
from autoscaler.classes.mix import leanest_mix
from autoscaler.classes.neutral.joint_mix import class_limits, joint_mix, total_mix
from autoscaler.classes.search.offer import ClassMix, MixSide
from autoscaler.plan import Proposals
from autoscaler.sharing.claims.shares import (
    GPUS,
    Claim,
    ClassOfClaim,
    Rung,
    Uses,
    climbed_alone,
    kinds_in,
    of_class,
)
from autoscaler.snapshot import Snapshot

NEUTRAL = "neutral"
"""Both sides, where an account has the names of pools."""
Sides = tuple[float, float]
"""Units of prefill and of decode."""


@dataclass(frozen=True, slots=True)
class NeutralClaim:
    """The claim, and what each of its rungs is for."""

    claim: Claim
    sides: tuple[Sides, ...]


def neutral_claim(
    wanted: Sequence[ClassedDemand],
    proposals: Proposals,
    units: Snapshot,
    limited: Mapping[str, int],
    limits: Uses,
) -> NeutralClaim:
    """Of both sides, prefill first. `units` is the snapshot in units, `limited` the classes that several models share,
    and `limits` all that they do."""
    alone = [one.claim(proposals.pool(one.name), units, counted=limits) for one in wanted]
    mixes, found = _Mixes(wanted), dict[tuple[tuple[int, ...], tuple[int, ...]], ClassMix]()
    path = climbed_alone(alone, limits)
    names = wanted[0].scarce(limited, limits)
    for at in path:
        sides = alone[0].rungs[at[0]].units, alone[1].rungs[at[1]].units
        best = mixes.steady(sides)
        found.setdefault((at, best.counts), best)
        for most in fewer_of(names, math.ceil(sum(sides)) if at == path[-1] else 0):
            if mixes.carry(sides, most):
                mix = mixes.steady(sides, most)
                found.setdefault((at, mix.counts), mix)
        if (GPUS in limits or kinds_in(limits)) and (lean := mixes.leanest(sides)) is not None:
            found.setdefault((at, lean.counts), lean)
    order = sorted(found, key=lambda one: (sum(one[0]), found[one].price_per_hour))
    rungs, sides_of = list[Rung](), list[Sides]()
    for at, counts in order:
        prefill, decode = alone[0].rungs[at[0]], alone[1].rungs[at[1]]
        rungs.append(
            Rung(
                prefill.units + decode.units,
                wanted[0].shared_uses(found[at, counts], limits),
                (prefill.attainment + decode.attainment) / 2,
                (prefill.served + decode.served) / 2,
            )
        )
        sides_of.append((prefill.units, decode.units))
    # Both sides count, so that a loss is that of two claims.
    claim = Claim(tuple(rungs), 2 * alone[0].weight, _classes(wanted))
    return NeutralClaim(claim, tuple(sides_of))


def _classes(wanted: Sequence[ClassedDemand]) -> dict[str, ClassOfClaim]:
    """With the speed on the side where it is less: what a worker gives wherever it leans."""
    pairs = zip(wanted[0].offers, wanted[1].offers, strict=True)
    asked = [number for number, one in enumerate(wanted) if one.units > 0] or [0, 1]
    return {
        of_class(pair[0].name): ClassOfClaim(
            min(pair[number].speed for number in asked),
            pair[0].price_per_hour,
            any(pair[number].name not in wanted[number].slow for number in asked),
            pair[0].gpus,
            pair[0].kinds,
        )
        for pair in pairs
    }


@dataclass(slots=True)
class _Mixes:
    """Mixes of both sides together, whatever runs now."""

    wanted: Sequence[ClassedDemand]
    _known: dict[tuple[Sides, tuple[tuple[str, int], ...]], tuple[ClassMix, ClassMix]] = field(
        default_factory=dict
    )
    _of_side: dict[tuple[int, float, tuple[tuple[str, int], ...]], ClassMix] = field(default_factory=dict)

    def steady(self, sides: Sides, most: Mapping[str, int] = MappingProxyType({})) -> ClassMix:
        """The cheapest for these capacities, with no more of each class than `most` says."""
        return total_mix(self._both(sides, most), self.wanted[0].offers)

    def carry(self, sides: Sides, most: Mapping[str, int]) -> bool:
        """Whether so many of each class carry all of it."""
        both = zip(self._both(sides, most), sides, strict=True)
        return all(mix.units >= units - 1e-9 for mix, units in both)

    def leanest(self, sides: Sides) -> ClassMix | None:
        """Of fewest GPUs; None where one class would be there too often."""
        both = [
            leanest_mix(one.offers, units, one.floor.within(units))
            for one, units in zip(self.wanted, sides, strict=True)
        ]
        total = total_mix(both, self.wanted[0].offers)
        return total if self._may_be(total, {}) else None

    def _both(self, sides: Sides, most: Mapping[str, int]) -> tuple[ClassMix, ClassMix]:
        key = sides, tuple(most.items())
        if key not in self._known:
            prefill, decode = (self._alone(number, units, most) for number, units in enumerate(sides))
            total = total_mix((prefill, decode), self.wanted[0].offers)
            # Where no class is there too often, the cheapest of each side are the cheapest of both.
            self._known[key] = (prefill, decode) if self._may_be(total, most) else self._searched(sides, most)
        return self._known[key]

    def _alone(self, number: int, units: float, most: Mapping[str, int]) -> ClassMix:
        key = number, units, tuple(most.items())
        if key not in self._of_side:
            self._of_side[key] = self.wanted[number].steady(units, most)
        return self._of_side[key]

    def _may_be(self, total: ClassMix, most: Mapping[str, int]) -> bool:
        able = class_limits(*(one.offers for one in self.wanted))
        names = [one.name for one in self.wanted[0].offers]
        return all(
            count <= min(able[name], most.get(name, count))
            for name, count in zip(names, total.counts, strict=True)
        )

    def _searched(self, sides: Sides, most: Mapping[str, int]) -> tuple[ClassMix, ClassMix]:
        prefill, decode = (
            MixSide(tuple(at_most(one.offers, most)), units, one.floor.within(units))
            for one, units in zip(self.wanted, sides, strict=True)
        )
        return joint_mix(prefill, decode)
