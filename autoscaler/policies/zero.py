"""From and to zero: when pools with `min_replicas` 0 go to zero, and when they are started again. Pure.

Awake, each pool has the fewest replicas that can serve, and its policy may want more. Once no request has been in
progress for `idle_s`, only `min_replicas` are kept. At zero only requests that wait for workers count: requests that
still run on draining replicas need no new ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoscaler.policies.policy_file import ScalingPolicy
from autoscaler.policies.schedule import scheduled_replicas
from autoscaler.snapshot import ReplicaState, Snapshot, lead_s
from splitserve.roles import PoolName

_COMING = (ReplicaState.READY, ReplicaState.STARTING)


@dataclass(frozen=True, slots=True)
class ZeroMemory:
    """Memory between decisions. Losing it (a restart) costs one more `idle_s` of what runs."""

    at_zero: bool
    active_s: float
    """When a request was last seen in progress."""


@dataclass(frozen=True, slots=True)
class ZeroState:
    """What holds for both pools at one moment."""

    least: Mapping[PoolName, int]
    """Fewest replicas of each pool; while `at_zero` also the most."""
    at_zero: bool = False
    reason: str = ""
    """One line for operators; empty while only the pools' policies decide."""


def zero_state(
    policy: ScalingPolicy, memory: ZeroMemory | None, snapshot: Snapshot
) -> tuple[ZeroState, ZeroMemory | None]:
    """Whether the pools are at zero now, and why; with the memory for the next decision."""
    low = {name: pool.min_replicas for name, pool in policy.pools.items()}
    if not policy.may_be_at_zero:
        return ZeroState(low), None
    awake = policy.least_awake
    memory = memory or ZeroMemory(not _any(policy, snapshot, _COMING), snapshot.now_s)
    active_s = _active_s(memory, snapshot)
    idle_s = snapshot.now_s - active_s
    if memory.at_zero:
        if reason := _wakes(policy, memory, snapshot, active_s):
            return ZeroState(awake, reason=reason), ZeroMemory(False, snapshot.now_s)
        return ZeroState(low, True, f"at zero: idle for {idle_s:.0f} s"), replace(memory, active_s=active_s)
    may = snapshot.complete and snapshot.model_known and not _scheduled(policy, snapshot)
    if may and not snapshot.in_progress and idle_s >= policy.idle_s:
        return ZeroState(low, True, f"to zero: idle for {idle_s:.0f} s"), ZeroMemory(True, active_s)
    return ZeroState(awake, reason=_waiting(snapshot)), ZeroMemory(False, active_s)


def _wakes(policy: ScalingPolicy, memory: ZeroMemory, snapshot: Snapshot, active_s: float) -> str:
    """Why the pools are started again; empty: they stay at zero."""
    if reason := _waiting(snapshot):
        return reason
    if not snapshot.model_known:
        return "from zero: no coordinator knows the model before a worker has registered"
    if _scheduled(policy, snapshot):
        return "from zero: by schedule"
    # A replica that did not end, or that somebody else started, serves requests.
    if active_s > memory.active_s and _any(policy, snapshot, (ReplicaState.READY,)):
        return "from zero: requests are served"
    return ""


def _waiting(snapshot: Snapshot) -> str:
    count = snapshot.waiting_for_workers
    return f"from zero: {count} {'request waits' if count == 1 else 'requests wait'}" if count else ""


def _active_s(memory: ZeroMemory, snapshot: Snapshot) -> float:
    """When a request was last in progress, as far as known."""
    if snapshot.in_progress or snapshot.waiting_for_workers:
        return snapshot.now_s
    ends = (bucket.start_s + bucket.length_s for bucket in snapshot.arrivals if bucket.requests)
    return min(snapshot.now_s, max([memory.active_s, *ends]))


def _scheduled(policy: ScalingPolicy, snapshot: Snapshot) -> bool:
    """Whether a schedule wants replicas now or one cold start from now."""
    for name, pool in policy.pools.items():
        signals = snapshot.pool(name)
        standbys = sum(replica.state is ReplicaState.STANDBY for replica in signals.replicas)
        soon = scheduled_replicas(pool.schedule, snapshot.wall_s, lead_s(signals, pool.cold_start_s))
        if soon > standbys or scheduled_replicas(pool.schedule, snapshot.wall_s, policy.interval_s):
            return True
    return False


def _any(policy: ScalingPolicy, snapshot: Snapshot, states: tuple[ReplicaState, ...]) -> bool:
    """Whether a pool that may be at zero has a replica in one of these states."""
    return any(
        replica.state in states
        for name, pool in policy.pools.items()
        if not pool.min_replicas
        for replica in snapshot.pool(name).replicas
    )
