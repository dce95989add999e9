"""Two pools of simulated replicas, and the life of each: ordered, starting, in rotation, standby, draining, ended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from autoscaler.reconcile import Action, Activate, Drain, Lean, ReplicaView, Rest, Start
from autoscaler.simulation.cluster.neutral_replica import LEANS_AFTER_S, NeutralReplica
from autoscaler.simulation.cluster.replica import DecodeReplica, EventQueue, PrefillReplica, SimulatedReplica
from autoscaler.simulation.cluster_settings import ClusterSettings
from autoscaler.simulation.start_times import StartTimes
from autoscaler.snapshot import LEAVING, PoolName, ReplicaState


class ReplicaPools(ABC):
    """All replicas, including ended ones."""

    def __init__(self, settings: ClusterSettings, events: EventQueue) -> None:
        self._settings, self._events = settings, events
        self._numbers: dict[PoolName, int] = {"prefill": 0, "decode": 0}
        self.prefill: list[PrefillReplica] = []
        self.decode: list[DecodeReplica] = []
        self.ended: list[SimulatedReplica] = []
        self.leaning_changes: dict[PoolName, int] = {"prefill": 0, "decode": 0}
        """How often a neutral replica has changed sides, by where to."""
        self.notices = 0
        """Replicas whose machines were to be taken away."""
        self.sleeping: Collection[PoolName] = ()
        """Pools whose standbys sleep."""
        self.woken: set[PoolName] = set()
        self._start_times = settings.start_times or StartTimes(settings.cold_start_s)
        self.on_notice: Callable[[float], None] = lambda now_s: None  # when a machine is to be taken away

    @abstractmethod
    def _make(self, pool: PoolName, name: str, now_s: float, kind: str) -> SimulatedReplica:
        """A new replica of a class, in its pool."""

    @abstractmethod
    def _rotation_changed(self, now_s: float) -> None:
        """Other replicas than before take requests."""

    @abstractmethod
    def _gone(self, replica: SimulatedReplica, now_s: float) -> None:
        """The time of a notice is over: the machine is taken away."""

    @abstractmethod
    def _forget(self, replica: SimulatedReplica) -> None:
        """A replica has ended."""

    def pool(self, name: PoolName) -> list[PrefillReplica] | list[DecodeReplica]:
        """The replicas of a pool that have not ended."""
        return self.prefill if name == "prefill" else self.decode

    @property
    def serving_prefill(self) -> Sequence[PrefillReplica]:
        """The prefill pool, or the neutral replicas of the other one where it is empty: they stand in."""
        return self.prefill or self._neutral

    @property
    def serving_decode(self) -> Sequence[DecodeReplica]:
        """The same of decode."""
        return self.decode or self._neutral

    @property
    def computing(self) -> list[PrefillReplica]:
        """All that compute prompts for others: the prefill pool, and neutral replicas that lean to decode."""
        return [*self.prefill, *(one for one in self.decode if isinstance(one, NeutralReplica))]

    @property
    def _neutral(self) -> list[NeutralReplica]:
        return [one for one in (*self.prefill, *self.decode) if isinstance(one, NeutralReplica)]

    def members(self, name: PoolName) -> tuple[ReplicaView, ...]:
        """A pool as `autoscaler.reconcile` sees it."""
        return tuple(
            ReplicaView(
                r.name,
                r.state,
                float(r.load),
                r.ordered_s,
                neutral=isinstance(r, NeutralReplica),
                replica_class=r.replica_class,
            )
            for r in self.pool(name)
        )

    def order(
        self, pool: PoolName, count: int, now_s: float, cold_start_s: float | None = None, kind: str = ""
    ) -> None:
        """Orders replicas; they are ready one cold start later (0: at once), or end then where the start fails. `kind`:
        their class; empty: the first one."""
        speeds = self._settings.speeds.get(pool) or {"": 1.0}
        kind = kind if kind in speeds else next(iter(speeds))
        speed = self._settings.speed_of("decode" if self._settings.neutral else pool, kind)
        for _ in range(count):
            self._numbers[pool] += 1
            replica = self._make(pool, f"{pool}-{self._numbers[pool]}", now_s, kind)
            replica.replica_class, replica.speed = kind, speed
            start = self._start_times.of(replica.name)
            begins = self._ends if start.fails and cold_start_s is None else self._becomes_ready
            if (took_s := start.took_s if cold_start_s is None else cold_start_s) > 0:
                self._events.at(now_s + took_s, begins(replica))
            else:
                begins(replica)(now_s)
            after_s = self._settings.preemptions.notice_after_s(replica.name)
            if after_s is not None and kind in self._settings.spot.get(pool, ()):
                self._events.at(now_s + after_s, partial(self.take_away, replica))

    def act(self, action: Action, now_s: float) -> None:
        """Applies an action of `autoscaler.reconcile`."""
        match action:
            case Start(pool, count, kind):
                self.order(pool, count, now_s, kind=kind)
            case Activate(pool, name):
                self._joins(pool, self._named(name), now_s)
            case Rest(pool, name):
                resting = self._named(name)
                resting.enter(ReplicaState.STANDBY, now_s)
                resting.asleep = pool in self.sleeping
            case Lean(pool, name):
                self.ask_leaning(name, pool, now_s)
            case Drain(pool, names):
                for name in names:
                    replica = self._named(name)
                    replica.enter(ReplicaState.DRAINING, now_s)
                    self._end_if_empty(replica, now_s)
        self._rotation_changed(now_s)

    def ask_leaning(self, name: str, pool: PoolName, now_s: float) -> None:
        """Asks a neutral replica to lean to this pool. The latest order counts; one that leaves follows none."""
        replica = next((one for one in self._neutral if one.name == name), None)
        if replica is None or replica.asked == pool:
            return
        replica.asked = pool
        self._events.at(now_s + LEANS_AFTER_S, lambda at_s: self._lean(replica, pool, at_s))

    def _lean(self, replica: NeutralReplica, pool: PoolName, now_s: float) -> None:
        leaves = replica.ended_s is not None or replica.state in LEAVING
        if leaves or replica.asked != pool or replica.leans == pool:
            return
        self._pool_of(replica).remove(replica)
        replica.lean(pool, now_s)
        self._pool_of(replica).append(replica)
        self.leaning_changes[pool] += 1
        self._rotation_changed(now_s)

    def _pool_of(self, replica: SimulatedReplica) -> list[Any]:
        if isinstance(replica, NeutralReplica):
            return self.pool(replica.leans)
        return self.pool("prefill" if isinstance(replica, PrefillReplica) else "decode")

    def _joins(self, pool: PoolName, replica: SimulatedReplica, now_s: float) -> None:
        """Into rotation: one that sleeps once it has woken up."""

        def wake(at_s: float) -> None:
            replica.waking = False
            if replica.asleep and replica.state is ReplicaState.STANDBY:
                replica.asleep = False
                self.woken.add(pool)
                replica.enter(ReplicaState.READY, at_s)
                self._rotation_changed(at_s)

        if not replica.asleep:
            replica.enter(ReplicaState.READY, now_s)
        elif not replica.waking:
            replica.waking = True
            self._events.at(now_s + self._settings.wake_s, wake)

    def wake_s(self, pool: PoolName) -> float | None:
        """What waking took in a pool; None before the first."""
        return self._settings.wake_s if pool in self.woken else None

    def take_away(self, replica: SimulatedReplica, now_s: float) -> None:
        """Gives a replica its notice: it takes nothing new, and is gone once that is over."""
        if replica.ended_s is not None:
            return
        if replica.state is not ReplicaState.DRAINING:
            replica.enter(ReplicaState.PREEMPTED, now_s)
        self.notices += 1
        self._rotation_changed(now_s)
        self._events.at(now_s + self._settings.preemptions.notice_s, partial(self._gone, replica))
        self.on_notice(now_s)

    def _ends(self, replica: SimulatedReplica) -> Callable[[float], None]:
        def end(now_s: float) -> None:
            if replica.state is ReplicaState.STARTING:
                replica.enter(ReplicaState.DRAINING, now_s)
                self._end_if_empty(replica, now_s)

        return end

    def _becomes_ready(self, replica: SimulatedReplica) -> Callable[[float], None]:
        def become_ready(now_s: float) -> None:
            if replica.state is not ReplicaState.STARTING:
                return
            # `reconcile` moves it to standby where the plan wants that.
            replica.enter(ReplicaState.READY, now_s)
            self._rotation_changed(now_s)

        return become_ready

    def _end_if_empty(self, replica: SimulatedReplica, now_s: float) -> None:
        if replica.state is not ReplicaState.DRAINING or replica.assigned or replica.ended_s is not None:
            return
        replica.ended_s = now_s
        self.ended.append(replica)
        self._forget(replica)
        self._pool_of(replica).remove(replica)

    def _named(self, name: str) -> SimulatedReplica:
        """In either pool: a neutral replica may be on its way to the one that an action names."""
        return next(replica for replica in (*self.prefill, *self.decode) if replica.name == name)
