"""Watches replicas from their order until they have proven themselves: deadlines, failed starts, back-off.

A replica that starts for longer than its deadline is `OVERDUE`: no capacity, an alarm, replaced. One that ends before
it has been up for one cold start is a failed start. After each failed start the next order of its class waits longer;
so it does where machines are taken away before that. No I/O but the log; time is that of the snapshots.

The time before this process began does not count, nor any in which the start could not be judged: while a coordinator
or its host does not answer, and, for a registered replica, while the other pool has none that it could connect to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoscaler.actuators.actuator import ActualReplica, Presence
from autoscaler.policies.policy_file import ScalingPolicy
from autoscaler.snapshot import OTHER_POOL, POOLS, PoolClass, PoolName, Replica, ReplicaState, Snapshot
from splitserve.logs import log_event

MAX_PAUSE_S = 600.0
"""Longest pause between two orders of a class whose replicas fail."""
SHORT_S, SHORT_COLD_STARTS = 120.0, 2.0
MAX_DOUBLINGS = 4
"""Each failed start doubles the next deadline, so many times at most: what takes longer than thought comes up."""
_UP = (ReplicaState.READY, ReplicaState.STANDBY)


@dataclass(frozen=True, slots=True)
class StartLimits:
    """One pool's limits."""

    cold_start_s: float = 60.0
    """By the policy file. The measured one counts where it is longer."""
    deadline_cold_starts: float = 5.0
    classes: tuple[str, ...] = ()
    """Names of the pool's classes, the default one first; empty: its replicas are alike."""

    def class_of(self, name: str) -> str:
        """The class that a replica is of which says this name."""
        return name if name in self.classes else next(iter(self.classes), "")


def start_limits(policy: ScalingPolicy) -> Mapping[PoolName, StartLimits]:
    """Those of both pools of a policy file."""
    return {
        name: StartLimits(
            pool.cold_start_s, pool.start_deadline_cold_starts, tuple(one.name for one in pool.classes)
        )
        for name, pool in policy.pools.items()
    }


def short_for_s(cold_start_s: float) -> float:
    """How long a class of which no more are to be had is left alone, at least; then it is tried again. What is started
    in its place comes up meanwhile, and stays until there is better."""
    return max(SHORT_S, SHORT_COLD_STARTS * cold_start_s)


def cold_starts(snapshot: Snapshot, limits: Mapping[PoolName, StartLimits]) -> Mapping[PoolName, float]:
    """Seconds that a start takes in each pool: as measured, or by the policy file where that is longer."""
    return {
        pool: max(snapshot.pool(pool).cold_start_s or 0.0, one.cold_start_s) for pool, one in limits.items()
    }


@dataclass(slots=True)
class _Life:
    """One replica since its order, or since it was adopted."""

    kind: PoolClass
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


@dataclass(slots=True)
class _Row:
    """Starts of one class that came to nothing, one after the other."""

    length: int = 0
    paused_until_s: float = 0.0
    short_until_s: float = 0.0


@dataclass(slots=True)
class _Found:
    """What one look finds: starts that came to nothing, once a class, with the reason."""

    failed: dict[PoolClass, str] = field(default_factory=dict)
    taken: dict[PoolClass, str] = field(default_factory=dict)
    """Those whose machines are taken away: they are no failed starts."""


