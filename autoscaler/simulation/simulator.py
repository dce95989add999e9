"""Replays a trace against a policy on a virtual clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import merge
from typing import Protocol

from autoscaler.actuators.actuator import ActualReplica
from autoscaler.classes.class_actions import reconcile_classes
from autoscaler.leanings.movable import movable_workers
from autoscaler.leanings.turn_watch import TurnWatch
from autoscaler.plan import Decide, Memory, ScalingPlan
from autoscaler.reconcile import (
    Action,
    Bounds,
    Drain,
    ReplicaView,
    Start,
    planned_rotation,
)
from autoscaler.simulation.cluster.cluster import Cluster
from autoscaler.simulation.cluster.replica import EventQueue, SimulatedRequest
from autoscaler.simulation.observer import SimulatedObserver
from autoscaler.simulation.outcome import Moment, Outcome, moment_of, replica_hours
from autoscaler.simulation.scenario import Scenario
from autoscaler.snapshot import POOLS, PoolClass, PoolName, Snapshot
from autoscaler.start_watch import StartLimits, StartWatch

NO_BOUNDS: Mapping[PoolName, Bounds] = {"prefill": Bounds(1, 10_000), "decode": Bounds(1, 10_000)}
_PROGRESS_STEPS = 100


class Account(Protocol):
    """What a run asks before it orders replicas, where others share what there is."""

    def listed(self, now_s: float, replicas: Sequence[ActualReplica]) -> None:
        """What exists, before each decision."""

    def able(self, start: Start) -> int:
        """How many of these may be ordered now; they count from now on."""

    def acted(self) -> None:
        """After each action."""


@dataclass(slots=True)
class Simulation:
    """One run. `run` may be called once."""

    scenario: Scenario
    decide: Decide
    interval_s: float = 15.0
    bounds: Mapping[PoolName, Bounds] = field(default_factory=lambda: NO_BOUNDS)
    name: str = "policy"
    on_progress: Callable[[float], None] = lambda _: None
    """Called about a hundred times, with the share of the requests that have arrived."""
    starts: Mapping[PoolName, StartLimits] | None = None
    """Limits of the control loop's watch over starts, which replaces overdue replicas and pauses after failed ones.
    None: nobody watches, and what has ended is ordered again at once."""
    account: Account | None = None
    """None: nothing is shared."""
    first: Mapping[PoolName, Sequence[str]] | None = None
    """Classes of the replicas at the start. None: as many of the first class as the scenario says."""
    acts: bool = True
    """False: nothing is started, ended or moved, and neutral replicas lean where the coordinator's planner says."""
    _watch: StartWatch = field(default_factory=lambda: StartWatch(lambda *_, **__: None))
    _turns: TurnWatch = field(default_factory=TurnWatch)
    _memory: Memory = None
    _plan: ScalingPlan | None = None
    _requests: list[SimulatedRequest] = field(default_factory=list)
    _moments: list[Moment] = field(default_factory=list)
    _actions: dict[str, int] = field(default_factory=dict)
    _action_times: list[tuple[float, str]] = field(default_factory=list)
    _end_s: float = 0.0
    _observer: SimulatedObserver | None = None

    def run(self) -> Outcome:
        """Replays the trace until its last request has ended. Decisions stop with the last arrival."""
        return run_together([self])[0]

    @property
    def horizon_s(self) -> float:
        """The end of the interval of the last arrival."""
        return math.ceil(max(self.scenario.trace.duration_s, 1e-9) / self.interval_s) * self.interval_s

    def begin(self, events: EventQueue, end_s: float) -> LiveRun:
        """Makes the cluster, and decides from now on until `end_s`."""
        scenario, self._end_s = self.scenario, end_s
        self._requests = [SimulatedRequest(request) for request in scenario.trace.requests]
        cluster = Cluster(
            replace(scenario.settings, on_demand=any(one.min == 0 for one in self.bounds.values())),
            events,
            on_first_token=lambda request, _: observer.first_token(request),
            on_end=lambda request, _: observer.ended(request),
        )
        self._observer = observer = SimulatedObserver(cluster, scenario.engine, scenario.window_s)
        cluster.looks_until_s = end_s
        cluster.on_waiting = lambda now_s: self._wake(now_s, cluster, observer)
        cluster.on_notice = lambda now_s: self._heard(now_s, cluster, observer)
        for pool, kinds in self._first_replicas().items():
            for kind in kinds:
                cluster.order(pool, 1, 0.0, cold_start_s=0.0, kind=kind)
        self._decide_at(0.0, events, cluster, observer)
        return LiveRun(self, cluster, observer, self._requests)

    def replicas(self) -> Sequence[ActualReplica]:
        """All that exist now."""
        return () if self._observer is None else self._observer.actual()

    def outcome(self, cluster: Cluster, cpu_s: float) -> Outcome:
        """Once all has ended."""
        class_hours = {pool: replica_hours(cluster, pool, self._end_s) for pool in POOLS}
        return Outcome(
            name=self.name,
            slo=self.scenario.slo,
            requests=self._requests,
            moments=self._moments,
            actions=self._actions,
            action_times=self._action_times,
            replica_hours={pool: sum(hours.values()) for pool, hours in class_hours.items()},
            class_hours=class_hours,
            duration_s=self._end_s,
            preempted_replicas=cluster.notices,
            resumed_requests=cluster.resumed,
            leaning_changes=cluster.leaning_changes if self.scenario.neutral else None,
            cpu_s=cpu_s,
        )

    def _first_replicas(self) -> Mapping[PoolName, Sequence[str]]:
        if self.first is not None:
            return self.first
        found: dict[PoolName, Sequence[str]] = {}
        for pool, count in self.scenario.first_replicas().items():
            kind, speed = next(iter(self.scenario.speeds.get(pool, {"": 1.0}).items()))
            found[pool] = [kind] * math.ceil(count / speed)
        return found

    def _decide_at(
        self, at_s: float, events: EventQueue, cluster: Cluster, observer: SimulatedObserver
    ) -> None:
        def decide(now_s: float) -> None:
            self._decide(now_s, cluster, observer)
            if now_s + self.interval_s < self._end_s:
                self._decide_at(now_s + self.interval_s, events, cluster, observer)

        events.at(at_s, decide)

    def _wake(self, now_s: float, cluster: Cluster, observer: SimulatedObserver) -> None:
        """Decides at once: at zero the autoscaler does not wait for its interval."""
        if self._plan is not None and self._plan.is_at_zero:
            self._decide(now_s, cluster, observer)

    def _heard(self, now_s: float, cluster: Cluster, observer: SimulatedObserver) -> None:
        """Decides at once: coordinators tell the autoscaler of a notice."""
        if now_s < self._end_s:
            self._decide(now_s, cluster, observer)

    def _decide(self, now_s: float, cluster: Cluster, observer: SimulatedObserver) -> None:
        if self.account is not None:
            self.account.listed(now_s, observer.actual())
        snapshot, paused = self._watched(observer.snapshot(now_s), observer)
        self._plan, self._memory = plan, _ = self.decide(self._memory, snapshot)
        self._moments.append(moment_of(snapshot, plan))
        cluster.sleeping = {pool for pool in POOLS if plan.pool(pool).sleep}
        if not self.acts:
            return
        pools = _members(cluster, snapshot)
        actions = reconcile_classes(plan, pools, self.bounds, paused)
        for action in actions:
            self._carry_out(action, now_s, cluster)
        where = planned_rotation(plan, pools, actions)
        self._turns.told(actions, now_s)
        cluster.lead(where.leanings, movable_workers(plan, pools, actions), now_s)
        cluster.lending = plan.lend_decode_to_prefill

    def _carry_out(self, action: Action, now_s: float, cluster: Cluster) -> None:
        if isinstance(action, Drain):
            self._watch.told_to_end(action.names)
        if isinstance(action, Start) and self.account is not None:
            action = replace(action, count=self.account.able(action))
            if not action.count:
                return
        word = type(action).__name__.lower()
        self._actions[word] = self._actions.get(word, 0) + 1
        self._action_times.append((now_s, f"{word} {action.pool}"))
        cluster.act(action, now_s)
        if self.account is not None:
            self.account.acted()

    def _watched(
        self, snapshot: Snapshot, observer: SimulatedObserver
    ) -> tuple[Snapshot, Collection[PoolClass]]:
        """The snapshot with overdue replicas marked, and the classes of which nothing is to be ordered now."""
        snapshot = self._turns.look(snapshot)
        if self.starts is None:
            return snapshot, ()
        seen = self._watch.look(snapshot, observer.actual(), self.starts)
        return seen, self._watch.paused(seen.now_s)


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run that has begun."""

    simulation: Simulation
    cluster: Cluster
    observer: SimulatedObserver
    requests: Sequence[SimulatedRequest]

    def arrivals(self, number: int) -> Iterator[tuple[float, int, SimulatedRequest]]:
        """When each request arrives, with the run's number; tells how far it is."""
        stride = max(1, len(self.requests) // _PROGRESS_STEPS)
        for place, request in enumerate(self.requests):
            if place % stride == 0:
                self.simulation.on_progress(place / len(self.requests))
            yield request.arrival_s, number, request


def run_together(simulations: Sequence[Simulation]) -> list[Outcome]:
    """Runs on one clock, each until the last request of all has ended. Decisions stop with the last arrival of all."""
    began, events = time.process_time(), EventQueue()
    end_s = max(one.horizon_s for one in simulations)
    runs = [one.begin(events, end_s) for one in simulations]
    arrivals = merge(*(run.arrivals(number) for number, run in enumerate(runs)), key=lambda one: one[:2])
    for arrival_s, number, request in arrivals:
        while events.next_s <= arrival_s:
            when_s, event = events.pop()
            event(when_s)
        runs[number].observer.arrived(request, arrival_s)
        runs[number].cluster.arrive(request, arrival_s)
    while events.next_s < float("inf"):
        when_s, event = events.pop()
        event(when_s)
    cpu_s = (time.process_time() - began) / max(1, sum(len(run.requests) for run in runs))
    return [run.simulation.outcome(run.cluster, cpu_s * len(run.requests)) for run in runs]


def _members(cluster: Cluster, seen: Snapshot) -> Mapping[PoolName, Sequence[ReplicaView]]:
    """Both pools, each replica in the state in which the snapshot has it."""
    states = {replica.name: replica.state for replica in (*seen.prefill.replicas, *seen.decode.replicas)}
    return {pool: [replace(one, state=states[one.name]) for one in cluster.members(pool)] for pool in POOLS}
