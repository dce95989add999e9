"""Replays a trace against a policy on a virtual clock. `splitserve simulate` compares policies by it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from autoscaler.decide import make_decide
from autoscaler.plan import Decide, Memory, PoolPlan, ScalingPlan
from autoscaler.policies.policy_file import ScalingPolicy
from autoscaler.reconcile import Action, Bounds, Drain, ReplicaView, action_word, bounds_of, reconcile
from autoscaler.simulation.cluster.cluster import Cluster
from autoscaler.simulation.cluster.replica import EventQueue, SimulatedRequest
from autoscaler.simulation.observer import SimulatedObserver
from autoscaler.simulation.outcome import Moment, Outcome, moment_of
from autoscaler.simulation.scenario import Scenario
from autoscaler.snapshot import Snapshot
from autoscaler.start_watch import StartLimits, StartWatch, start_limits
from splitserve.models.sources import Progress
from splitserve.roles import POOLS, POOLS_OF, PoolName

NO_BOUNDS: Mapping[PoolName, Bounds] = dict.fromkeys(POOLS, Bounds(1, 10_000))
_PROGRESS_STEPS = 100
SETTLED_S = 3600.0
"""As long as the longest stabilization window. Makes long gaps between requests cheap: once nothing has changed for
this time, decisions are this far apart, until this time before the next request. In a gap a schedule may take effect
this much later."""


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
    None: without the watch, and a replica that has ended is replaced at once."""
    _watch: StartWatch = field(default_factory=lambda: StartWatch(lambda *_, **__: None))
    _memory: Memory = None
    _plan: ScalingPlan | None = None
    _requests: list[SimulatedRequest] = field(default_factory=list)
    _moments: list[Moment] = field(default_factory=list)
    _actions: dict[str, int] = field(default_factory=dict)
    _action_times: list[tuple[float, str]] = field(default_factory=list)
    _end_s: float = 0.0
    _next_arrival_s: float = 0.0
    _changed_s: float = 0.0
    """When the plan's counts last changed or the cluster was last busy."""

    def run(self) -> Outcome:
        """Replays the trace until its last request has ended. Decisions stop with the last arrival."""
        began, events = time.process_time(), EventQueue()
        scenario = self.scenario
        last_s = max(scenario.trace.duration_s, 1e-9)
        self._end_s = math.ceil(last_s / self.interval_s) * self.interval_s
        self._requests = [SimulatedRequest.of(request) for request in scenario.trace.requests]
        cluster = Cluster(
            scenario,
            events,
            on_first_token=lambda request, _: observer.first_token(request),
            on_end=lambda request, _: observer.ended(request),
            on_local=lambda request, _: observer.local(request),
            on_demand=any(bounds.min == 0 for bounds in self.bounds.values()),
        )
        observer = SimulatedObserver(cluster, scenario)
        cluster.on_waiting = lambda now_s: self._wake(now_s, cluster, observer)
        for pool, count in scenario.first_replicas().items():
            cluster.order(pool, count, 0.0, cold_start_s=0.0)
        cluster.order("both", scenario.both, 0.0, cold_start_s=0.0)
        self._decide_at(0.0, events, cluster, observer)
        stride = max(1, len(self._requests) // _PROGRESS_STEPS)
        for place, request in enumerate(self._requests):
            if place % stride == 0:
                self.on_progress(place / len(self._requests))
            self._next_arrival_s = request.arrival_s
            while events.next_s <= request.arrival_s:
                when_s, event = events.pop()
                event(when_s)
            observer.arrived(request)
            cluster.arrive(request, request.arrival_s)
        while events.next_s < float("inf"):
            when_s, event = events.pop()
            event(when_s)
        return self._outcome(cluster, time.process_time() - began)

    def _outcome(self, cluster: Cluster, cpu_s: float) -> Outcome:
        return Outcome(
            name=self.name,
            slo=self.scenario.slo,
            requests=self._requests,
            moments=self._moments,
            actions=self._actions,
            action_times=self._action_times,
            replica_hours={
                role: sum(
                    replica.hours_as(role, self._end_s) for replica in (*cluster.replicas, *cluster.ended)
                )
                for role in POOLS_OF
            },
            duration_s=self._end_s,
            cpu_s=cpu_s,
        )

    def _decide_at(
        self, at_s: float, events: EventQueue, cluster: Cluster, observer: SimulatedObserver
    ) -> None:
        def decide(now_s: float) -> None:
            before = self._plan
            self._decide(now_s, cluster, observer)
            is_idle = events.next_s == float("inf")
            if not is_idle or before is None or self._plan is None or self._plan.numbers != before.numbers:
                self._changed_s = now_s
            next_s = now_s + self.interval_s * self._intervals_until_next(now_s)
            if next_s < self._end_s:
                self._decide_at(next_s, events, cluster, observer)

        events.at(at_s, decide)

    def _intervals_until_next(self, now_s: float) -> int:
        """Intervals from one decision to the next: 1, or more once the cluster has settled, but not past an arrival."""
        if now_s - self._changed_s < SETTLED_S:
            return 1
        rarely_s = min(SETTLED_S, self._next_arrival_s - SETTLED_S - now_s)
        return max(1, math.floor(rarely_s / self.interval_s))

    def _wake(self, now_s: float, cluster: Cluster, observer: SimulatedObserver) -> None:
        """Decides at once: at zero the autoscaler does not wait for its interval."""
        if self._plan is not None and self._plan.is_at_zero:
            self._decide(now_s, cluster, observer)

    def _decide(self, now_s: float, cluster: Cluster, observer: SimulatedObserver) -> None:
        snapshot, paused = self._watched(observer.snapshot(now_s), observer)
        self._plan, self._memory = plan, _ = self.decide(self._memory, snapshot)
        self._moments.append(moment_of(snapshot, plan))
        pools = _members(cluster, snapshot)
        for action in reconcile(plan, pools, self.bounds, paused):
            self._carry_out(action, now_s, cluster)

    def _carry_out(self, action: Action, now_s: float, cluster: Cluster) -> None:
        if isinstance(action, Drain):
            self._watch.told_to_end(action.names)
        word = action_word(action)
        self._actions[word] = self._actions.get(word, 0) + 1
        self._action_times.append((now_s, f"{word} {action.pool}"))
        cluster.act(action, now_s)

    def _watched(
        self, snapshot: Snapshot, observer: SimulatedObserver
    ) -> tuple[Snapshot, Collection[PoolName]]:
        """The snapshot with overdue replicas marked, and the pools in which nothing is to be ordered now."""
        if self.starts is None:
            return snapshot, ()
        watched = self._watch.look(snapshot, observer.actual(), self.starts)
        return watched, self._watch.paused(watched.now_s)


def _members(cluster: Cluster, snapshot: Snapshot) -> Mapping[PoolName, Sequence[ReplicaView]]:
    """Both pools, each replica in its state in the snapshot."""
    states = {r.name: r.state for r in (*snapshot.prefill.replicas, *snapshot.decode.replicas)}
    return {
        pool: [replace(member, state=states[member.name]) for member in cluster.members(pool)]
        for pool in POOLS
    }


POLICY_NAME = "policy"


def compare(
    scenario: Scenario, policies: Mapping[str, ScalingPolicy], on_progress: Progress = lambda *_: None
) -> list[Outcome]:
    """One run for each policy, by name, in their order."""
    return [
        run_policy(scenario, policy, partial(on_progress, name), name) for name, policy in policies.items()
    ]


def run_policy(
    scenario: Scenario,
    policy: ScalingPolicy,
    on_progress: Callable[[float], None] = lambda _: None,
    name: str = POLICY_NAME,
) -> Outcome:
    """Runs the policy under the control loop's watch over starts."""
    bounds, decide, starts = bounds_of(policy), make_decide(policy), start_limits(policy)
    return Simulation(scenario, decide, policy.interval_s, bounds, name, on_progress, starts=starts).run()


def static_replicas(counts: Mapping[PoolName, int]) -> Decide:
    """A `Decide` function with constant counts."""
    plan = ScalingPlan(PoolPlan(counts["prefill"]), PoolPlan(counts["decode"]))
    return lambda memory, snapshot: (plan, memory)
