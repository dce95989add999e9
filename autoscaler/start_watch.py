"""Watches replicas from their order until they have proven themselves: deadlines, failed starts, back-off.

A replica that starts for longer than its deadline is `OVERDUE`: no capacity, an alarm, replaced. One that ends before
it has been up for one cold start is a failed start. After each failed start the next order waits longer. No I/O but the
log; time is that of the snapshots.

The time before this process began does not count, nor any in which the start could not be judged: while a coordinator
or its host does not answer, and, for a registered replica, while the other pool has none that it could connect to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autoscaler.actuators.actuator import ActualReplica, Presence
from autoscaler.policies.policy_file import ScalingPolicy
from autoscaler.snapshot import POOLS, PoolName, Replica, ReplicaState, Snapshot
from splitserve.logs import log_event

MAX_PAUSE_S = 600.0
"""Longest pause between two orders of a pool whose replicas fail."""
MAX_DOUBLINGS = 4
"""Each failed start doubles the next deadline, so many times at most: what takes longer than thought comes up."""
_UP = (ReplicaState.READY, ReplicaState.STANDBY)


@dataclass(frozen=True, slots=True)
class StartLimits:
    """One pool's limits."""

    cold_start_s: float = 60.0
    """By the policy file. The measured one counts where it is longer."""
    deadline_cold_starts: float = 5.0


