"""Actions that bring pools of several classes to their mixes, beside `reconcile` for all others. Pure, level-triggered.

A replica that is too much ends only once those in rotation carry without it what is wanted, and those of them that are
not on spot machines the floor; spot machines go first, and come last. Nothing is started for
which the budget has no room beside all that exists, what drains included: where old and new together are too dear,
the old one ends first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autoscaler.plan import ClassShare, PoolPlan, ScalingPlan
from autoscaler.reconcile import (
    Action,
    Activate,
    Bounds,
    Drain,
    ReplicaView,
    Start,
    in_state,
    least_loaded,
    oldest,
    reconcile,
)
from autoscaler.snapshot import POOLS, PoolClass, PoolName, ReplicaState

_LIVE = (ReplicaState.READY, ReplicaState.STANDBY, ReplicaState.STARTING, ReplicaState.OVERDUE)


def reconcile_classes(
    plan: ScalingPlan,
    pools: Mapping[PoolName, Sequence[ReplicaView]],
    bounds: Mapping[PoolName, Bounds],
    paused: Collection[PoolClass] = (),
) -> tuple[Action, ...]:
    """As `reconcile`, for pools with and without classes. A class that is `paused` holds up no other."""
    classed = [pool for pool in POOLS if plan.pool(pool).mix]
    paused_pools = {pool for pool, _ in paused}
    if not classed:
        return reconcile(plan, pools, bounds, paused_pools)
    others: Mapping[PoolName, Sequence[ReplicaView]] = {
        pool: () if pool in classed else pools[pool] for pool in POOLS
    }
    nothing = Bounds(0, 0)
    actions = list(
        reconcile(plan, others, {p: nothing if p in classed else bounds[p] for p in POOLS}, paused_pools)
    )
    room = math.inf
    if plan.budget_per_hour is not None:
        room = plan.budget_per_hour - sum(price_per_hour(plan.pool(p), pools[p]) for p in classed)
    places = dict(plan.class_room)
    for pool in classed:
        ours = [one for one in pools[pool] if one.ours]
        held = frozenset(name for where, name in paused if where == pool)
        found = _Classed(pool, plan.pool(pool), ours, held).actions(room, places)
        room -= sum(_price(plan.pool(pool), one) for one in found if isinstance(one, Start))
        actions += found
    return tuple(actions)


def price_per_hour(plan: PoolPlan, there: Sequence[ReplicaView]) -> float:
    """What all replicas of ours cost that exist, in whatever state."""
    return sum(share_of(plan, one.replica_class).price_per_hour for one in there if one.ours)


def share_of(plan: PoolPlan, name: str) -> ClassShare:
    """The class of a replica; one that is not known counts as the default."""
    return next((share for share in plan.mix if share.name == name), plan.mix[0])


def _price(plan: PoolPlan, start: Start) -> float:
    return start.count * share_of(plan, start.replica_class).price_per_hour


@dataclass(frozen=True, slots=True)
class _Classed:
    """One pool."""

    pool: PoolName
    plan: PoolPlan
    ours: Sequence[ReplicaView]
    paused: frozenset[str] = frozenset()
    """Classes of which nothing is ordered now."""

    def actions(self, room: float, places: dict[str, int]) -> list[Action]:
        """`room`: money for an hour that may be spent on more. `places`: how many more there may be of limited classes;
        those that are taken are taken off."""
        actions: list[Action] = []
        blocked: list[float] = []
        for share in sorted(self.plan.mix, key=lambda share: share.spot):
            there = self._of(share)
            resting = sorted(in_state(there, ReplicaState.STANDBY), key=oldest)
            lacking = share.count - len(in_state(there, ReplicaState.READY))
            actions += [Activate(self.pool, one.name) for one in resting[: max(0, lacking)]]
            count = 0 if share.name in self.paused else max(0, -self._surplus(share))
            count = min(count, places.get(share.name, count))
            affordable = _affordable(count, share.price_per_hour, room)
            if affordable < count:
                blocked.append(share.price_per_hour)
            if affordable:
                # Where all are alike nobody has to choose.
                name = share.name if len(self.plan.mix) > 1 else ""
                actions.append(Start(self.pool, affordable, name, share.gpus))
                if share.name in places:
                    places[share.name] -= affordable
                room -= affordable * share.price_per_hour
        if not in_state(self.ours, ReplicaState.DRAINING):
            makes_room = bool(blocked) and self._makes_room(min(blocked), room)
            name = self._overdue() or self._superfluous(makes_room)
            actions += [Drain(self.pool, (name,))] if name else []
        # As `reconcile` does: once they have nothing left.
        if empty := tuple(one.name for one in in_state(self.ours, ReplicaState.PREEMPTED) if not one.load):
            actions.append(Drain(self.pool, empty))
        return actions

    def _makes_room(self, price: float, room: float) -> bool:
        """Whether one that costs `price` can be started once what is too much has ended. The last one that serves, and
        carries all, does not end for that: nobody would serve meanwhile."""
        gives = sum(share.price_per_hour * max(0, self._surplus(share)) for share in self.plan.mix)
        ready = in_state(self.ours, ReplicaState.READY)
        if len(ready) == 1 and room >= 0 and self._carried(ready) >= (self.plan.units or 0.0) - 1e-9:
            return False
        return room + gives >= price - 1e-9

    def _of(self, share: ClassShare) -> list[ReplicaView]:
        return [one for one in self.ours if share_of(self.plan, one.replica_class) is share]

    def _surplus(self, share: ClassShare) -> int:
        """Replicas of a class beyond what it shall have; negative: those that are missing."""
        return sum(one.state in _LIVE for one in self._of(share)) - share.count

    def _carried(self, ready: Sequence[ReplicaView]) -> float:
        """Units of these."""
        return sum(share_of(self.plan, one.replica_class).speed for one in ready)

    def _overdue(self) -> str:
        """It holds the place of its replacement, which comes once it is gone."""
        for share in self.plan.mix:
            there = self._of(share)
            overdue = sorted(in_state(there, ReplicaState.OVERDUE), key=oldest)
            if overdue and (share.name not in self.paused or len(there) > share.count):
                return overdue[0].name
        return ""

    def _superfluous(self, makes_room: bool) -> str:
        """The one to drain next; empty: none, or none yet."""
        ready = in_state(self.ours, ReplicaState.READY)
        if not ready and not in_state(self.ours, ReplicaState.STANDBY):
            return ""  # the coordinators may have just restarted
        carried = self._carried(ready)
        wanted = min(self.plan.units or 0.0, sum(one.count * one.speed for one in self.plan.mix))
        for state in (ReplicaState.STARTING, ReplicaState.STANDBY, ReplicaState.READY):
            for share in sorted(self.plan.mix, key=lambda share: not share.spot):
                able = sorted(in_state(self._of(share), state), key=least_loaded)
                if self._surplus(share) <= 0 or not able:
                    continue
                enough = carried - share.speed >= wanted - 1e-9 and self._floor_holds(share, ready)
                gives = makes_room or share.name == self.plan.gives
                if state is not ReplicaState.READY or gives or enough:
                    return able[0].name
        return ""

    def _floor_holds(self, share: ClassShare, ready: Sequence[ReplicaView]) -> bool:
        """Without a replica of this class in rotation."""
        plain = [one for one in ready if not share_of(self.plan, one.replica_class).spot]
        wanted = sum(one.count * one.speed for one in self.plan.mix if not one.spot)
        floor = min(self.plan.floor.within(self.plan.units or 0.0), wanted)
        return share.spot or self._carried(plain) - share.speed >= floor - 1e-9


def _affordable(count: int, price: float, room: float) -> int:
    return count if price <= 0 or math.isinf(room) else max(0, min(count, math.floor((room + 1e-9) / price)))
