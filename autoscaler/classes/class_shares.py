"""What the replicas of a pool's classes carry, cost and take, and the room that budgets have beside all that exists."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoscaler.plan import ClassShare, PoolPlan, ScalingPlan
from autoscaler.reconcile import ReplicaView
from autoscaler.snapshot import POOLS, PoolName, ReplicaState

LIVE = (ReplicaState.READY, ReplicaState.STANDBY, ReplicaState.STARTING, ReplicaState.OVERDUE)
"""What has a place among the replicas that a class shall have."""


def share_of(plan: PoolPlan, name: str) -> ClassShare:
    """The class of a replica; one that is not known counts as the default."""
    return next((share for share in plan.mix if share.name == name), plan.mix[0])


def price_per_hour(plan: PoolPlan, there: Sequence[ReplicaView]) -> float:
    """What all replicas of ours cost that exist, in whatever state."""
    return sum(share_of(plan, one.replica_class).price_per_hour for one in there if one.ours)


def gpus_there(plan: PoolPlan, there: Sequence[ReplicaView], kind: str = "") -> int:
    """The GPUs of all replicas of ours that exist, in whatever state; of a kind, by the name of its limit."""
    shares = [share_of(plan, one.replica_class) for one in there if one.ours]
    return sum(share.gpus for share in shares if not kind or kind in share.kinds)


def carried_units(plan: PoolPlan, there: Iterable[ReplicaView]) -> float:
    """Units of these."""
    return sum(share_of(plan, one.replica_class).speed for one in there)


def carry(plan: PoolPlan, ready: Iterable[ReplicaView]) -> bool:
    """Whether these carry what is wanted in rotation."""
    wanted = min(plan.units or 0.0, sum(one.count * one.speed for one in plan.mix))
    return carried_units(plan, ready) >= wanted - 1e-9


def floor_holds(plan: PoolPlan, ready: Iterable[ReplicaView]) -> bool:
    """Whether enough of it is not on spot machines with these in rotation."""
    plain = [one for one in ready if not share_of(plan, one.replica_class).spot]
    wanted = sum(one.count * one.speed for one in plan.mix if not one.spot)
    return carried_units(plan, plain) >= min(plan.floor.within(plan.units or 0.0), wanted) - 1e-9


def places_left(plan: ScalingPlan, pools: Mapping[PoolName, Sequence[ReplicaView]]) -> dict[str, int]:
    """How many more there may be of each class on both sides, of neutral workers."""
    found = dict[str, int]()
    for share in plan.prefill.mix:
        there = [
            one
            for pool in POOLS
            for one in pools[pool]
            if one.ours
            and one.state in LIVE
            and share_of(plan.pool(pool), one.replica_class).name == share.name
        ]
        found[share.name] = max(share.most, share_of(plan.decode, share.name).most) - len(there)
    return found


@dataclass(slots=True)
class ClassRoom:
    """What may be taken beside all that exists."""

    money: float = math.inf
    """For an hour."""
    gpus: float = math.inf
    kinds: dict[str, float] = field(default_factory=dict)
    """GPUs of a kind, by the name of its limit."""
    places: dict[str, int] = field(default_factory=dict)
    """How many more there may be of limited classes."""

    def take(self, share: ClassShare, count: int) -> int:
        """How many of these replicas there is room for, which is taken."""
        count = min(count, self.places.get(share.name, count))
        of_kinds = [(float(share.gpus), left) for name, left in self.kinds.items() if name in share.kinds]
        for each, left in ((share.price_per_hour, self.money), (float(share.gpus), self.gpus), *of_kinds):
            if each > 0 and not math.isinf(left):
                count = min(count, math.floor((left + 1e-9) / each))
        count = max(0, count)
        self.money -= count * share.price_per_hour
        self.gpus -= count * share.gpus
        for name in self.kinds:
            self.kinds[name] -= count * share.gpus if name in share.kinds else 0
        if share.name in self.places:
            self.places[share.name] -= count
        return count

    def with_ended(self, ended: Sequence[tuple[ClassShare, int]]) -> ClassRoom:
        """The same once so many of these have ended."""
        money = sum(share.price_per_hour * count for share, count in ended)
        gpus = sum(share.gpus * count for share, count in ended)
        kinds = {
            name: left + sum(share.gpus * count for share, count in ended if name in share.kinds)
            for name, left in self.kinds.items()
        }
        return replace(self, money=self.money + money, gpus=self.gpus + gpus, kinds=kinds)

    def holds(self, share: ClassShare) -> bool:
        """Whether there is money, and GPUs, for one more."""
        of_kinds = [left for name, left in self.kinds.items() if name in share.kinds]
        return self.money >= share.price_per_hour - 1e-9 and min(self.gpus, *of_kinds, math.inf) >= share.gpus

    @property
    def is_kept(self) -> bool:
        """Whether there is no more than there may be."""
        return self.money >= 0 and min(self.gpus, *self.kinds.values(), math.inf) >= 0
