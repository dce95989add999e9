"""From what should be to what to do: a plan against the replicas that exist. Pure and level-triggered.

Every tick starts from what is there, never from what was done before, so that an action that failed is simply
decided again and a restarted autoscaler goes on where the last one stopped. Replicas that were ordered and are not
there yet count, so nothing is started twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autoscaler.actuator import ActualReplica
from autoscaler.plan import Plan
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
    """Let these replicas end what they have begun, and go."""

    pool: PoolName
    names: tuple[str, ...]


Action = Start | Activate | Rest | Drain


@dataclass(frozen=True, slots=True)
class Member:
    """A replica that exists, with what the coordinators know of it."""

    name: str
    state: ReplicaState
    load: float
    created_wall_s: float


def members(
    pool: PoolName, actual: Iterable[ActualReplica], seen: Mapping[str, Replica]
) -> tuple[Member, ...]:
    """The replicas of one pool. What exists is the actuator's word; how far it is, the coordinators'.

    A worker that no actuator made is not among them: it is never removed, and it replaces none of ours.
    """
    found = []
    for replica in actual:
        if replica.pool != pool:
            continue
        known = seen.get(replica.name)
        state = known.state if known is not None else ReplicaState.STARTING
        if replica.stopping:
            state = ReplicaState.DRAINING
        load = known.load if known is not None else 0.0
        found.append(Member(replica.name, state, load, replica.created_wall_s))
    return tuple(found)


def reconcile(
    plan: Plan, pools: Mapping[PoolName, Sequence[Member]], bounds: Mapping[PoolName, Bounds]
) -> tuple[Action, ...]:
    """What to do now so that both pools come to be as planned. Applied and asked again, it ends in no action."""
    actions: list[Action] = []
    for pool in POOLS:
        wanted = plan.pool(pool)
        desired = min(max(wanted.desired, bounds[pool].min), bounds[pool].max)
        actions += _reconcile_pool(pool, desired, max(0, wanted.standby), pools[pool])
    return tuple(actions)


def _reconcile_pool(pool: PoolName, desired: int, standby: int, there: Sequence[Member]) -> list[Action]:
    actions: list[Action] = []
    ready = sorted(_in_state(there, ReplicaState.READY), key=_least_loaded)
    resting = sorted(_in_state(there, ReplicaState.STANDBY), key=_oldest)
    starting = sorted(_in_state(there, ReplicaState.STARTING), key=_oldest)
    draining = _in_state(there, ReplicaState.DRAINING)
    # A standby serves at once; one that is still starting takes its place later.
    while resting and len(ready) < desired:
        ready.append(resting.pop(0))
        actions.append(Activate(pool, ready[-1].name))
    while len(ready) > desired and len(resting) < standby:
        resting.append(ready.pop(0))
        actions.append(Rest(pool, resting[-1].name))
    surplus = len(ready) + len(resting) + len(starting) - desired - standby
    if surplus < 0:
        actions.append(Start(pool, -surplus))
    # Where the coordinators see no replica at all, they may have just restarted: nothing is surely superfluous.
    elif surplus > 0 and not draining and (ready or resting):
        actions.append(Drain(pool, (_superfluous(ready, resting, starting, standby).name,)))
    return actions


def _superfluous(
    ready: Sequence[Member], resting: Sequence[Member], starting: Sequence[Member], standby: int
) -> Member:
    """The replica that is missed least, where there are more than wanted."""
    if starting:
        return starting[-1]
    if len(resting) > standby:
        return resting[-1]
    return ready[0]


def _in_state(there: Sequence[Member], state: ReplicaState) -> list[Member]:
    return [member for member in there if member.state is state]


def _least_loaded(member: Member) -> tuple[float, float, str]:
    # Of equals the youngest goes first: its prefix cache holds least.
    return member.load, -member.created_wall_s, member.name


def _oldest(member: Member) -> tuple[float, str]:
    return member.created_wall_s, member.name
