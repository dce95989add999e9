"""Counters of the control loop, and their Prometheus metrics. Labels are bounded: pools, states, kinds of action."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from prometheus_client.core import Metric

from autoscaler.plan import Cause, PoolPlan, ScalingPlan
from autoscaler.snapshot import DecodeSignals, PrefillSignals, Replica, ReplicaState, Snapshot
from splitserve.metrics import counter, counters, gauge, gauges
from splitserve.roles import POOLS, PoolName

ACTIONS = ("start", "activate", "rest", "drain", "change_role")
HOPS = ("observe", "rotate", "start", "drain", "tidy", "policy")


@dataclass(slots=True)
class LoopStatus:
    """Counts since the process started, and the last decision. Values are replaced, so any thread may read."""

    decisions: int = 0
    plans: Mapping[PoolName, PoolPlan] = field(default_factory=dict)
    """What each pool was to have by the last decision; empty before the first."""
    replicas: Counter[tuple[PoolName, ReplicaState]] = field(default_factory=Counter)
    """The replicas on which that decision was based."""
    actions: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    """By hop: observation, each kind of action, and the policy."""
    holds_lease: bool = True
    policy_is_current: bool = True
    """False while the policy file is wrong and its last right version is in force."""
    policy_reloads: int = 0
    failed_starts: Mapping[PoolName, int] = field(default_factory=dict)
    pauses_s: Mapping[PoolName, float] = field(default_factory=dict)
    cold_starts_s: Mapping[PoolName, Mapping[str, float]] = field(default_factory=dict)
    """Seconds of each known phase of a pool's cold starts."""
    hosts: Mapping[str, bool] = field(default_factory=dict)
    """Whether each of several hosts answers."""

    def starts(
        self, failed: Mapping[PoolName, int], pauses_s: Mapping[PoolName, float], snapshot: Snapshot
    ) -> None:
        """Records the failed starts since the process started, the pauses after them, and the phases of cold starts."""
        self.failed_starts, self.pauses_s = dict(failed), dict(pauses_s)
        self.cold_starts_s = {pool: _cold_start_s(snapshot.pool(pool)) for pool in POOLS}

    def decided(self, plan: ScalingPlan, pools: Mapping[PoolName, Sequence[Replica]]) -> None:
        """Records a decision and the replicas it was based on."""
        self.decisions += 1
        self.plans = {pool: plan.pool(pool) for pool in POOLS}
        self.replicas = Counter((pool, replica.state) for pool in POOLS for replica in pools[pool])


def loop_metrics(status: LoopStatus) -> list[Metric]:
    """All metrics of the autoscaler at one moment."""
    plans = status.plans
    return [
        gauges(
            "splitserve_autoscaler_desired_replicas",
            "Replicas wanted in rotation",
            "pool",
            {pool: plan.desired for pool, plan in plans.items()},
        ),
        gauges(
            "splitserve_autoscaler_desired_standby",
            "Warm standbys wanted",
            "pool",
            {pool: plan.standby for pool, plan in plans.items()},
        ),
        gauges(
            "splitserve_autoscaler_replicas",
            "Replicas that exist",
            ("pool", "state"),
            {(pool, state.value): status.replicas[pool, state] for pool in plans for state in ReplicaState},
        ),
        gauges(
            "splitserve_autoscaler_reason",
            "1 for what decided the number of replicas wanted, 0 for the rest",
            ("pool", "reason"),
            {
                (pool, reason): reason == plan.cause
                for pool, plan in plans.items()
                for reason in get_args(Cause)
            },
        ),
        counter("splitserve_autoscaler_decisions", "Decisions made", status.decisions),
        counters(
            "splitserve_autoscaler_actions",
            "Actions done",
            "action",
            {kind: status.actions[kind] for kind in ACTIONS},
        ),
        counters(
            "splitserve_autoscaler_errors",
            "Hops that failed, tried again later",
            "hop",
            {hop: status.errors[hop] for hop in HOPS},
        ),
        counters(
            "splitserve_autoscaler_failed_starts",
            "Replicas that ended or were overdue before they were up for one cold start",
            "pool",
            status.failed_starts,
        ),
        gauges(
            "splitserve_autoscaler_start_pause_seconds",
            "Time for which nothing is ordered, because the last replicas failed",
            "pool",
            status.pauses_s,
        ),
        gauges(
            "splitserve_autoscaler_cold_start_seconds",
            "Median time of a replica's start, by phase",
            ("pool", "phase"),
            {
                (pool, phase): took_s
                for pool, phases in status.cold_starts_s.items()
                for phase, took_s in phases.items()
            },
        ),
        gauges(
            "splitserve_autoscaler_host_reachable",
            "Whether a host answers; what runs on one that does not is unknown",
            "host",
            status.hosts,
        ),
        gauge("splitserve_autoscaler_holds_lease", "Whether this autoscaler may act", status.holds_lease),
        gauge(
            "splitserve_autoscaler_policy_current",
            "0 while the policy file cannot be taken and the one before is in force",
            status.policy_is_current,
        ),
        counter(
            "splitserve_autoscaler_policy_reloads", "Policies taken since the start", status.policy_reloads
        ),
    ]


def _cold_start_s(signals: PrefillSignals | DecodeSignals) -> dict[str, float]:
    """Phases of a pool's cold starts, seconds. `schedule` is the part that replicas do not measure themselves."""
    start, took_s = signals.start, signals.cold_start_s
    if start is None:
        return {}
    phases = {"process": start.process_s, "weights": start.weights_s, "warm_up": start.warm_up_s}
    return phases if took_s is None else {"schedule": max(0.0, took_s - start.total_s), **phases}
