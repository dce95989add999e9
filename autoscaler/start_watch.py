"""Watches replicas from their order until they have been up for one cold start: deadlines, failed starts, back-off.

A replica that starts for longer than its deadline is `OVERDUE`: it is no capacity, is logged and replaced. A replica
that ends before it has been up for one cold start is a failed start. After each failed start the next order of its pool
waits longer; likewise after a machine is taken away before that. No I/O but the log; time is that of the snapshots.

The time before this process began does not count, nor the time in which a start cannot be judged: while a coordinator
or the replica's host does not answer, and while the other pool has no replica to which a registered one could connect.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from autoscaler.policies.policy_file import PoolPolicy
from autoscaler.snapshot import UP, Replica, ReplicaState, Snapshot
from splitserve.logs import log_event
from splitserve.roles import OTHER_POOL, POOLS, PoolName

MAX_PAUSE_S = 600.0
"""Longest pause between two orders of a pool whose replicas fail."""
MAX_DOUBLINGS = 4
"""Each failed start doubles the next deadline, at most this many times, so that slow starts succeed in the end."""


def cold_starts(snapshot: Snapshot, policy: Mapping[PoolName, PoolPolicy]) -> Mapping[PoolName, float]:
    """Seconds that a start takes in each pool: the measured time or the policy file's, whichever is longer."""
    return {
        pool: max(snapshot.pool(pool).cold_start_s or 0.0, of_pool.cold_start_s)
        for pool, of_pool in policy.items()
    }


@dataclass(slots=True)
class _Life:
    """One replica since its order, or since it was adopted."""

    pool: PoolName
    created_wall_s: float
    placeholder: bool
    starting_s: float | None = None
    up_s: float | None = None
    overdue: bool = False
    failed: bool = False
    """It ended before it was proven, and was started again under its name. Counted as one failure, however often."""
    proven: bool = False
    """It has been up for one cold start."""
    ending: bool = False
    """It drains, or was told to end: its end is no failure."""
    preempted: bool = False
    """Its machine is taken away: its end is no failure either."""
    reachable: bool = True
    """Its host answers. Of one that is given up because its host does not, nothing is known."""

    @property
    def may_fail(self) -> bool:
        """Whether its end would be a failed start that has not been counted yet."""
        known = self.ending or self.preempted or self.proven or self.overdue or self.failed
        return self.reachable and not known


@dataclass(slots=True)
class _Row:
    """Consecutive starts of one pool that failed or were preempted."""

    length: int = 0
    paused_until_s: float = 0.0