class StartWatch:
    """All replicas of the actuator. Memory is bounded by their number and by that of the classes."""

    def __init__(self, log: Callable[..., None] = log_event) -> None:
        self._log = log
        self.failed_starts: dict[PoolName, int] = dict.fromkeys(POOLS, 0)
        """Since the process started."""
        self._rows: dict[PoolClass, _Row] = {}
        self._lives: dict[str, _Life] = {}
        self._adopts = True
        """At the first look: what is there was ordered by another one, at an unknown time."""

    def look(
        self, snapshot: Snapshot, actual: Sequence[ActualReplica], limits: Mapping[PoolName, StartLimits]
    ) -> Snapshot:
        """The snapshot with overdue replicas marked, and with the classes that are short."""
        seen: dict[PoolName, tuple[Replica, ...]] = {
            "prefill": snapshot.prefill.replicas,
            "decode": snapshot.decode.replicas,
        }
        up: dict[PoolName, bool] = {pool: any(r.state in _UP for r in seen[pool]) for pool in POOLS}
        news = _Found()
        for life in self._ended(actual):
            news.failed[life.kind] = "ended before it was up for one cold start"
        known = {pool: {replica.name: replica for replica in seen[pool]} for pool in POOLS}
        cold = cold_starts(snapshot, limits)
        for replica in actual:
            cold_s = cold[replica.pool]
            found = known[replica.pool].get(replica.name)
            said = replica.replica_class or (found.replica_class if found is not None else "")
            life = self._life(replica, limits[replica.pool].class_of(said), news)
            if found is not None and (found.registered or found.state is ReplicaState.PREEMPTED):
                preempted = found.state is ReplicaState.PREEMPTED
                if preempted and not (life.preempted or life.proven or life.ending or self._adopts):
                    news.taken[life.kind] = "its machine is taken away before it was up for one cold start"
                life.preempted = preempted
            if found is not None and found.state in _UP:
                self._came_up(life, found, snapshot.now_s, cold_s)
            elif not (life.ending or life.preempted) and (
                found is None or found.state is ReplicaState.STARTING
            ):
                peer = OTHER_POOL[replica.pool]
                excused = not snapshot.complete or (found is not None and found.registered and not up[peer])
                excused = excused or replica.presence is not Presence.HERE
                deadline_s = cold_s * limits[replica.pool].deadline_cold_starts
                deadline_s *= 2.0 ** min(self._row(life.kind).length, MAX_DOUBLINGS)
                if self._became_overdue(replica.name, life, snapshot.now_s, deadline_s, excused):
                    news.failed[life.kind] = f"not ready within {deadline_s:.0f} s"
        self._adopts = False
        for kind, why in (news.taken | news.failed).items():
            self._fail(kind, why, snapshot.now_s, cold[kind[0]], counts=kind in news.failed)
        return replace(
            snapshot,
            short=snapshot.short | self._short(snapshot.now_s),
            prefill=replace(snapshot.prefill, replicas=self._marked(seen["prefill"])),
            decode=replace(snapshot.decode, replicas=self._marked(seen["decode"])),
        )

    def told_to_end(self, names: Sequence[str]) -> None:
        """These replicas end because they were told to."""
        for name in names:
            if life := self._lives.get(name):
                life.ending = True

    def pause_s(self, pool: PoolName, now_s: float) -> float:
        """Seconds for which nothing may be ordered of one of the pool's classes: the longest of them; 0 when it may."""
        ends_s = (row.paused_until_s for (where, _), row in self._rows.items() if where == pool)
        return max(0.0, max(ends_s, default=0.0) - now_s)

    def paused(self, now_s: float) -> frozenset[PoolClass]:
        """The classes of which nothing may be ordered now."""
        return frozenset(kind for kind, row in self._rows.items() if row.paused_until_s > now_s)

    def _short(self, now_s: float) -> frozenset[PoolClass]:
        return frozenset(kind for kind, row in self._rows.items() if row.short_until_s > now_s)

    def _row(self, kind: PoolClass) -> _Row:
        return self._rows.setdefault(kind, _Row())

    def _ended(self, actual: Sequence[ActualReplica]) -> list[_Life]:
        """Forgets the replicas that are gone; those that had not proven themselves and were not told to end."""
        here = {replica.name for replica in actual}
        gone = [self._lives.pop(name) for name in list(self._lives) if name not in here]
        return [life for life in gone if life.may_fail and not life.placeholder]

    def _life(self, replica: ActualReplica, name: str, news: _Found) -> _Life:
        life = self._lives.get(replica.name)
        if life is not None and not life.placeholder and life.created_wall_s != replica.created_wall_s:
            # The actuator has started it again under its name.
            if life.may_fail:
                news.failed[life.kind] = "ended before it was up for one cold start"
            starting_s = None if life.proven else life.starting_s
            life.failed = not life.proven
            life.created_wall_s, life.starting_s, life.up_s = replica.created_wall_s, starting_s, None
            life.proven = life.preempted = False
        if life is None:
            kind = (replica.pool, name)
            life = _Life(kind, replica.created_wall_s, replica.placeholder)
            self._lives[replica.name] = life
        life.ending = life.ending or replica.stopping
        return life

    def _came_up(self, life: _Life, found: Replica, now_s: float, cold_s: float) -> None:
        life.starting_s, life.overdue = None, False
        if life.up_s is None:
            life.up_s = min(found.since_s, now_s)
        if not life.proven and now_s - life.up_s >= cold_s:
            life.proven, life.failed = True, False
            self._rows.pop(life.kind, None)

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
            pool=life.kind[0],
            waited_s=round(waited_s, 1),
            deadline_s=round(deadline_s, 1),
        )
        return True

    def _fail(self, kind: PoolClass, why: str, now_s: float, cold_s: float, *, counts: bool) -> None:
        """Another one of a row, which `counts` as a failed start or not. The first costs no pause; from the second on
        the class is short."""
        pool, name = kind
        self.failed_starts[pool] += counts
        row = self._row(kind)
        row.length += 1
        pause_s = 0.0
        if row.length > 1:
            pause_s = min(MAX_PAUSE_S, cold_s / 4 * 2.0 ** min(row.length - 2, 30))
            row.short_until_s = now_s + max(pause_s, short_for_s(cold_s))
        row.paused_until_s = now_s + pause_s
        self._log(
            "replica.failed_start" if counts else "replica.preempted_at_once",
            level=logging.WARNING,
            pool=pool,
            why=why,
            in_a_row=row.length,
            pause_s=round(pause_s, 1),
            **({"replica_class": name} if name else {}),
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
