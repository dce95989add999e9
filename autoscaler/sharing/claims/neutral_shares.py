"""What a model with neutral workers of several classes may have where several share money, GPUs or machines. Pure.

As `with_shared_classes` does for pinned workers, with one claim for both sides: which side a worker leans to is the
model's own affair, and no amount of what is shared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoscaler.classes.class_demand import ClassedDemand
from autoscaler.classes.class_plan import GrantedMix, demands, planned, with_pool
from autoscaler.classes.neutral.joint_mix import class_limits, total_mix
from autoscaler.classes.neutral.neutral_claim import NEUTRAL, Sides, neutral_claim
from autoscaler.classes.neutral.neutral_plan import side_mixes, side_standbys, where_one_is_for_both
from autoscaler.classes.search.offer import ClassMix
from autoscaler.plan import Proposals, ScalingPlan
from autoscaler.policies.policy_file import ScalingPolicy
from autoscaler.sharing.claims.plan_parts import bound_by, lacking_notes, with_room
from autoscaler.sharing.claims.shared_view import SharedView
from autoscaler.sharing.claims.shares import Claim, Rung, Uses, amounts_in, of_class
from autoscaler.snapshot import Snapshot

Mixes = Sequence[ClassMix]
"""Of prefill and of decode."""


def with_shared_neutral(
    policy: ScalingPolicy, snapshot: Snapshot, units: Snapshot, plan: ScalingPlan, proposals: Proposals
) -> ScalingPlan:
    """See `with_classes`."""
    wanted, shared = demands(policy, snapshot, plan, proposals), snapshot.shared
    if not wanted or shared is None:
        return plan
    wanted, limits = list(where_one_is_for_both(wanted)), shared.limits
    limited = {
        one.name: int(limits[of_class(one.name)]) for one in wanted[0].offers if of_class(one.name) in limits
    }
    made = neutral_claim(wanted, proposals, units, limited, limits)
    got = shared.granted({NEUTRAL: made.claim})
    rung, sides = made.claim.rungs[got.rungs[0]], made.sides[got.rungs[0]]
    part = _Both(wanted, rung, sides, shared, got.left)
    mixes = part.kept_for_now(part.mixes())
    claim = replace(made.claim, wanted=part.uses(mixes))
    standbys = part.standbys(mixes)
    claim = replace(claim, standbys=part.uses(standbys), ends_soon=part.ends_one_soon(mixes, standbys))
    given = shared.gives_way({NEUTRAL: claim}, got).get(NEUTRAL)
    if given is not None and given.is_last and (detour := part.detour(given.name, claim)) is not None:
        mixes, given = detour, None
        claim = replace(claim, wanted=part.uses(mixes))
    notes = lacking_notes(got, rung, shared)
    for number, one in enumerate(wanted):
        limit, cause = bound_by(one, sides[number], mixes[number], got.left, shared)
        share = GrantedMix(sides[number], mixes[number], standbys[number], limit, cause)
        pool = planned(one, plan.pool(one.name), share)
        if given is not None and number == part.giver(given.name, mixes):
            kind = given.name.removeprefix(of_class(""))
            notes = [*notes, f"one {kind} ends before what replaces it is there: pools wait for each other"]
            pool = replace(pool, gives=kind)
        plan = with_pool(plan, one.name, replace(pool, reason="; ".join([pool.reason, *notes])))
    plan = with_room(plan, shared, limited)
    return replace(plan, one_price_list=True, claims={NEUTRAL: claim}, worth_moving=got.worth_moving)


@dataclass(frozen=True, slots=True)
class _Both:
    """Both sides, and what they get."""

    wanted: Sequence[ClassedDemand]
    rung: Rung
    sides: Sides
    shared: SharedView
    left: Uses

    def uses(self, mixes: Mixes) -> dict[str, float]:
        """What both take together."""
        one = self.wanted[0]
        return one.shared_uses(total_mix(mixes, one.offers), self.shared.limits)

    @property
    def able(self) -> dict[str, float]:
        """What both may take: what their rung takes, and what nobody claims."""
        return {name: self.rung.uses.get(name, 0.0) + amount for name, amount in self.left.items()}

    def mixes(self) -> Mixes:
        """Those that are worth coming to."""
        return side_mixes(self.wanted, self.sides, self.able)

    def carry(self, mixes: Mixes, like: Mixes | None = None) -> bool:
        """Whether they carry all, and have as much of the floors as others, or all of it."""
        for number, (one, mix, units) in enumerate(zip(self.wanted, mixes, self.sides, strict=True)):
            floor = one.floor.within(units)
            floor = floor if like is None else min(floor, one.plain_units(like[number]))
            if mix.units < units - 1e-9 or one.plain_units(mix) < floor - 1e-9:
                return False
        return True

    def kept_for_now(self, mixes: Mixes) -> Mixes:
        """The mixes; while others still have what they take, what the model was coming to before, if that carries all
        and can be had yet."""
        decided = self.shared.decided.get(NEUTRAL)
        if decided is None or self._has_room(self.uses(mixes)):
            return mixes
        able = dict(self.able)
        for one in self.wanted[0].offers:
            name = of_class(one.name)
            able[name] = min(decided.get(name, 0.0), able.get(name, math.inf))
        before = side_mixes(self.wanted, self.sides, able)
        return before if self.carry(before, mixes) and self._has_room(self.uses(before)) else mixes

    def _has_room(self, uses: Uses) -> bool:
        """With what it has, and what nobody has."""
        shared = self.shared
        live = shared.live.get((shared.model, NEUTRAL), {})
        return all(
            uses.get(name, 0.0) <= live.get(name, 0.0) + shared.free(name) + 1e-9 for name in shared.limits
        )

    def standbys(self, mixes: Mixes) -> Mixes:
        """Of what nobody claims."""
        places = class_limits(*(one.offers for one in self.wanted))
        bounds = {of_class(name): float(count) for name, count in places.items()}
        able = {name: amount for name, amount in self.able.items() if name in amounts_in(self.able)}
        able |= {name: min(most, self.able.get(name, math.inf)) for name, most in bounds.items()}
        return side_standbys(self.wanted, mixes, able)

    def detour(self, given: str, claim: Claim) -> Mixes | None:
        """Mixes that carry all in place of a last worker, of a class that must go, and that there is room for beside
        it: of what nobody claims and nobody has. None: there are none."""
        shared = self.shared
        room = {
            name: max(0.0, min(self._unclaimed(name, claim), shared.free(name))) for name in shared.limits
        }
        found = side_mixes(self.wanted, self.sides, room | {given: 0.0})
        return found if self.carry(found) else None

    def ends_one_soon(self, mixes: Mixes, standbys: Mixes) -> bool:
        """Whether a side carries without one that is too much on both what is wanted of it, once all serve."""
        sides = list(zip(self.wanted, mixes, self.sides, strict=True))
        for place in range(len(self.wanted[0].offers)):
            there = sum(one.leaning[place] for one in self.wanted)
            if there <= sum(mix.counts[place] for mix in (*mixes, *standbys)):
                continue
            for one, mix, units in sides:
                carried = sum(
                    offer.speed * count for offer, count in zip(one.offers, one.leaning, strict=True)
                )
                left = carried - one.offers[place].speed
                if one.leaning[place] > mix.counts[place] and left >= min(units, mix.units) - 1e-9:
                    return True
        return False

    def _unclaimed(self, name: str, claim: Claim) -> float:
        wanted = {} if claim.wanted is None else claim.wanted
        return self.able.get(name, 0.0) - wanted.get(name, 0.0) - claim.standbys.get(name, 0.0)

    def giver(self, given: str, mixes: Mixes) -> int:
        """The side that has most of a class beyond what it is to have."""
        place = next(n for n, one in enumerate(self.wanted[0].offers) if of_class(one.name) == given)
        spare = [one.leaning[place] - mix.counts[place] for one, mix in zip(self.wanted, mixes, strict=True)]
        return spare.index(max(spare))
