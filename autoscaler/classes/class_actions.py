"""Actions that bring pools of several classes to their mixes, beside `reconcile` for all others. Pure, level-triggered.

A replica that is too much ends only once those in rotation carry without it what is wanted, and those of them that are
not on spot machines the floor; spot machines go first, and come last. Nothing is started for
which the budgets have no room beside all that exists, what drains included: where old and new together are too dear, or
take too many GPUs, the old one ends first. A standby of any class joins while those in rotation do not carry what is
wanted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoscaler.plan import ClassShare, PoolPlan, ScalingPlan
from autoscaler.reconcile import (
    Action,
    Activate,
    Bounds,
    Drain,
    ReplicaView,
    Rest,
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
    actions = list(_of_others(plan, classed, pools, bounds, paused_pools))
    room = _Room(places=dict(plan.class_room))
    if plan.budget_per_hour is not None:
        room.money = plan.budget_per_hour - sum(price_per_hour(plan.pool(p), pools[p]) for p in classed)
    if plan.gpu_budget is not None:
        room.gpus = plan.gpu_budget - sum(gpus_there(plan.pool(p), pools[p]) for p in classed)
    for pool in classed:
        ours = [one for one in pools[pool] if one.ours]
        held = frozenset(name for where, name in paused if where == pool)
        actions += _Classed(pool, plan.pool(pool), ours, held).actions(room)
    return tuple(actions)


def _of_others(
    plan: ScalingPlan,
    classed: Collection[PoolName],
    pools: Mapping[PoolName, Sequence[ReplicaView]],
    bounds: Mapping[PoolName, Bounds],
    paused: Collection[PoolName],
) -> tuple[Action, ...]:
    """Those of pools without classes."""
    rest = {pool: () if pool in classed else pools[pool] for pool in POOLS}
    nothing, none = Bounds(0, 0), PoolPlan(0)
    return reconcile(
        replace(
            plan,
            prefill=none if "prefill" in classed else plan.prefill,
            decode=none if "decode" in classed else plan.decode,
        ),
        rest,
        {pool: nothing if pool in classed else bounds[pool] for pool in POOLS},
        paused,
    )


def price_per_hour(plan: PoolPlan, there: Sequence[ReplicaView]) -> float:
    """What all replicas of ours cost that exist, in whatever state."""
    return sum(share_of(plan, one.replica_class).price_per_hour for one in there if one.ours)


def gpus_there(plan: PoolPlan, there: Sequence[ReplicaView]) -> int:
    """The GPUs of all replicas of ours that exist, in whatever state."""
    return sum(share_of(plan, one.replica_class).gpus for one in there if one.ours)


def share_of(plan: PoolPlan, name: str) -> ClassShare:
    """The class of a replica; one that is not known counts as the default."""
    return next((share for share in plan.mix if share.name == name), plan.mix[0])


@dataclass(slots=True)
class _Room:
    """What may be taken beside all that exists."""

    money: float = math.inf
    """For an hour."""
    gpus: float = math.inf
    places: dict[str, int] = field(default_factory=dict)
    """How many more there may be of limited classes."""

    def take(self, share: ClassShare, count: int) -> int:
        """How many of these replicas there is room for, which is taken."""
        count = min(count, self.places.get(share.name, count))
        for each, left in ((share.price_per_hour, self.money), (float(share.gpus), self.gpus)):
            if each > 0 and not math.isinf(left):
                count = min(count, math.floor((left + 1e-9) / each))
        count = max(0, count)
        self.money -= count * share.price_per_hour
        self.gpus -= count * share.gpus
        if share.name in self.places:
            self.places[share.name] -= count
        return count


@dataclass(frozen=True, slots=True)
class _Classed:
    """One pool."""

    pool: PoolName
    plan: PoolPlan
    ours: Sequence[ReplicaView]
    paused: frozenset[str] = frozenset()
    """Classes of which nothing is ordered now."""

    def actions(self, room: _Room) -> list[Action]:
        """`room` is what may be taken; what is taken is taken off."""
        joining, leaving = self._rotation()
        actions: list[Action] = [Activate(self.pool, one.name) for one in joining]
        actions += [Rest(self.pool, one.name) for one in leaving]
        starts, blocked = self._starts(room)
        for share in self.plan.mix:
            if count := starts.get(share.name):
                # Where all are alike nobody has to choose.
                name = share.name if len(self.plan.mix) > 1 else ""
                actions.append(Start(self.pool, count, name, share.gpus, share.gpu))
        if not in_state(self.ours, ReplicaState.DRAINING):
            makes_room = any(self._makes_room(share, room) for share in blocked)
            moving = {one.name for one in (*joining, *leaving)}
            name = self._overdue() or self._superfluous(makes_room, moving)
            actions += [Drain(self.pool, (name,))] if name else []
        # As `reconcile` does: once they have nothing left.
        if empty := tuple(one.name for one in in_state(self.ours, ReplicaState.PREEMPTED) if not one.load):
            actions.append(Drain(self.pool, empty))
        return actions

    def _starts(self, room: _Room) -> tuple[dict[str, int], list[ClassShare]]:
        """How many to start of each class, and the classes of which more are wanted in rotation than there is room for.
        Spot machines and then standbys come last."""
        starts: Counter[str] = Counter()
        blocked = []
        for of_standby in (False, True):
            for share in sorted(self.plan.mix, key=lambda share: share.spot):
                lacking = -self._surplus(share) - starts[share.name]
                count = lacking if of_standby else lacking - share.standby
                count = 0 if share.name in self.paused else max(0, count)
                able = min(count, room.places.get(share.name, count))
                got = room.take(share, able)
                starts[share.name] += got
                if got < able and not of_standby:
                    blocked.append(share)
        return starts, blocked

    def _rotation(self) -> tuple[list[ReplicaView], list[ReplicaView]]:
        """Standbys to take into rotation: what a class lacks there, then whatever rests, while what is ready does not
        carry what is wanted. And replicas to take out of it: what a class has too many there and too few on standby,
        once the others carry without."""
        ready = in_state(self.ours, ReplicaState.READY)
        resting = sorted(in_state(self.ours, ReplicaState.STANDBY), key=oldest)
        joining: list[ReplicaView] = []
        for share in self.plan.mix:
            lacking = share.count - len(self._of(share, ready))
            joining += self._of(share, resting)[: max(0, lacking)]
        for one in resting:
            if one not in joining and not self._carry([*ready, *joining]):
                joining.append(one)
        leaving: list[ReplicaView] = []
        for share in self.plan.mix:
            kept = [one for one in resting if one not in joining]
            lacking = share.standby - len(self._of(share, kept))
            spare = len(self._of(share, [*ready, *joining])) - share.count
            for one in sorted(self._of(share, ready), key=least_loaded)[: max(0, min(lacking, spare))]:
                left = [other for other in ready if other not in (*leaving, one)]
                if self._carry(left) and (share.spot or self._floor_holds(left)):
                    leaving.append(one)
        return joining, leaving

    def _carry(self, ready: Sequence[ReplicaView]) -> bool:
        """Whether these carry what is wanted in rotation."""
        wanted = min(self.plan.units or 0.0, sum(one.count * one.speed for one in self.plan.mix))
        return self._carried(ready) >= wanted - 1e-9

    def _makes_room(self, blocked: ClassShare, room: _Room) -> bool:
        """Whether one of this class can be started once what is too much has ended. The last one that serves, and
        carries all, does not end for that: nobody would serve meanwhile."""
        surplus = [(share, max(0, self._surplus(share))) for share in self.plan.mix]
        money = room.money + sum(share.price_per_hour * count for share, count in surplus)
        gpus = room.gpus + sum(share.gpus * count for share, count in surplus)
        ready = in_state(self.ours, ReplicaState.READY)
        within = room.money >= 0 and room.gpus >= 0
        if len(ready) == 1 and within and self._carried(ready) >= (self.plan.units or 0.0) - 1e-9:
            return False
        return money >= blocked.price_per_hour - 1e-9 and gpus >= blocked.gpus

    def _of(self, share: ClassShare, there: Sequence[ReplicaView]) -> list[ReplicaView]:
        return [one for one in there if share_of(self.plan, one.replica_class) is share]

    def _surplus(self, share: ClassShare) -> int:
        """Replicas of a class beyond what it shall have; negative: those that are missing."""
        live = sum(one.state in _LIVE for one in self._of(share, self.ours))
        return live - share.count - share.standby

    def _carried(self, ready: Sequence[ReplicaView]) -> float:
        """Units of these."""
        return sum(share_of(self.plan, one.replica_class).speed for one in ready)

    def _overdue(self) -> str:
        """It holds the place of its replacement, which comes once it is gone."""
        for share in self.plan.mix:
            there = self._of(share, self.ours)
            overdue = sorted(in_state(there, ReplicaState.OVERDUE), key=oldest)
            if overdue and (share.name not in self.paused or len(there) > share.count + share.standby):
                return overdue[0].name
        return ""

    def _superfluous(self, makes_room: bool, moving: Collection[str]) -> str:
        """The one to drain next; empty: none, or none yet. None of those that are `moving` in or out of rotation."""
        ready = in_state(self.ours, ReplicaState.READY)
        if not (ready or in_state(self.ours, ReplicaState.STANDBY) or self.plan.given_up):
            return ""  # the coordinators may have just restarted
        for state in (ReplicaState.STARTING, ReplicaState.STANDBY, ReplicaState.READY):
            for share in sorted(self.plan.mix, key=lambda share: not share.spot):
                of_class = self._of(share, in_state(self.ours, state))
                able = sorted((one for one in of_class if one.name not in moving), key=least_loaded)
                enough_rest = state is ReplicaState.STANDBY and len(of_class) <= share.standby
                if self._surplus(share) <= 0 or not able or enough_rest:
                    continue
                left = [one for one in ready if one.name not in moving and one is not able[0]]
                enough = self._carry(left) and (share.spot or self._floor_holds(left))
                gives = makes_room or share.name == self.plan.gives
                if state is not ReplicaState.READY or gives or enough:
                    return able[0].name
        return ""

    def _floor_holds(self, ready: Sequence[ReplicaView]) -> bool:
        """With these in rotation."""
        plain = [one for one in ready if not share_of(self.plan, one.replica_class).spot]
        wanted = sum(one.count * one.speed for one in self.plan.mix if not one.spot)
        floor = min(self.plan.floor.within(self.plan.units or 0.0), wanted)
        return self._carried(plain) >= floor - 1e-9