class StartWatch:
    """Watches all replicas of the actuator. Memory is bounded by their number."""

    def __init__(self, log: Callable[..., None] = log_event) -> None:
        self._log = log
        self.failed_starts: dict[PoolName, int] = dict.fromkeys(POOLS, 0)
        """Since the process started."""
        self._rows: dict[PoolName, _Row] = defaultdict(_Row)
        self._lives: dict[str, _Life] = {}
        self._adopts = True
        """True until the first look: replicas that exist by then were ordered by another process, at an unknown
        time."""

    def look(self, snapshot: Snapshot, policy: Mapping[PoolName, PoolPolicy]) -> Snapshot:
        """The snapshot with overdue replicas marked."""
        seen = {pool: snapshot.pool(pool).replicas for pool in POOLS}
        up = {pool: any(replica.state in UP for replica in seen[pool]) for pool in POOLS}
        ours = [(pool, replica) for pool in POOLS for replica in seen[pool] if replica.ours]
        # By pool, the reason of one failed start and of one start whose machine is taken away, which is no failure.
        failed: dict[PoolName, str] = {}
        taken: dict[PoolName, str] = {}
        for life in self._ended({replica.name for _, replica in ours}):
            failed[life.pool] = "ended before it was up for one cold start"
        cold = cold_starts(snapshot, policy)
        for pool, replica in ours:
            life = self._life(pool, replica, failed)
            if replica.registered or replica.state is ReplicaState.PREEMPTED:
                preempted = replica.state is ReplicaState.PREEMPTED
                if preempted and not (life.preempted or life.proven or life.ending or self._adopts):
                    taken[life.pool] = "its machine is taken away before it was up for one cold start"
                life.preempted = preempted
            if replica.state in UP:
                self._came_up(life, replica, snapshot.now_s, cold[pool])
            elif replica.state is ReplicaState.STARTING and not (life.ending or life.preempted):
                excused = not snapshot.complete or (replica.registered and not up[OTHER_POOL[pool]])
                excused = excused or not replica.reachable
                deadline_s = cold[pool] * policy[pool].start_deadline_cold_starts
                deadline_s *= 2.0 ** min(self._rows[life.pool].length, MAX_DOUBLINGS)
                if self._became_overdue(replica.name, life, snapshot.now_s, deadline_s, excused):
                    failed[life.pool] = f"not ready within {deadline_s:.0f} s"
        self._adopts = False
        for pool, reason in (taken | failed).items():
            self._fail(pool, reason, snapshot.now_s, cold[pool], counts=pool in failed)
        return replace(
            snapshot,
            prefill=replace(snapshot.prefill, replicas=self._marked(seen["prefill"])),
            decode=replace(snapshot.decode, replicas=self._marked(seen["decode"])),
        )

    def told_to_end(self, names: Sequence[str]) -> None:
        """Notes that these replicas were told to end: their end is no failure."""
        for name in names:
            if life := self._lives.get(name):
                life.ending = True

    def pause_s(self, pool: PoolName, now_s: float) -> float:
        """Seconds for which nothing may be ordered in this pool; 0 when it may."""
        return max(0.0, self._rows[pool].paused_until_s - now_s)

    def paused(self, now_s: float) -> frozenset[PoolName]:
        """The pools in which nothing may be ordered now."""
        return frozenset(pool for pool, row in self._rows.items() if row.paused_until_s > now_s)

    def _ended(self, names: Collection[str]) -> list[_Life]:
        """Forgets all replicas but those of `names`. Returns those whose end is a failed start."""
        gone = [self._lives.pop(name) for name in list(self._lives) if name not in names]
        return [life for life in gone if life.may_fail and not life.placeholder]

    def _life(self, pool: PoolName, replica: Replica, failed: dict[PoolName, str]) -> _Life:
        life = self._lives.get(replica.name)
        if life is not None and not life.placeholder and life.created_wall_s != replica.created_wall_s:
            # The actuator has started it again under its name.
            if life.may_fail:
                failed[life.pool] = "ended before it was up for one cold start"
            starting_s = None if life.proven else life.starting_s
            life.failed = not life.proven
            life.created_wall_s, life.starting_s, life.up_s = replica.created_wall_s, starting_s, None
            life.proven = life.preempted = False
        if life is None:
            life = _Life(pool, replica.created_wall_s, replica.placeholder)
            self._lives[replica.name] = life
        life.ending = life.ending or replica.state is ReplicaState.DRAINING
        life.reachable = replica.reachable
        return life

    def _came_up(self, life: _Life, replica: Replica, now_s: float, cold_s: float) -> None:
        life.starting_s, life.overdue = None, False
        if life.up_s is None:
            life.up_s = min(replica.since_s, now_s)
        if not life.proven and now_s - life.up_s >= cold_s:
            life.proven, life.failed = True, False
            self._rows.pop(life.pool, None)

    def _became_overdue(self, name: str, life: _Life, now_s: float, deadline_s: float, excused: bool) -> bool:
        life.up_s = None
        if life.starting_s is None or excused:
            life.starting_s = now_s
        waited_s = now_s - life.starting_s
        if life.overdue or waited_s <= deadline_s:
            return False
        life.overdue = True
        self._log(
            "replica.overdue",
            level=logging.WARNING,
            name=name,
            pool=life.pool,
            waited_s=round(waited_s, 1),
            deadline_s=round(deadline_s, 1),
        )
        return True

    def _fail(self, pool: PoolName, reason: str, now_s: float, cold_s: float, *, counts: bool) -> None:
        """Extends the pool's row by a start, which `counts` as failed or was preempted. The first adds no pause."""
        self.failed_starts[pool] += counts
        row = self._rows[pool]
        row.length += 1
        pause_s = 0.0
        if row.length > 1:
            pause_s = min(MAX_PAUSE_S, cold_s / 4 * 2.0 ** min(row.length - 2, 30))
        row.paused_until_s = now_s + pause_s
        self._log(
            "replica.failed_start" if counts else "replica.preempted_at_once",
            level=logging.WARNING,
            pool=pool,
            why=reason,
            in_a_row=row.length,
            pause_s=round(pause_s, 1),
        )

    def _marked(self, replicas: tuple[Replica, ...]) -> tuple[Replica, ...]:
        overdue = {name for name, life in self._lives.items() if life.overdue}
        return tuple(
            replace(replica, state=ReplicaState.OVERDUE)
            if replica.state is ReplicaState.STARTING and replica.name in overdue
            else replica
            for replica in replicas
        )
