"""What the control loop counts, and how Prometheus sees it. Labels are bounded: pools, states, kinds of action."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import GaugeMetricFamily, Metric

from autoscaler.plan import Plan
from autoscaler.reconcile import Member
from autoscaler.snapshot import POOLS, PoolName, ReplicaState
from splitserve.metrics import counter, counters, gauge, gauges

ACTIONS = ("start", "activate", "rest", "drain")
HOPS = ("observe", "rotate", "start", "drain")


@dataclass(slots=True)
class LoopStatus:
    """Counts since the start of the process, and the last decision. Replaced values only: any thread may read."""

    decisions: int = 0
    desired: Mapping[PoolName, int] = field(default_factory=dict)
    standby: Mapping[PoolName, int] = field(default_factory=dict)
    actual: Mapping[PoolName, Mapping[ReplicaState, int]] = field(default_factory=dict)
    lending: bool = False
    actions: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    """By hop: looking at coordinators and replicas, and each kind of action."""

    def decided(self, plan: Plan, pools: Mapping[PoolName, Sequence[Member]]) -> None:
        """Notes a decision and what it was made against."""
        self.decisions += 1
        self.desired = {pool: plan.pool(pool).desired for pool in POOLS}
        self.standby = {pool: plan.pool(pool).standby for pool in POOLS}
        self.lending = plan.lend_decode_to_prefill
        self.actual = {
            pool: {state: sum(m.state is state for m in pools[pool]) for state in ReplicaState}
            for pool in POOLS
        }


def loop_metrics(status: LoopStatus) -> list[Metric]:
    """All metrics of the autoscaler at one moment."""
    actual = GaugeMetricFamily(
        "splitserve_autoscaler_replicas", "Replicas that exist", labels=["pool", "state"]
    )
    for pool, states in status.actual.items():
        for state, count in states.items():
            actual.add_metric([pool, state.value], count)
    actions = {kind: float(status.actions[kind]) for kind in ACTIONS}
    errors = {hop: float(status.errors[hop]) for hop in HOPS}
    return [
        gauges(
            "splitserve_autoscaler_desired_replicas",
            "Replicas wanted in rotation",
            "pool",
            {str(pool): count for pool, count in status.desired.items()},
        ),
        gauges(
            "splitserve_autoscaler_desired_standby",
            "Warm standbys wanted",
            "pool",
            {str(pool): count for pool, count in status.standby.items()},
        ),
        actual,
        gauge("splitserve_autoscaler_lending", "Whether decode computes prompts meanwhile", status.lending),
        counter("splitserve_autoscaler_decisions", "Decisions made", status.decisions),
        counters("splitserve_autoscaler_actions", "Actions done", "action", actions),
        counters("splitserve_autoscaler_errors", "Hops that failed, tried again later", "hop", errors),
    ]
