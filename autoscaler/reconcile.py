"""Compares a plan with the replicas that exist and returns the actions. Pure and level-triggered.

Every tick starts from the observed replicas, never from earlier actions: a failed action is decided again, and a
restarted autoscaler continues where the last one stopped. Ordered replicas that do not exist yet count, so none is
started twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from autoscaler.plan import ScalingPlan
from autoscaler.policies.policy_file import PoolPolicy
from autoscaler.snapshot import Replica, ReplicaState
from splitserve.roles import OTHER_POOL, POOLS, PoolName


@dataclass(frozen=True, slots=True)
class Start:
    """Order `count` more replicas."""

    pool: PoolName
    count: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Let these replicas finish their requests and end."""

    pool: PoolName
    names: tuple[str, ...]


@dataclass(frozen=True)
class _OneReplica:
    """An action on one replica."""

    pool: PoolName
    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)


class Activate(_OneReplica):
    """Take a warm standby into rotation."""


class Rest(_OneReplica):
    """Take a replica out of rotation and keep it as a warm standby."""


class ChangeRole(_OneReplica):
    """Give a worker of the other pool this pool's role."""


_COMING = (ReplicaState.READY, ReplicaState.STANDBY, ReplicaState.STARTING)
Action = Start | Activate | Rest | Drain | ChangeRole


def action_word(action: Action) -> str:
    """The kind of an action, as logs, metrics and reports name it."""
    return "change_role" if isinstance(action, ChangeRole) else type(action).__name__.lower()


def reconcile(
    plan: ScalingPlan,
    pools: Mapping[PoolName, Sequence[Replica]],
    policy: Mapping[PoolName, PoolPolicy],
    paused: Collection[PoolName] = (),
) -> tuple[Action, ...]:
    """Actions that bring both pools to the plan. Idempotent: once they have taken effect there are none. The bounds of
    `policy` are kept whatever the plan says.

    Preempted replicas do not count, so each is replaced at once, whatever `behavior` says of the number. In `paused`
    pools no replica is ordered and no overdue one is replaced, because the last ones failed. When one pool has more
    replicas in rotation than planned, and the other has too few, standby and starting ones counted, workers take the
    other role before any is started or drained: that takes no cold start.
    """
    goals = {
        pool: min(max(plan.pool(pool).desired, policy[pool].min_replicas), policy[pool].max_replicas)
        for pool in POOLS
    }
    actions: list[Action] = []
    if plan.one_shape:
        pools = _change_roles(goals, pools, actions)
    for pool in POOLS:
        wanted, desired = plan.pool(pool), goals[pool]
        others = [member for member in pools[pool] if not member.managed]
        serving = len(in_state(others, ReplicaState.READY))
        spare = len(in_state(others, ReplicaState.STANDBY))
        coming = len(in_state(others, ReplicaState.STARTING))
        # Workers that are not ours serve a part of the count.
        desired = max(0, desired - serving - min(coming, max(0, desired - serving)))
        standby = max(0, wanted.standby - spare)
        ours = [member for member in pools[pool] if member.managed]
        actions += _reconcile_pool(pool, desired, standby, ours, pool in paused, wanted.given_up)
    return tuple(actions)


def _change_roles(
    goals: Mapping[PoolName, int], pools: Mapping[PoolName, Sequence[Replica]], actions: list[Action]
) -> Mapping[PoolName, Sequence[Replica]]:
    """Decides which workers change roles, and adds an action for each. Returns the pools after these actions."""
    after = {pool: list(pools[pool]) for pool in POOLS}
    for pool in POOLS:
        other = OTHER_POOL[pool]
        while sum(member.state in _COMING for member in after[pool]) < goals[pool]:
            ready = in_state(after[other], ReplicaState.READY)
            able = [member for member in ready if member.managed and member.can_change_role]
            if not able or len(ready) <= goals[other]:
                break
            moved = min(able, key=least_loaded)
            actions.append(ChangeRole(pool, moved.name))
            after[other].remove(moved)
            after[pool].append(moved)
    return after


def _reconcile_pool(
    pool: PoolName,
    desired: int,
    standby: int,
    replicas: Sequence[Replica],
    paused: bool,
    given_up: bool,
) -> list[Action]:
    actions: list[Action] = []
    ready = sorted(in_state(replicas, ReplicaState.READY), key=least_loaded)
    resting = sorted(in_state(replicas, ReplicaState.STANDBY), key=oldest)
    starting = sorted(in_state(replicas, ReplicaState.STARTING), key=oldest)
    overdue = sorted(in_state(replicas, ReplicaState.OVERDUE), key=oldest)
    preempted = in_state(replicas, ReplicaState.PREEMPTED)
    draining = in_state(replicas, ReplicaState.DRAINING)
    # A standby serves at once; a starting replica replaces it later.
    while resting and len(ready) < desired:
        ready.append(resting.pop(0))
        actions.append(Activate(pool, ready[-1].name))
    while len(ready) > desired and len(resting) < standby:
        resting.append(ready.pop(0))
        actions.append(Rest(pool, resting[-1].name))
    # An overdue replica holds the place of its replacement. One is replaced at a time.
    surplus = len(ready) + len(resting) + len(starting) + len(overdue) - desired - standby
    if surplus < 0 and not paused:
        actions.append(Start(pool, -surplus))
    if overdue and not draining and (surplus > 0 or not paused):
        actions.append(Drain(pool, (overdue[0].name,)))
    elif surplus > 0 and not draining and (ready or resting or (starting and given_up)):
        actions.append(Drain(pool, (_superfluous(ready, resting, starting, standby).name,)))
    # Only without requests: the deadline of a drain may come before the machine ends.
    if empty := tuple(member.name for member in preempted if not member.load):
        actions.append(Drain(pool, empty))
    return actions


def _superfluous(
    ready: Sequence[Replica],
    resting: Sequence[Replica],
    starting: Sequence[Replica],
    standby: int,
) -> Replica:
    """The replica to drain first: starting, then surplus standby, then the least loaded."""
    if starting:
        return starting[-1]
    if len(resting) > standby:
        return resting[-1]
    return ready[0]


@dataclass(frozen=True, slots=True)
class PlannedRotation:
    """Where the coordinators are to put our own replicas, by name. A replica that starts or ends is in none of
    these."""

    standby: frozenset[str] = frozenset()
    active: frozenset[str] = frozenset()
    roles: Mapping[str, PoolName] = field(default_factory=dict)
    """The pool of each replica in rotation that can change its role."""


def planned_rotation(
    pools: Mapping[PoolName, Sequence[Replica]], actions: Sequence[Action]
) -> PlannedRotation:
    """Where our replicas are once the actions have been carried out."""
    ours = [member for pool in POOLS for member in pools[pool] if member.managed]
    standby = {member.name for member in in_state(ours, ReplicaState.STANDBY)}
    active = {member.name for member in in_state(ours, ReplicaState.READY)}
    roles = {
        member.name: pool
        for pool in POOLS
        for member in in_state(pools[pool], ReplicaState.READY)
        if member.managed and member.can_change_role
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


def in_state(replicas: Sequence[Replica], state: ReplicaState) -> list[Replica]:
    """The replicas in this state, in the same order."""
    return [member for member in replicas if member.state is state]


def least_loaded(member: Replica) -> tuple[float, float, str]:
    """Sort key: the least loaded first, then the youngest, whose prefix cache holds least."""
    return member.load, -member.created_wall_s, member.name


def oldest(member: Replica) -> tuple[float, str]:
    """Sort key: the oldest first."""
    return member.created_wall_s, member.name
