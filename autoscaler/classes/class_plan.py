"""The last part of a decision where pools have classes: the cheapest mix for the capacity, within the budget. Pure.

Before it, everything counts in units, replicas of speed 1 (`units.py`): policies, `behavior`, ratio and link know of
no classes. Here the units that are wanted become replicas: the classes that can meet the target (`usable.py`), the
cheapest mix of them (`mix.py`), and where both pools together cost too much, a share for each (`money_budget.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoscaler.classes.mix import ChangeCost, ClassMix, ClassOffer, cheapest_mix, offers_of
from autoscaler.classes.money_budget import Claim, Rung, share_budget
from autoscaler.classes.on_demand_floor import OnDemandFloor
from autoscaler.classes.refused_classes import to_do_without
from autoscaler.classes.units import decode_in_units, mean_speed, prefill_in_units
from autoscaler.classes.usable import too_slow
from autoscaler.plan import Cause, ClassShare, PoolPlan, Proposal, Proposals, ScalingPlan
from autoscaler.policies.policy_file import AnyPool, ScalingPolicy, SloPool
from autoscaler.policies.slo.slo_decode import decode_shares
from autoscaler.policies.slo.slo_prefill import prefill_shares
from autoscaler.snapshot import PoolName, Replica, ReplicaState, Snapshot, lead_s

_HERE = (ReplicaState.READY, ReplicaState.STARTING, ReplicaState.STANDBY)


def gpus_of(pool: AnyPool, replica_class: str) -> int:
    """GPUs of a replica of this class; of any where the pool has none."""
    own = pool.class_named(replica_class).gpus_per_replica if pool.classes else None
    return pool.gpus_per_replica if own is None else own


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


@dataclass(frozen=True, slots=True)
class ClassedDemand:
    """What one pool is to have, and what there is of it."""

    name: PoolName
    pool: AnyPool
    offers: tuple[ClassOffer, ...]
    change: ChangeCost
    units: float
    """Of our own replicas; what others have is taken off."""
    least: float
    others: int
    floor: OnDemandFloor
    unusable: tuple[str, ...] = ()
    """Why classes are not used, or no more of them, for people."""

    @classmethod
    def of(
        cls, name: PoolName, pool: AnyPool, plan: PoolPlan, least: int, snapshot: Snapshot
    ) -> ClassedDemand:
        """`snapshot` is not in units; `plan` and `least` are."""
        signals = snapshot.pool(name)
        here = [one for one in signals.replicas if one.state in _HERE]
        others = [one for one in here if not one.ours]
        others_are = [pool.class_named(one.replica_class) for one in others]
        others_units = float(sum(one.speed for one in others_are))
        plain_units = float(sum(one.speed for one in others_are if not one.spot))
        floor = replace(pool.floor, others=others_units, others_on_demand=plain_units)
        running = _ours_by_class(pool, here)
        # What takes the place of one that is taken away is no more of a change than that was.
        taken = _ours_by_class(pool, [r for r in signals.replicas if r.state is ReplicaState.PREEMPTED])
        target_s = pool.target_ms / 1e3 if isinstance(pool, SloPool) else None
        slow = too_slow(pool, name, target_s, snapshot)
        able = {one for one in pool.speeds if one not in slow}
        short = to_do_without(able, {kind for where, kind in snapshot.short if where == name})
        most = dict.fromkeys(slow, 0) | {kind: running[kind] for kind in short}
        offers = [
            replace(one, most=min(one.most, most.get(one.name, one.most)))
            for one in offers_of(pool.classes, {kind: running[kind] + taken[kind] for kind in running})
        ]
        return cls(
            name,
            pool,
            tuple(offers),
            ChangeCost(pool.payback_s, lead_s(signals, pool.cold_start_s)),
            max(0.0, plan.desired - others_units),
            max(0.0, min(least, plan.desired) - others_units),
            len(others),
            floor,
            (*slow.values(), *(f"no more of {kind} is to be had for now" for kind in sorted(short))),
        )

    def steady(self, units: float) -> ClassMix:
        """The cheapest mix, whatever runs now."""
        return cheapest_mix(self.offers, units, floor=self.floor.within(units))

    def mix(self, units: float, budget_per_hour: float | None = None) -> ClassMix:
        """The cheapest mix that is worth coming to."""
        return cheapest_mix(self.offers, units, budget_per_hour, self.change, self.floor.within(units))

    def claim(self, proposal: Proposal, snapshot: Snapshot) -> Claim:
        """Its ladder under a budget: one rung a unit. `snapshot` is in units."""
        steps = [self.least + step for step in range(int(self.units - self.least + 1e-9) + 1)]
        steps += [self.units] if steps[-1] < self.units - 1e-9 else []
        mixes = [self.steady(units) for units in steps]
        totals = [mix.units + self.floor.others for mix in mixes]
        shares = expected_shares(self.name, self.pool, snapshot, [int(total) for total in totals])
        served = [min(1.0, total / proposal.need) if proposal.need > 0 else 1.0 for total in totals]
        rungs = zip(steps, mixes, shares or served, served, strict=True)
        recent = [b for b in snapshot.arrivals if b.start_s >= snapshot.now_s - snapshot.window_s]
        requests = sum(bucket.requests for bucket in recent) / snapshot.window_s
        return Claim(
            tuple(Rung(units, mix.price_per_hour, share, part) for units, mix, share, part in rungs),
            max(requests, 1e-3),
        )


def expected_shares(
    name: PoolName, pool: AnyPool, snapshot: Snapshot, units: Sequence[int]
) -> list[float] | None:
    """Predicted attainment by units; None where the pool has no target or nothing is measured."""
    if not isinstance(pool, SloPool):
        return None
    return (prefill_shares if name == "prefill" else decode_shares)(pool, snapshot, units)


def with_classes(
    policy: ScalingPolicy, snapshot: Snapshot, units: Snapshot, plan: ScalingPlan, proposals: Proposals
) -> ScalingPlan:
    """The plan with a mix for each pool that has classes. `snapshot` is what was observed, `units` the same in
    units."""
    wanted = [
        ClassedDemand.of(name, pool, plan.pool(name), proposals.pool(name).least, snapshot)
        for name, pool in policy.pools.items()
        if pool.classes
    ]
    if not wanted:
        return plan
    budget = policy.budget_per_hour
    granted = [one.units for one in wanted]
    mixes = [one.mix(one.units) for one in wanted]
    if budget is not None and sum(mix.price_per_hour for mix in mixes) > budget:
        granted, mixes = _within_budget(wanted, proposals, units, budget)
    for one, given, mix in zip(wanted, granted, mixes, strict=True):
        after = _planned(one, plan.pool(one.name), given, mix, budget)
        plan = replace(plan, prefill=after) if one.name == "prefill" else replace(plan, decode=after)
    return replace(plan, budget_per_hour=budget)


def _within_budget(
    wanted: Sequence[ClassedDemand], proposals: Proposals, units: Snapshot, budget: float
) -> tuple[list[float], list[ClassMix]]:
    """Units and mix of each pool. Mixes that keep what runs may be dearer than the cheapest: each may cost what the
    cheapest of the others leave."""
    claims = [one.claim(proposals.pool(one.name), units) for one in wanted]
    rungs = [claim.rungs[at] for claim, at in zip(claims, share_budget(claims, budget), strict=True)]
    left = budget - sum(rung.price_per_hour for rung in rungs)
    mixes = []
    for one, rung in zip(wanted, rungs, strict=True):
        mix = one.mix(rung.units, rung.price_per_hour + max(0.0, left))
        left += rung.price_per_hour - mix.price_per_hour
        mixes.append(mix)
    return [rung.units for rung in rungs], mixes


def _ours_by_class(pool: AnyPool, replicas: Sequence[Replica]) -> dict[str, int]:
    found = dict.fromkeys(pool.speeds, 0)
    for one in replicas:
        found[pool.class_named(one.replica_class).name] += one.ours
    return found


def _planned(
    one: ClassedDemand, before: PoolPlan, granted: float, mix: ClassMix, budget: float | None
) -> PoolPlan:
    shares = tuple(
        ClassShare(
            known.name,
            count,
            known.speed,
            known.price_per_hour,
            gpus_of(one.pool, known.name),
            offer.most,
            known.spot,
        )
        for known, offer, count in zip(one.pool.classes, one.offers, mix.counts, strict=True)
    )
    cause: Cause = before.cause
    notes = [before.reason]
    if granted < one.units - 1e-9:
        cause = "money_budget"
        notes.append(f"{one.units:g} wanted, {granted:g} within a budget of {budget:g} an hour")
    elif mix.units < granted - 1e-9:
        cause = "bounds"
        notes.append(f"{granted:g} wanted, {mix.units:g} is all that the classes give")
    if floor := one.floor.within(granted):
        plain = sum(share.count * share.speed for share in shares if not share.spot)
        short = f", {plain:g} is all that there are" if plain < floor - 1e-9 else ""
        notes.append(f"at least {floor:g} not on spot machines{short}")
    text = " + ".join(f"{share.count} {share.name}" for share in shares if share.count) or "none"
    notes += [*one.unusable, f"{text} for {mix.price_per_hour:g} an hour"]
    return replace(
        before,
        desired=sum(mix.counts) + one.others,
        reason="; ".join(notes),
        cause=cause,
        units=granted,
        mix=shares,
        floor=one.floor,
    )
