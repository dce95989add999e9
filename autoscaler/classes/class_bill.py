"""What a pool of several classes costs: as it is, as it is wanted, and with a unit less or more. Pure, plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoscaler.classes.class_shares import gpus_there, price_per_hour, share_of
from autoscaler.classes.mix import cheapest_mix
from autoscaler.classes.search.offer import ClassOffer
from autoscaler.plan import PoolPlan
from autoscaler.reconcile import ReplicaView


@dataclass(frozen=True, slots=True)
class ClassLine:
    """One class on the bill."""

    name: str
    there: int
    """Replicas of ours that exist, in whatever state."""
    wanted: int
    speed: float
    price_per_hour: float
    """Of one."""
    spot: bool = False
    """Whether its machines may be taken away."""
    standby: int = 0
    """Wanted on standby beside those in rotation."""
    gpus: int = 0
    """Of one."""


@dataclass(frozen=True, slots=True)
class PoolBill:
    """Money for an hour, in the currency of the policy file."""

    classes: tuple[ClassLine, ...]
    there_per_hour: float
    """What all that exists costs, replicas that start or drain included."""
    wanted_per_hour: float
    """Standbys included, as in what follows."""
    fewer_per_hour: float
    """What one unit of capacity less would cost; a unit is a replica of speed 1."""
    more_per_hour: float
    """What one unit more would cost; as much as now where the mix has one to spare, or there are no more."""
    there_gpus: int = 0
    """GPUs of all that exists."""
    wanted_gpus: int = 0


def pool_bill(plan: PoolPlan, there: Sequence[ReplicaView], other: PoolPlan | None = None) -> PoolBill | None:
    """The bill of one pool; None without classes. `other`: the other side of neutral workers, which the limits of the
    classes count as well."""
    if not plan.mix or plan.units is None:
        return None
    ours = [one for one in there if one.ours]
    taken = {share.name: share.count + share.standby for share in other.mix} if other else {}
    offers = [
        ClassOffer(
            s.name, s.speed, s.price_per_hour, max(s.count, s.most - taken.get(s.name, 0)), s.count, s.spot
        )
        for s in plan.mix
    ]
    standbys = sum(share.standby * share.price_per_hour for share in plan.mix)
    fewer, more = (
        standbys + cheapest_mix(offers, units, floor=plan.floor.within(units)).price_per_hour
        for units in (max(0.0, plan.units - 1), plan.units + 1)
    )
    return PoolBill(
        classes=tuple(
            ClassLine(
                share.name,
                sum(share_of(plan, one.replica_class) is share for one in ours),
                share.count,
                share.speed,
                share.price_per_hour,
                share.spot,
                share.standby,
                share.gpus,
            )
            for share in plan.mix
        ),
        there_per_hour=price_per_hour(plan, ours),
        wanted_per_hour=plan.price_per_hour or 0.0,
        fewer_per_hour=fewer,
        more_per_hour=more,
        there_gpus=gpus_there(plan, ours),
        wanted_gpus=sum((share.count + share.standby) * share.gpus for share in plan.mix),
    )
