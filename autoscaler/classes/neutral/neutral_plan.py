"""The mixes of both pools where their workers are neutral: one search for both. Pure.

Capacity is decided for each pool in its own units, as for pinned workers. What carries it is decided once: workers of
one price list, each of which may lean to either side. So the mix counts what runs on both sides, and no class is had
more often on both together than its `max_replicas`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoscaler.classes.class_demand import ClassedDemand, at_most
from autoscaler.classes.neutral.joint_mix import MixBudget, class_limits, joint_mix, total_mix
from autoscaler.classes.search.offer import ChangeCost, ClassMix, MixSide
from autoscaler.plan import Proposals
from autoscaler.sharing.claims.shares import GPUS, MONEY, Uses, kinds_in, of_class, share
from autoscaler.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class NeutralMixes:
    """What both pools get, prefill first."""

    granted: Sequence[float]
    """Units of each."""
    mixes: Sequence[ClassMix]
    standbys: Sequence[ClassMix]
    exceeded: Sequence[str] = ()
    """What there was not enough of."""


def neutral_mixes(
    wanted: Sequence[ClassedDemand], proposals: Proposals, units: Snapshot, limits: Uses
) -> NeutralMixes:
    """The cheapest mixes of both pools, and their standbys. `units` is the snapshot in units, `limits` what both may
    take of money and GPUs."""
    wanted = where_one_is_for_both(wanted)
    granted = [one.units for one in wanted]
    most = class_limits(*(one.offers for one in wanted))
    bounds = {**limits, **{of_class(name): float(count) for name, count in most.items()}}
    mixes = side_mixes(wanted, granted, limits)
    exceeded: list[str] = []
    of_floor = _exceeded_by_floor(wanted, mixes, limits)
    if of_floor or any(mix.units < one.units - 1e-9 for one, mix in zip(wanted, mixes, strict=True)):
        exceeded = [*of_floor, *(name for name in _exceeded(wanted, bounds) if name not in of_floor)]
        scarce = {name: count for name, count in most.items() if of_class(name) in exceeded}
        gpus = {name: bounds[name] for name in exceeded if name not in scarce}
        claims = [one.claim(proposals.pool(one.name), units, scarce, gpus, bounds) for one in wanted]
        at = share(claims, bounds)
        granted = [claim.rungs[rung].units for claim, rung in zip(claims, at, strict=True)]
        mixes = side_mixes(wanted, granted, limits)
    return NeutralMixes(granted, mixes, side_standbys(wanted, mixes, bounds), exceeded)


def where_one_is_for_both(wanted: Sequence[ClassedDemand]) -> Sequence[ClassedDemand]:
    """Where no worker leans to prefill, those of decode compute its prompts: they are of classes that can in time."""
    prefill, decode = wanted
    able = [one for one in decode.offers if one.most and one.name not in prefill.slow]
    if prefill.units or prefill.others or not able:
        return wanted
    offers = tuple(replace(one, most=0) if one.name in prefill.slow else one for one in decode.offers)
    return prefill, replace(decode, offers=offers)


def side_mixes(
    wanted: Sequence[ClassedDemand],
    units: Sequence[float],
    able: Uses,
) -> list[ClassMix]:
    """The mixes of both sides that are worth coming to, within what both may take together."""
    most = {one.name: able[of_class(one.name)] for one in wanted[0].offers if of_class(one.name) in able}
    prefill, decode = (
        MixSide(tuple(at_most(one.offers, most)), count, one.floor.within(count), one.leaning)
        for one, count in zip(wanted, units, strict=True)
    )
    # One change is for both sides: it must pay by the shorter time, with the longer start.
    change = ChangeCost(
        min(one.change.payback_s for one in wanted), max(one.change.cold_start_s for one in wanted)
    )
    kinds = {name: able[name] for name in kinds_in(able)}
    return list(joint_mix(prefill, decode, MixBudget(able.get(MONEY), able.get(GPUS), kinds), change))


def _exceeded(wanted: Sequence[ClassedDemand], bounds: Uses) -> list[str]:
    """What is limited that both would take too much of, each by itself."""
    uses = [one.uses(one.steady(one.units)) for one in wanted]
    return [name for name, most in bounds.items() if sum(use.get(name, 0.0) for use in uses) > most + 1e-9]


def _exceeded_by_floor(wanted: Sequence[ClassedDemand], mixes: Sequence[ClassMix], limits: Uses) -> list[str]:
    """The budgets that would be exceeded if no less were on demand than the classes give; none where these mixes have
    as much of the floors."""
    lack = _lacks_of_floor(wanted, mixes)
    if not limits or lack <= 1e-9:
        return []
    free = side_mixes(wanted, [one.units for one in wanted], {})
    if _lacks_of_floor(wanted, free) >= lack - 1e-9:
        return []
    uses = [one.uses(mix) for one, mix in zip(wanted, free, strict=True)]
    return [name for name, most in limits.items() if sum(use.get(name, 0.0) for use in uses) > most + 1e-9]


def _lacks_of_floor(wanted: Sequence[ClassedDemand], mixes: Sequence[ClassMix]) -> float:
    """Units of both floors that these mixes do not hold."""
    return sum(
        max(0.0, one.floor.within(one.units) - one.plain_units(mix))
        for one, mix in zip(wanted, mixes, strict=True)
    )


def side_standbys(wanted: Sequence[ClassedDemand], mixes: Sequence[ClassMix], bounds: Uses) -> list[ClassMix]:
    """The standbys of both sides beside their mixes, of what these leave of all that is limited, prefill's first."""
    taken, found = total_mix(mixes, wanted[0].offers), list[ClassMix]()
    for one in wanted:
        mix = one.standbys(taken, _left(one, taken, bounds))
        taken = total_mix((taken, mix), one.offers)
        found.append(mix)
    return found


def _left(one: ClassedDemand, taken: ClassMix, bounds: Uses) -> Mapping[str, float]:
    uses = one.uses(taken)
    return {name: most - uses.get(name, 0.0) for name, most in bounds.items()}
