"""What a model with classes may have where several share money, GPUs or machines of a class. Pure.

As `with_classes` does for one model alone, with what others claim. What is wanted is by shares; what may be started now
is what nobody has. Standbys are kept of what nobody claims.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoscaler.classes.class_demand import ClassedDemand
from autoscaler.classes.class_plan import GrantedMix, demands, planned, with_pool
from autoscaler.classes.search.offer import NOTHING, ClassMix, mix_of
from autoscaler.plan import Proposals, ScalingPlan
from autoscaler.policies.policy_file import ScalingPolicy
from autoscaler.sharing.claims.neutral_shares import with_shared_neutral
from autoscaler.sharing.claims.plan_parts import bound_by, lacking_notes, with_room
from autoscaler.sharing.claims.shared_view import ModelShare, SharedView
from autoscaler.sharing.claims.shares import Rung, Uses, of_class
from autoscaler.snapshot import Snapshot


def with_shared_classes(
    policy: ScalingPolicy, snapshot: Snapshot, units: Snapshot, plan: ScalingPlan, proposals: Proposals
) -> ScalingPlan:
    """See `with_classes`."""
    if policy.workers == "neutral":
        return with_shared_neutral(policy, snapshot, units, plan, proposals)
    wanted, shared = demands(policy, snapshot, plan, proposals), snapshot.shared
    if not wanted or shared is None:
        return plan
    limits = shared.limits
    names = {one.name for pool in wanted for one in pool.offers if of_class(one.name) in limits}
    limited = {name: int(limits[of_class(name)]) for name in sorted(names)}
    claims = {one.name: one.claim(proposals.pool(one.name), units, limited, limits) for one in wanted}
    got = shared.granted(claims)
    rungs = [claim.rungs[at] for claim, at in zip(claims.values(), got.rungs, strict=True)]
    left, parts = dict(got.left), []
    for one, rung in zip(wanted, rungs, strict=True):
        mix = one.mix(rung.units, _able(rung, left))
        mix = _kept_for_now(one, rung, mix, left, shared)
        uses = one.shared_uses(mix, limits)
        claims[one.name] = replace(claims[one.name], wanted=uses)
        left = {name: max(0.0, left[name] + rung.uses.get(name, 0.0) - uses.get(name, 0.0)) for name in left}
        parts.append(_Part(one, rung, mix))
    for part in parts:
        part.standbys = part.one.standbys(part.mix, left)
        resting = part.one.shared_uses(part.standbys, limits)
        claims[part.one.name] = replace(claims[part.one.name], standbys=resting)
        left = {name: amount - resting.get(name, 0.0) for name, amount in left.items()}
    for part in parts:
        pool = part.one.name
        if (given := shared.gives_way(claims, got).get(pool)) is None:
            continue
        detour = _detour(part.one, part.rung, given.name, left, shared) if given.is_last else None
        if detour is not None:
            part.mix = detour
            claims[pool] = replace(claims[pool], wanted=part.one.shared_uses(detour, limits))
        else:
            part.gives = given.name
    for part in parts:
        plan = part.planned(plan, got, shared)
    kept = {str(pool): claim for pool, claim in claims.items()}
    return replace(with_room(plan, shared, limited), claims=kept, worth_moving=got.worth_moving)


@dataclass(slots=True)
class _Part:
    """One pool and what it gets."""

    one: ClassedDemand
    rung: Rung
    mix: ClassMix
    standbys: ClassMix = NOTHING
    gives: str = ""
    """The class of which one ends at once."""

    def planned(self, plan: ScalingPlan, got: ModelShare, shared: SharedView) -> ScalingPlan:
        """The plan with this pool."""
        limit, cause = bound_by(self.one, self.rung.units, self.mix, got.left, shared)
        given = GrantedMix(self.rung.units, self.mix, self.standbys, limit, cause)
        pool = planned(self.one, plan.pool(self.one.name), given)
        notes = lacking_notes(got, self.rung, shared)
        if self.gives:
            kind = next(share.name for share in pool.mix if of_class(share.name) == self.gives)
            notes.append(f"one {kind} ends before what replaces it is there: pools wait for each other")
            pool = replace(pool, gives=kind)
        return with_pool(plan, self.one.name, replace(pool, reason="; ".join([pool.reason, *notes])))


def _detour(one: ClassedDemand, rung: Rung, given: str, left: Uses, shared: SharedView) -> ClassMix | None:
    """A mix that carries all in place of a last replica, of a class that must go, and that there is room for beside it:
    of what nobody claims and nobody has. None: there is none."""
    room = {name: 0.0 if name == given else min(left[name], shared.free(name)) for name in left}
    mix = one.mix(rung.units, room | {given: 0.0})
    return mix if mix.units >= rung.units - 1e-9 else None


def _kept_for_now(one: ClassedDemand, rung: Rung, mix: ClassMix, left: Uses, shared: SharedView) -> ClassMix:
    """The mix; while others still have what it takes, what the pool was coming to before, if that carries all and can
    be had yet."""
    limits, decided = shared.limits, shared.decided.get(one.name)
    live = shared.live.get((shared.model, one.name), {})
    if decided is None:
        return mix

    def has_room(uses: Uses) -> bool:
        """With what it has, and what nobody has."""
        return all(uses.get(name, 0.0) <= live.get(name, 0.0) + shared.free(name) + 1e-9 for name in limits)

    before = mix_of(one.offers, [round(decided.get(of_class(offer.name), 0.0)) for offer in one.offers])
    uses = one.shared_uses(before, limits)
    may = all(uses.get(name, 0.0) <= rung.uses.get(name, 0.0) + left[name] + 1e-9 for name in limits)
    may = may and all(count <= offer.most for offer, count in zip(one.offers, before.counts, strict=True))
    floor = min(one.floor.within(rung.units), _on_demand(one, mix))
    carries = before.units >= rung.units - 1e-9 and _on_demand(one, before) >= floor - 1e-9
    kept = carries and may and has_room(uses)
    return before if kept and not has_room(one.shared_uses(mix, limits)) else mix


def _on_demand(one: ClassedDemand, mix: ClassMix) -> float:
    """Units of a mix that count for the floor."""
    pairs = zip(one.offers, mix.counts, strict=True)
    return sum(offer.speed * count for offer, count in pairs if not offer.spot)


def _able(rung: Rung, left: Uses) -> dict[str, float]:
    """What a mix may take: what its rung takes, and what nobody claims."""
    return {name: rung.uses.get(name, 0.0) + amount for name, amount in left.items()}
