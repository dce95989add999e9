"""The last part of a decision where pools have classes: the cheapest mix for the capacity, within the budget. Pure.

Before it, everything counts in units, replicas of speed 1 (`units.py`): policies, `behavior`, ratio and link know of
no classes. Here the units that are wanted become replicas: the classes that can meet the target (`usable.py`), the
cheapest mix of them (`mix.py`, of neutral workers `neutral/`), and where both pools together cost too much or take too
many GPUs, a share for each (`autoscaler/sharing/claims/shares.py`); where several models do, `class_shares.py` there
does it. What is left then is for warm standbys.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from autoscaler.classes.class_demand import ClassedDemand
from autoscaler.classes.neutral.neutral_plan import neutral_mixes
from autoscaler.classes.search.offer import ClassMix
from autoscaler.classes.units import decode_in_units, mean_speed, prefill_in_units
from autoscaler.plan import Cause, ClassShare, PoolPlan, Proposals, ScalingPlan
from autoscaler.policies.policy_file import ScalingPolicy
from autoscaler.sharing.claims.shares import GPUS, MONEY, Uses, kinds_in, left_of, limit_text, of_kind, share
from autoscaler.snapshot import POOLS, PoolName, Snapshot


def in_units(policy: ScalingPolicy, snapshot: Snapshot) -> Snapshot:
    """The snapshot with both pools in units; pools without classes as they are."""
    if not policy.prefill.classes and not policy.decode.classes:
        return snapshot
    link, speed = snapshot.link, mean_speed(policy.prefill, snapshot.prefill)
    if link.gb_per_s is not None:
        link = replace(link, gb_per_s=link.gb_per_s / speed)
    return replace(
        snapshot,
        prefill=prefill_in_units(policy.prefill, snapshot.prefill),
        decode=decode_in_units(policy.decode, snapshot.decode),
        link=link,
    )


def with_classes(
    policy: ScalingPolicy, snapshot: Snapshot, units: Snapshot, plan: ScalingPlan, proposals: Proposals
) -> ScalingPlan:
    """The plan with a mix for each pool that has classes. `snapshot` is what was observed, `units` the same in
    units."""
    wanted = demands(policy, snapshot, plan, proposals)
    if not wanted:
        return plan
    limits = _limits(policy, wanted)
    gpus = int(limits[GPUS]) if GPUS in limits else None
    plan = replace(
        plan,
        budget_per_hour=policy.budget_per_hour,
        gpu_budget=gpus,
        gpu_limits={name: int(limits[name]) for name in kinds_in(limits)},
    )
    if policy.workers == "neutral":
        return _of_neutral(wanted, proposals, units, plan, limits)
    granted = [one.units for one in wanted]
    mixes = [one.mix(one.units) for one in wanted]
    exceeded = _exceeded(wanted, mixes, limits)
    if exceeded:
        granted, mixes = _within_limits(wanted, proposals, units, limits)
    used = [one.uses(mix) for one, mix in zip(wanted, mixes, strict=True)]
    left = {name: limit - sum(uses.get(name, 0.0) for uses in used) for name, limit in limits.items()}
    why = _cause(exceeded)
    for one, given, mix in zip(wanted, granted, mixes, strict=True):
        standbys = one.standbys(mix, left)
        left = {name: amount - one.uses(standbys).get(name, 0.0) for name, amount in left.items()}
        got = GrantedMix(given, mix, standbys, " and ".join(exceeded.values()), why)
        plan = with_pool(plan, one.name, planned(one, plan.pool(one.name), got))
    return plan


def _of_neutral(
    wanted: Sequence[ClassedDemand],
    proposals: Proposals,
    units: Snapshot,
    plan: ScalingPlan,
    limits: Uses,
) -> ScalingPlan:
    """The plan where both pools have the workers of one price list."""
    found = neutral_mixes(wanted, proposals, units, limits)
    budgets = [limit_text(name, limits[name]) for name in found.exceeded if name in limits]
    what = " and ".join(budgets) or "what max_replicas of the classes give on both sides"
    why: Cause = _cause(found.exceeded) if budgets else "bounds"
    for one, given, mix, standbys in zip(wanted, found.granted, found.mixes, found.standbys, strict=True):
        got = GrantedMix(given, mix, standbys, what, why)
        plan = with_pool(plan, one.name, planned(one, plan.pool(one.name), got))
    return replace(plan, one_price_list=True)


def _cause(exceeded: Collection[str]) -> Cause:
    return "gpu_budget" if GPUS in exceeded or kinds_in(exceeded) else "money_budget"


def demands(
    policy: ScalingPolicy, snapshot: Snapshot, plan: ScalingPlan, proposals: Proposals
) -> list[ClassedDemand]:
    """Of the pools that have classes; the plan counts units."""
    sides = POOLS if policy.workers == "neutral" else ()
    of_policy = [of_kind(kind) for kind in policy.gpu_limits]
    kinds = of_policy if snapshot.shared is None else kinds_in(snapshot.shared.limits)
    return [
        ClassedDemand.of(name, pool, plan.pool(name), proposals.pool(name).least, snapshot, sides, kinds)
        for name, pool in policy.pools.items()
        if pool.classes
    ]


def _limits(policy: ScalingPolicy, wanted: Sequence[ClassedDemand]) -> dict[str, float]:
    """Of replicas of our own in both pools."""
    money = {} if policy.budget_per_hour is None else {MONEY: policy.budget_per_hour}
    gpus = {of_kind(kind): most for kind, most in policy.gpu_limits.items()}
    if policy.gpu_budget is not None:
        gpus[GPUS] = policy.gpu_budget
    others = {name: sum(one.others_gpus[name] for one in wanted) for name in gpus}
    return money | {name: max(0.0, most - others[name]) for name, most in gpus.items()}


def _exceeded(wanted: Sequence[ClassedDemand], mixes: Sequence[ClassMix], limits: Uses) -> dict[str, str]:
    """The limits that these mixes exceed together, with their names for people."""
    uses = [one.uses(mix) for one, mix in zip(wanted, mixes, strict=True)]
    return {
        name: limit_text(name, limit)
        for name, limit in limits.items()
        if sum(use.get(name, 0.0) for use in uses) > limit + 1e-9
    }


def with_pool(plan: ScalingPlan, name: PoolName, pool: PoolPlan) -> ScalingPlan:
    """The plan with another one for this pool."""
    return replace(plan, prefill=pool) if name == "prefill" else replace(plan, decode=pool)


def _within_limits(
    wanted: Sequence[ClassedDemand], proposals: Proposals, units: Snapshot, limits: Uses
) -> tuple[list[float], list[ClassMix]]:
    """Units and mix of each pool. Mixes that keep what runs may take more than those that were granted: each may take
    what the others leave."""
    claims = [one.claim(proposals.pool(one.name), units, bounds=limits) for one in wanted]
    at = share(claims, limits)
    left = left_of(claims, at, limits)
    mixes = []
    for one, claim, number in zip(wanted, claims, at, strict=True):
        rung = claim.rungs[number]
        able = {name: rung.uses.get(name, 0.0) + max(0.0, left[name]) for name in limits}
        mix = one.mix(rung.units, able)
        uses = one.uses(mix)
        left = {name: left[name] + rung.uses.get(name, 0.0) - uses.get(name, 0.0) for name in left}
        mixes.append(mix)
    return [claim.rungs[number].units for claim, number in zip(claims, at, strict=True)], mixes


@dataclass(frozen=True, slots=True)
class GrantedMix:
    """What one pool gets."""

    units: float
    mix: ClassMix
    standbys: ClassMix
    limit: str = ""
    """What it got no more for, for people."""
    cause: Cause = "money_budget"
    """Where it did not get all."""


def _short_of(floor: float, one: ClassedDemand, given: GrantedMix) -> str:
    """What there is of a floor and why it is no more, for people; empty where it holds."""
    plain, most = (
        one.plain_units(given.mix),
        sum(kind.most * kind.speed for kind in one.offers if not kind.spot),
    )
    if plain >= floor - 1e-9:
        return ""
    if plain >= most - 1e-9 or not given.limit:
        return f", {plain:g} is all that there are"
    return f", {plain:g} within {given.limit}"


def planned(one: ClassedDemand, before: PoolPlan, given: GrantedMix) -> PoolPlan:
    """The pool's plan with what it gets, and why."""
    counts = zip(one.pool.classes, one.offers, given.mix.counts, given.standbys.counts, strict=True)
    shares = tuple(
        ClassShare(
            known.name,
            count,
            known.speed,
            known.price_per_hour,
            offer.gpus,
            known.gpu,
            offer.most,
            known.spot,
            standby,
            offer.kinds,
        )
        for known, offer, count, standby in counts
    )
    cause: Cause = before.cause
    notes = [before.reason]
    if given.units < one.units - 1e-9:
        cause = given.cause
        notes.append(f"{one.units:g} wanted, {given.units:g} within {given.limit}")
    elif given.mix.units < given.units - 1e-9:
        cause = "bounds"
        notes.append(f"{given.units:g} wanted, {given.mix.units:g} is all that the classes give")
    if floor := one.floor.within(given.units):
        notes.append(f"at least {floor:g} not on spot machines{_short_of(floor, one, given)}")
    text = " + ".join(f"{share.count} {share.name}" for share in shares if share.count) or "none"
    notes += [*one.unusable, f"{text} for {given.mix.price_per_hour:g} an hour"]
    if one.standby:
        text = " + ".join(f"{share.standby} {share.name}" for share in shares if share.standby)
        notes.append(
            f"on standby {text} for {given.standbys.price_per_hour:g} an hour" if text else "none on standby"
        )
    return replace(
        before,
        desired=sum(given.mix.counts) + one.others,
        standby=sum(given.standbys.counts),
        reason="; ".join(notes),
        cause=cause,
        units=given.units,
        mix=shares,
        floor=one.floor,
    )
