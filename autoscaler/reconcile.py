"""Compares a plan with the replicas that exist and returns the actions. Pure and level-triggered.

Every tick starts from the observed replicas, never from earlier actions: a failed action is decided again, and a
restarted autoscaler continues where the last one stopped. Ordered replicas that do not exist yet count, so nothing
is started twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autoscaler.actuators.actuator import ActualReplica
from autoscaler.plan import ScalingPlan
from autoscaler.snapshot import POOLS, PoolName, Replica, ReplicaState


@dataclass(frozen=True, slots=True)
class Bounds:
    """Replicas in rotation of one pool, pending ones counted. Warm standby comes on top."""

    min: int
    max: int


@dataclass(frozen=True, slots=True)
class Start:
    """Order `count` more replicas."""

    pool: PoolName
    count: int
    replica_class: str = ""
    """Of which class; empty: the pool has none."""
    gpus_each: int | None = None
    """GPUs of one replica; None: as many as the pool's replicas have."""
    gpu: str = ""
    """Their kind; empty: any."""


@dataclass(frozen=True, slots=True)
class Activate:
    """Take a warm standby into rotation."""

    pool: PoolName
    name: str


@dataclass(frozen=True, slots=True)
class Rest:
    """Take a replica out of rotation and keep it as a warm standby."""

    pool: PoolName
    name: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Let these replicas finish their requests and end."""

    pool: PoolName
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lean:
    """Let a neutral worker of the other pool lean to this one."""

    pool: PoolName
    name: str


_COMING = (ReplicaState.READY, ReplicaState.STANDBY, ReplicaState.STARTING)
Action = Start | Activate | Rest | Drain | Lean


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica that exists, with what the coordinators know of it."""

    name: str
    state: ReplicaState
    load: float
    created_wall_s: float
    ours: bool = True
    """Whether the actuator has it. Others are capacity; nothing is done to them, but that neutral ones may lean
    elsewhere."""
    neutral: bool = False
    replica_class: str = ""
    """Empty: the default one."""


def members(
    pool: PoolName,
    actual: Iterable[ActualReplica],
    seen: Mapping[str, Replica],
    others: Iterable[Replica] = (),
    *,
    neutral: bool = False,
) -> tuple[ReplicaView, ...]:
    """The replicas of one pool. The actuator says which exist, the coordinators in which state they are.

    `others` are registered workers that the actuator does not have, as those of another host: they count, and are left
    alone. `neutral`: those that no coordinator sees are taken for neutral workers, as such are started.
    """
    found = [
        ReplicaView(other.name, other.state, other.load, 0.0, False, other.neutral, other.replica_class)
        for other in others
    ]
    for replica in actual:
        if replica.pool != pool:
            continue
        known = seen.get(replica.name)
        state = known.state if known is not None else ReplicaState.STARTING
        if replica.stopping:
            state = ReplicaState.DRAINING
        load = known.load if known is not None else 0.0
        either = known.neutral if known is not None and known.registered else neutral
        # The actuator knows it from the start; what it adopted may say so only itself.
        kind = replica.replica_class or (known.replica_class if known is not None else "")
        found.append(ReplicaView(replica.name, state, load, replica.created_wall_s, True, either, kind))
    return tuple(found)


def reconcile(
    plan: ScalingPlan,
    pools: Mapping[PoolName, Sequence[ReplicaView]],
    bounds: Mapping[PoolName, Bounds],
    paused: Collection[PoolName] = (),
) -> tuple[Action, ...]:
    """Actions that bring both pools to the plan. Idempotent: once they have taken effect there are none.

    Replicas that are preempted do not count, so they are replaced at once, whatever `behavior` says of the number.
    In `paused` pools nothing is ordered and no overdue replica replaced, because the last ones failed. Where one pool
    has more in rotation than it shall, and the other less, standby and starting ones counted, neutral workers change
    sides before anything is started or drained: that takes seconds and no cold start. Those that nobody sees yet, or
    any more, count on either side: they can lean there as soon as they are seen.
    """
    goals = {pool: min(max(plan.pool(pool).desired, bounds[pool].min), bounds[pool].max) for pool in POOLS}
    actions: list[Action] = []
    pools = _leant(plan, goals, pools, actions)
    for pool in POOLS:
        wanted, desired = plan.pool(pool), goals[pool]
        others = [member for member in pools[pool] if not member.ours]
        serving = len(in_state(others, ReplicaState.READY))
        spare = len(in_state(others, ReplicaState.STANDBY))
        coming = len(in_state(others, ReplicaState.STARTING))
        # What the workers of others leave to do.
        desired -= serving + min(coming, max(0, desired - serving))
        standby = max(0, wanted.standby) - spare
        ours = [member for member in pools[pool] if member.ours]
        actions += _reconcile_pool(
            pool, max(0, desired), max(0, standby), ours, pool in paused, wanted.given_up
        )
    return tuple(actions)


def _leant(
    plan: ScalingPlan,
    goals: Mapping[PoolName, int],
    pools: Mapping[PoolName, Sequence[ReplicaView]],
    actions: list[Action],
) -> Mapping[PoolName, Sequence[ReplicaView]]:
    """The pools once neutral workers have changed sides, with the actions for it. The total stays."""
    after = {pool: list(pools[pool]) for pool in POOLS}
    sides: tuple[tuple[PoolName, PoolName], ...] = (("prefill", "decode"), ("decode", "prefill"))
    for side, other in sides:
        while sum(member.state in _COMING for member in after[side]) < goals[side]:
            moved = _to_spare(after[other], goals[other], plan.pool(other).standby)
            if moved is None:
                break
            if moved.state is ReplicaState.READY:
                actions.append(Lean(side, moved.name))
            after[other].remove(moved)
            after[side].append(moved)
    return after