def start_limits(policy: ScalingPolicy) -> Mapping[PoolName, StartLimits]:
    """Those of both pools of a policy file."""
    return {
        name: StartLimits(pool.cold_start_s, pool.start_deadline_cold_starts)
        for name, pool in policy.pools.items()
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
    """It has ended before it had proven itself, and was started again under its name: one failure, however often."""
    proven: bool = False
    ending: bool = False
    """Told to end: its end is no failure."""
    preempted: bool = False
    """Its machine is taken away: its end is no failure either."""

    @property
    def may_fail(self) -> bool:
        """Whether its end would be a failed start that has not been counted yet."""
        return not (self.ending or self.preempted or self.proven or self.overdue or self.failed)


class StartWatch:
    """All replicas of the actuator. Memory is bounded by their number."""

    def __init__(self, log: Callable[..., None] = log_event) -> None:
        self._log = log
        self.failed_starts: dict[PoolName, int] = dict.fromkeys(POOLS, 0)
        """Since the process started."""
        self._in_a_row: dict[PoolName, int] = dict.fromkeys(POOLS, 0)
        self._paused_until_s: dict[PoolName, float] = dict.fromkeys(POOLS, 0.0)
        self._lives: dict[str, _Life] = {}

    def look(
        self, snapshot: Snapshot, actual: Sequence[ActualReplica], limits: Mapping[PoolName, StartLimits]
    ) -> Snapshot:
        """The snapshot with overdue replicas marked."""
        seen: dict[PoolName, tuple[Replica, ...]] = {
            "prefill": snapshot.prefill.replicas,
            "decode": snapshot.decode.replicas,
        }
        up: dict[PoolName, bool] = {pool: any(r.state in _UP for r in seen[pool]) for pool in POOLS}
        failed: dict[PoolName, str] = {}
        for life in self._ended(actual):
            failed[life.pool] = "ended before it was up for one cold start"
        known = {pool: {replica.name: replica for replica in seen[pool]} for pool in POOLS}
        for replica in actual:
            cold_s = self._cold_s(replica.pool, snapshot, limits)
            life = self._life(replica, failed)
            found = known[replica.pool].get(replica.name)
            if found is not None and (found.registered or found.state is ReplicaState.PREEMPTED):
                life.preempted = found.state is ReplicaState.PREEMPTED
            if found is not None and found.state in _UP:
                self._came_up(life, found, snapshot.now_s, cold_s)
            elif not (life.ending or life.preempted) and (
                found is None or found.state is ReplicaState.STARTING
            ):
                peer: PoolName = "decode" if replica.pool == "prefill" else "prefill"
                excused = not snapshot.complete or (found is not None and found.registered and not up[peer])
                excused = excused or replica.presence is not Presence.HERE
                deadline_s = cold_s * limits[replica.pool].deadline_cold_starts
                deadline_s *= 2.0 ** min(self._in_a_row[replica.pool], MAX_DOUBLINGS)
                if self._became_overdue(replica.name, life, snapshot.now_s, deadline_s, excused):
                    failed[replica.pool] = f"not ready within {deadline_s:.0f} s"
        for pool, why in failed.items():
            self._fail(pool, why, snapshot.now_s, self._cold_s(pool, snapshot, limits))
        return replace(
            snapshot,
            prefill=replace(snapshot.prefill, replicas=self._marked(seen["prefill"])),
            decode=replace(snapshot.decode, replicas=self._marked(seen["decode"])),
        )

    def told_to_end(self, names: Sequence[str]) -> None:
        """These replicas end because they were told to."""
        for name in names:
            if life := self._lives.get(name):
                life.ending = True

    def pause_s(self, pool: PoolName, now_s: float) -> float:
        """Seconds for which nothing may be ordered in this pool; 0 when it may."""
        return max(0.0, self._paused_until_s[pool] - now_s)

    def _cold_s(self, pool: PoolName, snapshot: Snapshot, limits: Mapping[PoolName, StartLimits]) -> float:
        measured = snapshot.pool(pool).cold_start_s
        return max(measured or 0.0, limits[pool].cold_start_s)

    def _ended(self, actual: Sequence[ActualReplica]) -> list[_Life]:
        """Forgets the replicas that are gone; those that had not proven themselves and were not told to end."""
        here = {replica.name for replica in actual}
        gone = [self._lives.pop(name) for name in list(self._lives) if name not in here]
        return [life for life in gone if life.may_fail and not life.placeholder]

    def _life(self, replica: ActualReplica, failed: dict[PoolName, str]) -> _Life:
        life = self._lives.get(replica.name)
        if life is not None and not life.placeholder and life.created_wall_s != replica.created_wall_s:
            # The actuator has started it again under its name.
            if life.may_fail:
                failed[replica.pool] = "ended before it was up for one cold start"
            starting_s = None if life.proven else life.starting_s
            life.failed = not life.proven
            life.created_wall_s, life.starting_s, life.up_s = replica.created_wall_s, starting_s, None
            life.proven = life.preempted = False
        if life is None:
            life = _Life(replica.pool, replica.created_wall_s, replica.placeholder)
            self._lives[replica.name] = life
        life.ending = life.ending or replica.stopping
        return life

    def _came_up(self, life: _Life, found: Replica, now_s: float, cold_s: float) -> None:
        life.starting_s, life.overdue = None, False
        if life.up_s is None:
            life.up_s = min(found.since_s, now_s)
        if not life.proven and now_s - life.up_s >= cold_s:
            life.proven, life.failed = True, False
            self._in_a_row[life.pool] = 0
            self._paused_until_s[life.pool] = 0.0

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

    def _fail(self, pool: PoolName, why: str, now_s: float, cold_s: float) -> None:
        """Counts a failed start; the first of a row costs no pause."""
        self.failed_starts[pool] += 1
        self._in_a_row[pool] += 1
        row = self._in_a_row[pool]
        pause_s = 0.0 if row == 1 else min(MAX_PAUSE_S, cold_s / 4 * 2.0 ** min(row - 2, 30))
        self._paused_until_s[pool] = now_s + pause_s
        self._log(
            "replica.failed_start",
            level=logging.WARNING,
            pool=pool,
            why=why,
            in_a_row=row,
            pause_s=round(pause_s, 1),
        )

    def _marked(self, replicas: tuple[Replica, ...]) -> tuple[Replica, ...]:
        return tuple(
            replace(replica, state=ReplicaState.OVERDUE)
            if replica.state is ReplicaState.STARTING
            and (life := self._lives.get(replica.name)) is not None
            and life.overdue
            else replica
            for replica in replicas
        )
