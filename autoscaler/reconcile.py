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
from autoscaler.snapshot import OTHER_POOL, POOLS, PoolName, Replica, ReplicaState


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
class ChangeRole:
    """Give a worker of the other pool this pool's role."""

    pool: PoolName
    name: str


_COMING = (ReplicaState.READY, ReplicaState.STANDBY, ReplicaState.STARTING)
Action = Start | Activate | Rest | Drain | ChangeRole


def action_word(action: Action) -> str:
    """The kind of an action, as logs, metrics and reports name it."""
    return "change_role" if isinstance(action, ChangeRole) else type(action).__name__.lower()


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica that exists, with what the coordinators know of it."""

    name: str
    state: ReplicaState
    load: float
    created_wall_s: float
    ours: bool = True
    """Whether the actuator has it, and its role is of one pool. Others are capacity; nothing is done to them."""
    can_change_role: bool = False
    """Whether it can take the other pool's role while it runs."""


def members(
    pool: PoolName,
    actual: Iterable[ActualReplica],
    seen: Mapping[str, Replica],
    others: Iterable[Replica] = (),
) -> tuple[ReplicaView, ...]:
    """The replicas of one pool. The actuator says which exist, the coordinators in which state they are.

    `others` are registered workers that the actuator does not have, as those of another host, and workers with both
    roles: they count, and are left alone.
    """
    views = [ReplicaView(other.name, other.state, other.load, 0.0, False) for other in others]
    for replica in actual:
        sighting = seen.get(replica.name)
        if replica.pool != pool or (sighting is not None and sighting.both):
            continue
        state = sighting.state if sighting is not None else ReplicaState.STARTING
        if replica.stopping:
            state = ReplicaState.DRAINING
        load = sighting.load if sighting is not None else 0.0
        can_change_role = sighting is not None and sighting.can_change_role
        views.append(ReplicaView(replica.name, state, load, replica.created_wall_s, True, can_change_role))
    return tuple(views)


def reconcile(
    plan: ScalingPlan,
    pools: Mapping[PoolName, Sequence[ReplicaView]],
    bounds: Mapping[PoolName, Bounds],
    paused: Collection[PoolName] = (),
) -> tuple[Action, ...]:
    """Actions that bring both pools to the plan. Idempotent: once they have taken effect there are none.

    Replicas that are preempted do not count, so they are replaced at once, whatever `behavior` says of the number.
    In `paused` pools nothing is ordered and no overdue replica replaced, because the last ones failed. Where one pool
    has more in rotation than it shall, and the other less, standby and starting ones counted, workers take the other
    role before anything is started or drained: that takes no cold start.
    """
    goals = {pool: min(max(plan.pool(pool).desired, bounds[pool].min), bounds[pool].max) for pool in POOLS}
    actions: list[Action] = []
    if plan.one_shape:
        pools = _change_roles(goals, pools, actions)
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


def _change_roles(
    goals: Mapping[PoolName, int], pools: Mapping[PoolName, Sequence[ReplicaView]], actions: list[Action]
) -> Mapping[PoolName, Sequence[ReplicaView]]:
    """Decides which workers change roles, and adds an action for each. Returns the pools as they are then; the total
    stays."""
    after = {pool: list(pools[pool]) for pool in POOLS}
    for pool in POOLS:
        other = OTHER_POOL[pool]
        while sum(member.state in _COMING for member in after[pool]) < goals[pool]:
            ready = in_state(after[other], ReplicaState.READY)
            able = sorted((one for one in ready if one.ours and one.can_change_role), key=least_loaded)
            if not able or len(ready) <= goals[other]:
                break
            actions.append(ChangeRole(pool, able[0].name))
            after[other].remove(able[0])
            after[pool].append(able[0])
    return after


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
    roles: Mapping[str, PoolName] = field(default_factory=dict)
    """The pool of each replica in rotation that can change its role."""


def planned_rotation(
    pools: Mapping[PoolName, Sequence[ReplicaView]], actions: Sequence[Action]
) -> PlannedRotation:
    """Where everything is once the actions have been carried out."""
    ours = [member for pool in POOLS for member in pools[pool] if member.ours]
    standby = {member.name for member in in_state(ours, ReplicaState.STANDBY)}
    active = {member.name for member in in_state(ours, ReplicaState.READY)}
    roles = {
        member.name: pool
        for pool in POOLS
        for member in in_state(pools[pool], ReplicaState.READY)
        if member.ours and member.can_change_role
    }
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
                active.difference_update(names)
                standby.update(names)
            case ChangeRole(pool, name):
                roles[name] = pool
    return PlannedRotation(frozenset(standby), frozenset(active), roles)


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