def _to_spare(there: Sequence[ReplicaView], goal: int, standby: int) -> ReplicaView | None:
    """The neutral worker that a pool can do without, if it has one."""
    ready = in_state(there, ReplicaState.READY)
    able = sorted((member for member in ready if member.neutral), key=least_loaded)
    if able and len(ready) > goal:
        return able[0]
    starting = [one for one in in_state(there, ReplicaState.STARTING) if one.neutral and one.ours]
    coming = sum(member.state in _COMING for member in there)
    return min(starting, key=oldest) if starting and coming > goal + max(0, standby) else None


def _reconcile_pool(
    pool: PoolName,
    desired: int,
    standby: int,
    there: Sequence[ReplicaView],
    paused: bool,
    given_up: bool,
) -> list[Action]:
    actions: list[Action] = []
    ready = sorted(in_state(there, ReplicaState.READY), key=least_loaded)
    resting = sorted(in_state(there, ReplicaState.STANDBY), key=oldest)
    starting = sorted(in_state(there, ReplicaState.STARTING), key=oldest)
    overdue = sorted(in_state(there, ReplicaState.OVERDUE), key=oldest)
    preempted = in_state(there, ReplicaState.PREEMPTED)
    draining = in_state(there, ReplicaState.DRAINING)
    # A standby serves at once; a starting replica replaces it later.
    while resting and len(ready) < desired:
        ready.append(resting.pop(0))
        actions.append(Activate(pool, ready[-1].name))
    while len(ready) > desired and len(resting) < standby:
        resting.append(ready.pop(0))
        actions.append(Rest(pool, resting[-1].name))
    # Overdue ones hold the place of their replacements, which come one by one.
    surplus = len(ready) + len(resting) + len(starting) + len(overdue) - desired - standby
    if surplus < 0 and not paused:
        actions.append(Start(pool, -surplus))
    if overdue and not draining and (surplus > 0 or not paused):
        actions.append(Drain(pool, (overdue[0].name,)))
    elif surplus > 0 and not draining and (ready or resting or (starting and given_up)):
        actions.append(Drain(pool, (_superfluous(ready, resting, starting, standby).name,)))
    # Once they have nothing left: a drain has a deadline of its own, which may be before their machines end.
    if empty := tuple(member.name for member in preempted if not member.load):
        actions.append(Drain(pool, empty))
    return actions


def _superfluous(
    ready: Sequence[ReplicaView],
    resting: Sequence[ReplicaView],
    starting: Sequence[ReplicaView],
    standby: int,
) -> ReplicaView:
    """The replica to drain first: starting, then surplus standby, then the least loaded."""
    if starting:
        return starting[-1]
    if len(resting) > standby:
        return resting[-1]
    return ready[0]


@dataclass(frozen=True, slots=True)
class PlannedRotation:
    """Where the coordinators are to have replicas of our own, by name. One that starts or ends is where it was put."""

    standby: frozenset[str] = frozenset()
    active: frozenset[str] = frozenset()
    sleeping: frozenset[str] = frozenset()
    """Of `standby`."""
    leanings: Mapping[str, PoolName] = field(default_factory=dict)
    """Of all neutral workers in rotation, also those of others."""
    lend: bool = False
    """Whether decode is lent to prefill."""
    movable: frozenset[str] = frozenset()
    """Those of `leanings` that coordinators' planners may move until the next plan."""


def planned_rotation(
    plan: ScalingPlan, pools: Mapping[PoolName, Sequence[ReplicaView]], actions: Sequence[Action]
) -> PlannedRotation:
    """Where everything is once the actions have been carried out."""
    ours = {member.name: pool for pool in POOLS for member in pools[pool] if member.ours}
    there = [member for pool in POOLS for member in pools[pool] if member.ours]
    standby = {member.name for member in in_state(there, ReplicaState.STANDBY)}
    active = {member.name for member in in_state(there, ReplicaState.READY)}
    leanings = {
        member.name: pool
        for pool in POOLS
        for member in pools[pool]
        if member.neutral and member.state is ReplicaState.READY
    }
    ending: set[str] = set()
    for action in actions:
        match action:
            case Activate(name=name):
                standby.discard(name)
                active.add(name)
            case Rest(name=name):
                active.discard(name)
                standby.add(name)
            case Drain(names=names):
                # Out of rotation before it drains: no request is routed to a worker that refuses it.
                ending.update(active.intersection(names))
                active.difference_update(names)
                standby.update(names)
            case Lean(pool, name):
                leanings[name] = pool
    sleeping = {name for name in standby - ending if name in ours and plan.pool(ours[name]).sleep}
    lend = plan.lend_decode_to_prefill
    return PlannedRotation(frozenset(standby), frozenset(active), frozenset(sleeping), leanings, lend)


def in_state(there: Sequence[ReplicaView], state: ReplicaState) -> list[ReplicaView]:
    """Those in this state, in the same order."""
    return [member for member in there if member.state is state]


def least_loaded(member: ReplicaView) -> tuple[float, float, str]:
    """Sorts the one to drain first to the front."""
    # Ties: the youngest first, its prefix cache holds least.
    return member.load, -member.created_wall_s, member.name


def oldest(member: ReplicaView) -> tuple[float, str]:
    """Sorts by age."""
    return member.created_wall_s, member.name
