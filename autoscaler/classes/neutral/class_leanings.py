"""Which neutral workers of classes change sides, before anything is started or ended for the mixes. Pure.

By class: what one side has too much of, and the other too little, leans there. A worker in rotation leaves its side
only once the others there carry what is wanted of it, and hold its floor, unless both sides carry it at once when all
change that shall. Until then it is promised: the other side orders none in its place, and nobody ends it. One that
starts counts on the side that lacks it at once; it leans there as soon as it is seen.

By capacity: one that is too much leans to the other side while that does not carry what is wanted, of whatever class
it is: what was ordered there starts meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoscaler.classes.class_shares import LIVE, carried_units, carry, floor_holds, share_of
from autoscaler.plan import ClassShare, ScalingPlan
from autoscaler.reconcile import Lean, ReplicaView, in_state, least_loaded, oldest
from autoscaler.snapshot import OTHER_POOL, POOLS, PoolName, ReplicaState


@dataclass(frozen=True, slots=True)
class Leant:
    """The pools once workers have changed sides. The total stays."""

    pools: Mapping[PoolName, Sequence[ReplicaView]]
    actions: Sequence[Lean]
    promised: Mapping[PoolName, Counter[str]]
    """By side and class: workers in rotation on the other side that come here once that can do without."""


def lean_classes(plan: ScalingPlan, pools: Mapping[PoolName, Sequence[ReplicaView]]) -> Leant:
    """Who changes sides for this plan."""
    sides = _Sides(plan, {pool: list(pools[pool]) for pool in POOLS})
    for pool in POOLS:
        sides.count_starting(pool)
    promised = {pool: sides.due(pool) for pool in POOLS}
    moved = [one for pool in POOLS for one in promised[pool]]
    if sides.carry_after(promised):
        for pool in POOLS:
            for one in promised[pool]:
                sides.move(pool, one)
    else:
        for pool in POOLS:
            for one in promised[pool]:
                if sides.can_do_without(OTHER_POOL[pool], one):
                    sides.move(pool, one)
    left = {
        pool: Counter(
            share_of(plan.pool(pool), one.replica_class).name
            for one in promised[pool]
            if one not in sides.there[pool]
        )
        for pool in POOLS
    }
    for pool in POOLS:
        sides.help_out(pool, moved)
    return Leant(sides.there, sides.actions, left)


@dataclass(slots=True)
class _Sides:
    plan: ScalingPlan
    there: dict[PoolName, list[ReplicaView]]
    actions: list[Lean] = field(default_factory=list)

    def count_starting(self, pool: PoolName) -> None:
        """Those that start on the other side and are too many there, where this one lacks them."""
        other = OTHER_POOL[pool]
        for share in self.plan.pool(pool).mix:
            starting = sorted(self._of(other, share, ReplicaState.STARTING), key=oldest)
            spare = min(self._lack(pool, share), -self._lack(other, share), len(starting))
            # Those in rotation go first: they are there.
            spare -= len(self._due_of(pool, share))
            for one in starting[: max(0, spare)]:
                self.there[other].remove(one)
                self.there[pool].append(one)

    def due(self, pool: PoolName) -> list[ReplicaView]:
        """Those in rotation on the other side that this one shall have."""
        return [one for share in self.plan.pool(pool).mix for one in self._due_of(pool, share)]

    def _due_of(self, pool: PoolName, share: ClassShare) -> list[ReplicaView]:
        other = OTHER_POOL[pool]
        ready = sorted(self._of(other, share, ReplicaState.READY), key=least_loaded)
        spare = len(ready) - self._share(other, share.name).count
        count = min(self._lack(pool, share), -self._lack(other, share), spare)
        return ready[: max(0, count)]

    def carry_after(self, moves: Mapping[PoolName, Sequence[ReplicaView]]) -> bool:
        """Whether each side carries what is wanted of it, or no less than now, once all of these have moved."""
        for pool in POOLS:
            ready = self._ready(pool)
            after = [one for one in ready if one not in moves[OTHER_POOL[pool]]] + list(moves[pool])
            if not self._is_enough(pool, after, ready):
                return False
        return True

    def _is_enough(self, pool: PoolName, after: Sequence[ReplicaView], now: Sequence[ReplicaView]) -> bool:
        plan = self.plan.pool(pool)
        no_less = carried_units(plan, after) >= carried_units(plan, now) - 1e-9
        return (no_less or carry(plan, after)) and (floor_holds(plan, after) or not floor_holds(plan, now))

    def can_do_without(self, pool: PoolName, one: ReplicaView) -> bool:
        """Whether those that stay in rotation carry what is wanted, and hold the floor."""
        plan = self.plan.pool(pool)
        left = [other for other in self._ready(pool) if other is not one]
        spot = share_of(plan, one.replica_class).spot
        return carry(plan, left) and (spot or floor_holds(plan, left))

    def move(self, pool: PoolName, one: ReplicaView) -> None:
        """One in rotation leans to this side from now on."""
        self.there[OTHER_POOL[pool]].remove(one)
        self.there[pool].append(one)
        self.actions.append(Lean(pool, one.name))

    def help_out(self, pool: PoolName, due: Sequence[ReplicaView]) -> None:
        """Those that the other side has too many of, while this one does not carry what is wanted."""
        other, plan = OTHER_POOL[pool], self.plan.pool(pool)
        for share in self.plan.pool(other).mix:
            ready = sorted(self._of(other, share, ReplicaState.READY), key=least_loaded)
            spare = [one for one in ready if one not in due][: max(0, -self._lack(other, share))]
            for one in spare:
                if carry(plan, self._ready(pool)):
                    return
                if self.can_do_without(other, one):
                    self.move(pool, one)

    def _lack(self, pool: PoolName, share: ClassShare) -> int:
        """Replicas of a class that one side has too few of; negative: too many."""
        wanted = self._share(pool, share.name)
        there = [one for one in self.there[pool] if one.ours and self._is(pool, one, share)]
        return wanted.count + wanted.standby - sum(one.state in LIVE for one in there)

    def _share(self, pool: PoolName, name: str) -> ClassShare:
        return share_of(self.plan.pool(pool), name)

    def _is(self, pool: PoolName, one: ReplicaView, share: ClassShare) -> bool:
        return self._share(pool, one.replica_class).name == share.name

    def _of(self, pool: PoolName, share: ClassShare, state: ReplicaState) -> list[ReplicaView]:
        """Neutral ones of ours."""
        able = [one for one in in_state(self.there[pool], state) if one.ours and one.neutral]
        return [one for one in able if self._is(pool, one, share)]

    def _ready(self, pool: PoolName) -> list[ReplicaView]:
        return [one for one in in_state(self.there[pool], ReplicaState.READY) if one.ours]
