"""Which neutral workers the coordinators' planners may move until the next plan. Pure.

All of them may move at once, and each side still keeps its least, its floor of replicas that are not on spot machines,
and one worker, and has no more than its most. Bound are those that an action of this plan names, too, and those of a
class that is of no use on the other side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoscaler.classes.class_shares import floor_holds, share_of
from autoscaler.plan import PoolPlan, ScalingPlan
from autoscaler.reconcile import Action, Drain, Lean, ReplicaView, Start, in_state
from autoscaler.snapshot import OTHER_POOL, POOLS, PoolName, ReplicaState

_PENDING = (ReplicaState.READY, ReplicaState.STARTING)


def movable_workers(
    plan: ScalingPlan, pools: Mapping[PoolName, Sequence[ReplicaView]], actions: Sequence[Action]
) -> frozenset[str]:
    """Their names; none where the plan leaves no room."""
    if not plan.rooms:
        return frozenset()
    named = {name for action in actions for name in _names(action)}
    turned = {action.name: action.pool for action in actions if isinstance(action, Lean)}
    found = set[str]()
    for pool in POOLS:
        other = OTHER_POOL[pool]
        coming = [one for one in pools[other] if one.state in _PENDING and one.name not in named]
        coming += [one for one in pools[pool] if turned.get(one.name) == other]
        there = sum(_speed(plan.pool(other), one) for one in coming)
        ready = [one for one in in_state(pools[pool], ReplicaState.READY) if one.name not in named]
        for one in _spare(plan, pool, ready):
            there += _speed(plan.pool(other), one)
            if there > plan.rooms[other].most + 1e-9:
                break
            if _is_of_use(plan.pool(other), one):
                found.add(one.name)
    return frozenset(found)


def _spare(plan: ScalingPlan, pool: PoolName, ready: Sequence[ReplicaView]) -> list[ReplicaView]:
    """Those that a side can do without all at once, slow ones first. The choice stays from plan to plan."""
    wanted = plan.pool(pool)
    kept: list[ReplicaView] = []
    left = sorted(ready, key=lambda one: _kept_first(wanted, one))
    while left and not (kept and _is_enough(plan, pool, kept)):
        kept.append(left.pop(0))
    return [one for one in reversed(left) if one.neutral]


def _is_enough(plan: ScalingPlan, pool: PoolName, kept: Sequence[ReplicaView]) -> bool:
    wanted = plan.pool(pool)
    holds = not wanted.mix or floor_holds(wanted, [one for one in kept if one.ours])
    return holds and sum(_speed(wanted, one) for one in kept) >= plan.rooms[pool].least - 1e-9


def _kept_first(wanted: PoolPlan, one: ReplicaView) -> tuple[bool, bool, float, float, str]:
    spot = bool(wanted.mix) and share_of(wanted, one.replica_class).spot
    return one.neutral, spot, -_speed(wanted, one), one.created_wall_s, one.name


def _speed(wanted: PoolPlan, one: ReplicaView) -> float:
    return share_of(wanted, one.replica_class).speed if wanted.mix else 1.0


def _is_of_use(wanted: PoolPlan, one: ReplicaView) -> bool:
    return not wanted.mix or share_of(wanted, one.replica_class).most > 0


def _names(action: Action) -> tuple[str, ...]:
    match action:
        case Start():
            return ()
        case Drain(names=names):
            return names
        case _:
            return (action.name,)
