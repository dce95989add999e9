"""What one pool with classes is to have, the mixes that carry it, and what it claims where both pools or several models
share a limit. Pure."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType

from autoscaler.classes.mix import cheapest_mix, leanest_mix
from autoscaler.classes.on_demand_floor import OnDemandFloor
from autoscaler.classes.refused_classes import to_do_without
from autoscaler.classes.search.offer import ChangeCost, ClassMix, ClassOffer, offers_of, without
from autoscaler.classes.usable import too_slow
from autoscaler.plan import PoolPlan, Proposal
from autoscaler.policies.policy_file import AnyPool, SloPool
from autoscaler.policies.slo.slo_decode import decode_shares
from autoscaler.policies.slo.slo_prefill import prefill_shares
from autoscaler.sharing.claims.shares import (
    GPUS,
    MONEY,
    Claim,
    ClassOfClaim,
    Rung,
    Uses,
    counted_in,
    kinds_in,
    of_class,
)
from autoscaler.snapshot import PoolName, Replica, ReplicaState, Snapshot, lead_s

MOST_RUNGS = 32
"""Steps of a ladder; of a pool that wants more units each is of several."""
MOST_MIXES = 64
"""Of one capacity: for all of them a decision would take too long."""
_HERE = (ReplicaState.READY, ReplicaState.STARTING, ReplicaState.STANDBY)


def gpus_of(pool: AnyPool, replica_class: str) -> int:
    """GPUs of a replica of this class; of any where the pool has none."""
    if not pool.classes:
        return pool.gpus_per_replica
    return pool.class_named(replica_class).gpus_or(pool.gpus_per_replica)


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
    others_gpus: Uses
    """By limit: any, and of a kind."""
    floor: OnDemandFloor
    standby: int = 0
    """Units beside them that are kept warm."""
    unusable: tuple[str, ...] = ()
    """Why classes are not used, or no more of them, for people."""
    slow: frozenset[str] = frozenset()
    """Classes that cannot meet the target."""
    leaning: tuple[int, ...] = ()
    """Replicas of each class that are there or start, in this pool alone."""

    @classmethod
    def of(
        cls,
        name: PoolName,
        pool: AnyPool,
        plan: PoolPlan,
        least: int,
        snapshot: Snapshot,
        sides: Sequence[PoolName] = (),
        kinds: Sequence[str] = (),
    ) -> ClassedDemand:
        """`snapshot` is not in units; `plan` and `least` are. `sides`: the pools whose replicas may be of this one;
        none: itself alone. `kinds`: the limits on GPUs of a kind."""
        signals = snapshot.pool(name)
        here = [one for one in signals.replicas if one.state in _HERE]
        others = [one for one in here if not one.ours]
        others_are = [pool.class_named(one.replica_class) for one in others]
        others_units = float(sum(one.speed for one in others_are))
        plain_units = float(sum(one.speed for one in others_are if not one.spot))
        floor = replace(pool.floor, others=others_units, others_on_demand=plain_units)
        sides = sides or (name,)
        known = [replica for side in sides for replica in snapshot.pool(side).replicas]
        running = _ours_by_class(pool, [r for r in known if r.state in _HERE])
        # What takes the place of one that is taken away is no more of a change than that was.
        taken = _ours_by_class(pool, [r for r in known if r.state is ReplicaState.PREEMPTED])
        target_s = pool.target_ms / 1e3 if isinstance(pool, SloPool) else None
        slow = too_slow(pool, name, target_s, snapshot)
        able = {one for one in pool.speeds if one not in slow}
        short = to_do_without(able, {kind for where, kind in snapshot.short if where in sides})
        most = dict.fromkeys(slow, 0) | {kind: running[kind] for kind in short}
        offers = [
            replace(one, most=min(one.most, most.get(one.name, one.most)), kinds=counted_in(known.gpu, kinds))
            for known, one in zip(
                pool.classes,
                offers_of(
                    pool.classes,
                    {kind: running[kind] + taken[kind] for kind in running},
                    pool.gpus_per_replica,
                ),
                strict=True,
            )
        ]
        return cls(
            name,
            pool,
            tuple(offers),
            ChangeCost(pool.payback_s, lead_s(signals, pool.cold_start_s)),
            max(0.0, plan.desired - others_units),
            max(0.0, min(least, plan.desired) - others_units),
            len(others),
            _gpus_of(pool, others, kinds),
            floor,
            plan.standby,
            (*slow.values(), *(f"no more of {kind} is to be had for now" for kind in sorted(short))),
            frozenset(slow),
            tuple(_ours_by_class(pool, here).values()),
        )

    def steady(self, units: float, most: Mapping[str, int] = MappingProxyType({})) -> ClassMix:
        """The cheapest mix, whatever runs now, with no more of each class than `most` says."""
        return cheapest_mix(at_most(self.offers, most), units, floor=self.floor.within(units))

    def mix(self, units: float, able: Uses = MappingProxyType({})) -> ClassMix:
        """The cheapest mix that is worth coming to, within `able`."""
        return self._within(able, self.offers, units, self.floor.within(units))

    def standbys(self, mix: ClassMix, left: Uses) -> ClassMix:
        """The cheapest replicas that carry `standby` units beside a mix, of what is left of all that is limited."""
        return self._within(left, without(self.offers, mix), self.standby, 0.0)

    def _within(self, able: Uses, offers: Sequence[ClassOffer], units: float, floor: float) -> ClassMix:
        most = {one.name: able[of_class(one.name)] for one in offers if of_class(one.name) in able}
        kinds = {name: able[name] for name in kinds_in(able)}
        return cheapest_mix(
            at_most(offers, most), units, able.get(MONEY), self.change, floor, able.get(GPUS), kinds
        )

    def claim(
        self,
        proposal: Proposal,
        snapshot: Snapshot,
        limited: Mapping[str, int] = MappingProxyType({}),
        bounds: Uses = MappingProxyType({}),
        counted: Container[str] | None = None,
    ) -> Claim:
        """Its ladder: one rung a unit, and further ones: of classes that are `limited`, or the GPUs of whose kind are,
        with fewer of them, and where GPUs are with the fewest GPUs. `snapshot` is in units, `bounds` what is limited
        of GPUs, `counted` all that is, also where no rungs are wanted for it. Default: `bounds`."""
        limits, counts = self.scarce(limited, bounds), bounds if counted is None else counted
        found: dict[tuple[float, tuple[int, ...]], ClassMix] = {}
        for units in self._steps():
            best = self.steady(units)
            found.setdefault((units, best.counts), best)
            for most in fewer_of(limits, math.ceil(units) if units >= self.units - 1e-9 else 0):
                mix = self.steady(units, most)
                if mix.units >= units - 1e-9:
                    found.setdefault((units, mix.counts), mix)
            if GPUS in bounds or kinds_in(bounds):
                mix = leanest_mix(self.offers, units, self.floor.within(units))
                found.setdefault((units, mix.counts), mix)
        mixes = sorted(((units, mix) for (units, _), mix in found.items()), key=_by_capacity)
        totals = [mix.units + self.floor.others for _, mix in mixes]
        shares = expected_shares(self.name, self.pool, snapshot, [int(total) for total in totals])
        served = [min(1.0, total / proposal.need) if proposal.need > 0 else 1.0 for total in totals]
        rungs = zip(mixes, shares or served, served, strict=True)
        return Claim(
            tuple(
                Rung(units, self.shared_uses(mix, counts), kept, part) for (units, mix), kept, part in rungs
            ),
            weight_of(snapshot),
            {
                of_class(one.name): ClassOfClaim(
                    one.speed, one.price_per_hour, one.name not in self.slow, one.gpus, one.kinds
                )
                for one in self.offers
            },
        )

    def scarce(self, limited: Mapping[str, int], bounds: Uses) -> dict[str, int]:
        """By class that is limited, or the GPUs of whose kind are: how many there may be."""
        found = dict[str, int]()
        for one in self.offers:
            counts = [limited[one.name]] if one.name in limited else []
            counts += [int(bounds[name] // one.gpus) for name in one.kinds if one.gpus and name in bounds]
            if counts:
                found[one.name] = max(0, min(counts))
        return found

    def _steps(self) -> list[float]:
        span = int(self.units - self.least + 1e-9)
        stride = max(1, math.ceil(span / MOST_RUNGS))
        steps = [self.least + step for step in range(0, span + 1, stride)]
        return steps + ([self.units] if steps[-1] < self.units - 1e-9 else [])

    def plain_units(self, mix: ClassMix) -> float:
        """Units of a mix that are not on spot machines."""
        pairs = zip(self.offers, mix.counts, strict=True)
        return sum(one.speed * count for one, count in pairs if not one.spot)

    def uses(self, mix: ClassMix) -> dict[str, float]:
        """What a mix takes of what may be limited."""
        counts = zip(self.offers, mix.counts, strict=True)
        found = {MONEY: mix.price_per_hour, GPUS: float(mix.gpus)}
        for one, count in counts:
            found[of_class(one.name)] = float(count)
            for name in one.kinds:
                found[name] = found.get(name, 0.0) + one.gpus * count
        return found

    def shared_uses(self, mix: ClassMix, limits: Container[str]) -> dict[str, float]:
        """As `uses`, without GPUs where no number of them limits classes: they are of several kinds."""
        return {name: amount for name, amount in self.uses(mix).items() if name != GPUS or GPUS in limits}


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


def at_most(offers: Sequence[ClassOffer], most: Mapping[str, float]) -> list[ClassOffer]:
    """The offers with no more of each class than `most` says."""
    return [replace(one, most=int(min(one.most, most.get(one.name, one.most) + 1e-9))) for one in offers]


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


def _gpus_of(pool: AnyPool, replicas: Sequence[Replica], kinds: Sequence[str]) -> dict[str, float]:
    found = dict.fromkeys((GPUS, *kinds), 0.0)
    for one in replicas:
        gpus = gpus_of(pool, one.replica_class)
        for name in (GPUS, *counted_in(pool.class_named(one.replica_class).gpu, kinds)):
            found[name] += gpus
    return found


def _ours_by_class(pool: AnyPool, replicas: Sequence[Replica]) -> dict[str, int]:
    found = dict.fromkeys(pool.speeds, 0)
    for one in replicas:
        found[pool.class_named(one.replica_class).name] += one.ours
    return found
