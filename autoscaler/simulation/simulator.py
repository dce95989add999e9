"""Replays a trace against a policy on a virtual clock, as `splitserve simulate` does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from autoscaler.decide import make_decide
from autoscaler.plan import Decide, Memory, PoolPlan, ScalingPlan
from autoscaler.policies.policy_file import MOST_REPLICAS, PoolPolicy, ScalingPolicy
from autoscaler.reconcile import Drain, action_word, reconcile
from autoscaler.simulation.cluster.cluster import Cluster
from autoscaler.simulation.cluster.replica import EventQueue, SimulatedRequest
from autoscaler.simulation.observer import SimulatedObserver
from autoscaler.simulation.outcome import Moment, Outcome, moment_of
from autoscaler.simulation.scenario import Scenario
from autoscaler.start_watch import StartWatch
from splitserve.roles import POOLS, POOLS_OF, PoolName

NO_BOUNDS: Mapping[PoolName, PoolPolicy] = dict.fromkeys(POOLS, PoolPolicy(max_replicas=MOST_REPLICAS))
_PROGRESS_STEPS = 100
SETTLED_S = 3600.0
"""As long as the longest stabilization window. Makes long gaps between requests cheap: once nothing has changed for
this time, decisions are this far apart, until this time before the next request. In a gap a schedule may take effect
this much later."""


class Simulation:
    """One run. `run` may be called once.

    `interval_s`: the time between decisions. `pools` has the bounds of both pools and the limits of their starts.
    `on_progress` is called about a hundred times, with the share of the requests that have arrived. `watch_starts`: as
    the control loop does, replaces overdue replicas and pauses after failed ones. Without it a replica that has ended
    is replaced at once.
    """

    def __init__(
        self,
        scenario: Scenario,
        decide: Decide,
        interval_s: float = 15.0,
        pools: Mapping[PoolName, PoolPolicy] = NO_BOUNDS,
        name: str = "policy",
        on_progress: Callable[[float], None] = lambda _: None,
        watch_starts: bool = False,
    ) -> None:
        self._scenario, self._policy, self._interval_s, self._pools = scenario, decide, interval_s, pools
        self._name, self._on_progress, self._watch_starts = name, on_progress, watch_starts
        self._watch = StartWatch(lambda *_, **__: None)
        self._memory: Memory = None
        self._plan: ScalingPlan | None = None
        self._requests = [SimulatedRequest.of(request) for request in scenario.trace.requests]
        self._moments: list[Moment] = []
        self._action_times: list[tuple[float, str]] = []
        self._end_s = math.ceil(max(scenario.trace.duration_s, 1e-9) / interval_s) * interval_s
        self._next_arrival_s = 0.0
        self._changed_s = 0.0
        """When the plan's counts last changed or the cluster was last busy."""
        self._events = EventQueue()
        self._cluster = Cluster(
            scenario,
            self._events,
            on_first_token=lambda request, _: self._observer.first_token(request),
            on_end=lambda request, _: self._observer.ended(request),
            on_local=lambda request, _: self._observer.local(request),
            on_waiting=self._wake,
            on_demand=any(pool.min_replicas == 0 for pool in pools.values()),
        )
        self._observer = SimulatedObserver(self._cluster, scenario)

    def run(self) -> Outcome:
        """Replays the trace until its last request has ended. Decisions stop with the last arrival."""
        began, events, cluster = time.process_time(), self._events, self._cluster
        for pool, count in self._scenario.first_replicas().items():
            cluster.order(pool, count, 0.0, cold_start_s=0.0)
        cluster.order("both", self._scenario.both, 0.0, cold_start_s=0.0)
        events.at(0.0, self._decide_often)
        stride = max(1, len(self._requests) // _PROGRESS_STEPS)
        for place, request in enumerate(self._requests):
            if place % stride == 0:
                self._on_progress(place / len(self._requests))
            self._next_arrival_s = request.arrival_s
            events.run_until(request.arrival_s)
            self._observer.arrived(request)
            cluster.arrive(request, request.arrival_s)
        events.run_until(math.inf)
        replicas = (*cluster.replicas, *cluster.ended)
        return Outcome(
            name=self._name,
            slo=self._scenario.slo,
            requests=self._requests,
            moments=self._moments,
            action_times=self._action_times,
            replica_hours={
                role: sum(replica.hours_as(role, self._end_s) for replica in replicas) for role in POOLS_OF
            },
            duration_s=self._end_s,
            cpu_s=time.process_time() - began,
        )

    def _decide_often(self, now_s: float) -> None:
        """Decides, and plans the next decision."""
        before = self._plan
        self._decide(now_s)
        is_idle = self._events.next_s == math.inf
        if not is_idle or before is None or self._plan is None or self._plan.numbers != before.numbers:
            self._changed_s = now_s
        next_s = now_s + self._interval_s * self._intervals_until_next(now_s)
        if next_s < self._end_s:
            self._events.at(next_s, self._decide_often)

    def _intervals_until_next(self, now_s: float) -> int:
        """Intervals from one decision to the next: 1, or more once the cluster has settled, but not past an arrival."""
        if now_s - self._changed_s < SETTLED_S:
            return 1
        rarely_s = min(SETTLED_S, self._next_arrival_s - SETTLED_S - now_s)
        return max(1, math.floor(rarely_s / self._interval_s))

    def _wake(self, now_s: float) -> None:
        """Decides at once: at zero the autoscaler does not wait for its interval."""
        if self._plan is not None and self._plan.is_at_zero:
            self._decide(now_s)

    def _decide(self, now_s: float) -> None:
        snapshot, paused = self._observer.snapshot(now_s), frozenset[PoolName]()
        if self._watch_starts:
            snapshot = self._watch.look(snapshot, self._pools)
            paused = self._watch.paused(now_s)
        self._plan, self._memory = plan, _ = self._policy(self._memory, snapshot)
        self._moments.append(moment_of(snapshot, plan))
        pools = {pool: snapshot.pool(pool).replicas for pool in POOLS}
        for action in reconcile(plan, pools, self._pools, paused):
            if isinstance(action, Drain):
                self._watch.told_to_end(action.names)
            self._action_times.append((now_s, f"{action_word(action)} {action.pool}"))
            self._cluster.act(action, now_s)


POLICY_NAME = "policy"


def run_policy(
    scenario: Scenario,
    policy: ScalingPolicy,
    on_progress: Callable[[float], None] = lambda _: None,
    name: str = POLICY_NAME,
) -> Outcome:
    """Runs the policy under the control loop's watch over starts."""
    decide = make_decide(policy)
    return Simulation(
        scenario, decide, policy.interval_s, policy.pools, name, on_progress, watch_starts=True
    ).run()


def static_replicas(counts: Mapping[PoolName, int]) -> Decide:
    """A `Decide` function with constant counts."""
    plan = ScalingPlan(PoolPlan(counts["prefill"]), PoolPlan(counts["decode"]))
    return lambda memory, snapshot: (plan, memory)
