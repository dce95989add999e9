"""The last part of a decision where pools have classes: the cheapest mix for the capacity, within the budget. Pure.

Before it, everything counts in units, replicas of speed 1 (`units.py`): policies, `behavior`, ratio and link know of
no classes. Here the units that are wanted become replicas: the classes that can meet the target (`usable.py`), the
cheapest mix of them (`mix.py`), and where both pools together cost too much, or several models do, a share for each
(`autoscaler/sharing/shares.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType

from autoscaler.classes.mix import ChangeCost, ClassMix, ClassOffer, cheapest_mix, offers_of
from autoscaler.classes.on_demand_floor import OnDemandFloor
from autoscaler.classes.refused_classes import to_do_without
from autoscaler.classes.units import decode_in_units, mean_speed, prefill_in_units
from autoscaler.classes.usable import too_slow
from autoscaler.plan import Cause, ClassShare, PoolPlan, Proposal, Proposals, ScalingPlan
from autoscaler.policies.policy_file import AnyPool, ScalingPolicy, SloPool
from autoscaler.policies.slo.slo_decode import decode_shares
from autoscaler.policies.slo.slo_prefill import prefill_shares
from autoscaler.sharing.shared_view import SharedView
from autoscaler.sharing.shares import MONEY, Claim, ClassOfClaim, Rung, Uses, of_class, share
from autoscaler.snapshot import PoolName, Replica, ReplicaState, Snapshot, lead_s

MOST_RUNGS = 32
"""Steps of a ladder; of a pool that wants more units each is of several."""
MOST_MIXES = 64
"""Of one capacity: for all of them a decision would take too long."""
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
    slow: frozenset[str] = frozenset()
    """Classes that cannot meet the target."""

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
            frozenset(slow),
        )

    def steady(self, units: float, most: Mapping[str, int] = MappingProxyType({})) -> ClassMix:
        """The cheapest mix, whatever runs now, with no more of each class than `most` says."""
        offers = [replace(one, most=min(one.most, most.get(one.name, one.most))) for one in self.offers]
        return cheapest_mix(offers, units, floor=self.floor.within(units))

    def mix(
        self,
        units: float,
        budget_per_hour: float | None = None,
        most: Mapping[str, float] = MappingProxyType({}),
    ) -> ClassMix:
        """The cheapest mix that is worth coming to, with no more of each class than `most` says."""
        offers = [
            replace(one, most=int(min(one.most, most.get(one.name, one.most) + 1e-9))) for one in self.offers
        ]
        return cheapest_mix(offers, units, budget_per_hour, self.change, self.floor.within(units))

    def claim(
        self, proposal: Proposal, snapshot: Snapshot, limited: Mapping[str, int] = MappingProxyType({})
    ) -> Claim:
        """Its ladder: one rung a unit, and of classes that are `limited` further ones with fewer of them. `snapshot` is
        in units."""
        limits = {one.name: limited[one.name] for one in self.offers if one.name in limited}
        found: dict[tuple[float, tuple[int, ...]], ClassMix] = {}
        for units in self._steps():
            best = self.steady(units)
            found.setdefault((units, best.counts), best)
            for most in fewer_of(limits, math.ceil(units) if units >= self.units - 1e-9 else 0):
                mix = self.steady(units, most)
                if mix.units >= units - 1e-9:
                    found.setdefault((units, mix.counts), mix)
        mixes = sorted(((units, mix) for (units, _), mix in found.items()), key=_by_capacity)
        totals = [mix.units + self.floor.others for _, mix in mixes]
        shares = expected_shares(self.name, self.pool, snapshot, [int(total) for total in totals])
        served = [min(1.0, total / proposal.need) if proposal.need > 0 else 1.0 for total in totals]
        rungs = zip(mixes, shares or served, served, strict=True)
        return Claim(
            tuple(Rung(units, self.uses(mix), kept, part) for (units, mix), kept, part in rungs),
            weight_of(snapshot),
            {
                of_class(one.name): ClassOfClaim(one.speed, one.price_per_hour, one.name not in self.slow)
                for one in self.offers
            },
        )

    def _steps(self) -> list[float]:
        span = int(self.units - self.least + 1e-9)
        stride = max(1, math.ceil(span / MOST_RUNGS))
        steps = [self.least + step for step in range(0, span + 1, stride)]
        return steps + ([self.units] if steps[-1] < self.units - 1e-9 else [])

    def uses(self, mix: ClassMix) -> dict[str, float]:
        """What a mix takes of what may be limited."""
        counts = zip(self.offers, mix.counts, strict=True)
        return {MONEY: mix.price_per_hour} | {of_class(one.name): float(count) for one, count in counts}


def fewer_of(limits: Mapping[str, int], counts: int = 0) -> list[dict[str, int]]:
    """Bounds by class: all limits, and without each class and all of them. With `counts`, that are wanted at most, also
    with other numbers of them, `MOST_MIXES` at most: somebody else may need just one."""
    if not limits:
        return []
    found = [dict(limits), *({**limits, name: 0} for name in limits), dict.fromkeys(limits, 0)]
    each = int(MOST_MIXES ** (1 / len(limits)) + 1e-9)
    tried = [_spread(min(most, counts), each) for most in limits.values()]
    return found + [dict(zip(limits, one, strict=True)) for one in product(*tried)] if counts else found


def _spread(most: int, count: int) -> list[int]:
    """Numbers from 0 to `most`, `count` of them at most."""
    return (
        sorted({round(most * step / max(1, count - 1)) for step in range(count)})
        if count <= most
        else [*range(most + 1)]
    )


def _by_capacity(one: tuple[float, ClassMix]) -> tuple[float, float]:
    units, mix = one
    return units, mix.price_per_hour


def weight_of(snapshot: Snapshot) -> float:
    """Requests a second."""
    recent = [b for b in snapshot.arrivals if b.start_s >= snapshot.now_s - snapshot.window_s]
    return max(sum(bucket.requests for bucket in recent) / snapshot.window_s, 1e-3)


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
    if snapshot.shared is not None:
        return _within_shares(wanted, proposals, units, plan, snapshot.shared)
    budget = policy.budget_per_hour
    granted = [one.units for one in wanted]
    mixes = [one.mix(one.units) for one in wanted]
    if budget is not None and sum(mix.price_per_hour for mix in mixes) > budget:
        granted, mixes = _within_budget(wanted, proposals, units, budget)
    of_budget = "" if budget is None else f"a budget of {budget:g} an hour"
    for one, given, mix in zip(wanted, granted, mixes, strict=True):
        plan = _with_pool(plan, one.name, _planned(one, plan.pool(one.name), given, mix, of_budget))
    return replace(plan, budget_per_hour=budget)


def _with_pool(plan: ScalingPlan, name: PoolName, pool: PoolPlan) -> ScalingPlan:
    return replace(plan, prefill=pool) if name == "prefill" else replace(plan, decode=pool)


def _within_budget(
    wanted: Sequence[ClassedDemand], proposals: Proposals, units: Snapshot, budget: float
) -> tuple[list[float], list[ClassMix]]:
    """Units and mix of each pool. Mixes that keep what runs may be dearer than the cheapest: each may cost what the
    cheapest of the others leave."""
    claims = [one.claim(proposals.pool(one.name), units) for one in wanted]
    rungs = [claim.rungs[at] for claim, at in zip(claims, share(claims, {MONEY: budget}), strict=True)]
    left = budget - sum(rung.price_per_hour for rung in rungs)
    mixes = []
    for one, rung in zip(wanted, rungs, strict=True):
        mix = one.mix(rung.units, rung.price_per_hour + max(0.0, left))
        left += rung.price_per_hour - mix.price_per_hour
        mixes.append(mix)
    return [rung.units for rung in rungs], mixes


def _within_shares(
    wanted: Sequence[ClassedDemand],
    proposals: Proposals,
    units: Snapshot,
    plan: ScalingPlan,
    shared: SharedView,
) -> ScalingPlan:
    """As `_within_budget`, with what other models on the inventory claim. What is wanted is by shares; what may be
    started now is what nobody has."""
    limits = shared.limits
    limited = {
        one.name: int(limits[of_class(one.name)])
        for pool in wanted
        for one in pool.offers
        if of_class(one.name) in limits
    }
    claims = {one.name: one.claim(proposals.pool(one.name), units, limited) for one in wanted}
    got = shared.granted(claims)
    rungs = [claim.rungs[at] for claim, at in zip(claims.values(), got.rungs, strict=True)]
    left, money, decided = dict(got.left), None, dict[PoolName, Uses]()
    if MONEY in limits:
        # Mixes are within its share. While they change, old and new replicas use what others have not taken yet.
        money = shared.own(MONEY) + shared.free(MONEY)
    for one, rung in zip(wanted, rungs, strict=True):
        most = {name: rung.uses.get(of_class(name), 0.0) + left[of_class(name)] for name in limited}
        mix = one.mix(rung.units, rung.price_per_hour + left[MONEY] if MONEY in left else None, most)
        uses = one.uses(mix)
        decided[one.name] = uses
        left = {name: max(0.0, left[name] + rung.uses.get(name, 0.0) - uses.get(name, 0.0)) for name in left}
        short = {name for name in limited if mix.units < rung.units - 1e-9 or rung.units < one.units - 1e-9}
        what = [f"a budget of {limits[MONEY]:g} an hour ({shared.who(MONEY)})"] if MONEY in limits else []
        what += [f"{limits[of_class(n)]:g} {n} ({shared.who(of_class(n))})" for n in sorted(short)]
        after = _planned(one, plan.pool(one.name), rung.units, mix, f"{' and '.join(what)} for all models")
        plan = _with_pool(plan, one.name, after)
    given = shared.gives_way(claims, decided, got.granted)
    for name, of in given.items():
        pool = plan.pool(name)
        kind = next(share.name for share in pool.mix if of_class(share.name) == of)
        note = f"one {kind} ends first: another pool waits for it, and has what this one waits for"
        plan = _with_pool(plan, name, replace(pool, gives=kind, reason=f"{pool.reason}; {note}"))
    return replace(
        plan,
        budget_per_hour=money,
        class_room={name: int(shared.free(of_class(name)) + 1e-9) for name in limited},
        claims={name: replace(claim, wanted=decided[name]) for name, claim in claims.items()},
        worth_moving=got.worth_moving,
    )


def _ours_by_class(pool: AnyPool, replicas: Sequence[Replica]) -> dict[str, int]:
    found = dict.fromkeys(pool.speeds, 0)
    for one in replicas:
        found[pool.class_named(one.replica_class).name] += one.ours
    return found


def _planned(one: ClassedDemand, before: PoolPlan, granted: float, mix: ClassMix, limit: str) -> PoolPlan:
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
        notes.append(f"{one.units:g} wanted, {granted:g} within {limit}")
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
