"""The outcome of a run: attainment, latency by phase, replica-hours, actions, and a record over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoscaler.plan import ScalingPlan
from autoscaler.simulation.cluster.replica import SimulatedRequest
from autoscaler.simulation.scenario import Slo
from autoscaler.snapshot import Replica, ReplicaState, Snapshot
from splitserve.roles import POOLS, PoolName, RoleName

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Moment:
    """The cluster at one decision."""

    at_s: float
    replicas: Mapping[PoolName, Mapping[str, int]]
    """Counts by pool and state."""
    desired: Mapping[PoolName, int]


def moment_of(snapshot: Snapshot, plan: ScalingPlan) -> Moment:
    """The record of a decision."""
    return Moment(
        at_s=snapshot.now_s,
        replicas={pool: _by_state(snapshot.pool(pool).replicas) for pool in POOLS},
        desired={pool: plan.pool(pool).desired for pool in POOLS},
    )


def _by_state(replicas: Iterable[Replica]) -> dict[str, int]:
    counts = Counter(replica.state for replica in replicas)
    return {state.value: counts[state] for state in ReplicaState}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. A request attains the SLO when both targets hold; a failed one never does."""

    name: str
    slo: Slo
    requests: Sequence[SimulatedRequest]
    moments: Sequence[Moment]
    action_times: Sequence[tuple[float, str]]
    """Each action as its time and "WORD POOL"."""
    replica_hours: Mapping[RoleName, float]
    """Hours by role, from the order of each replica until it ended or the run did."""
    duration_s: float
    cpu_s: float

    @property
    def total_replica_hours(self) -> float:
        """Replica-hours of all roles."""
        return sum(self.replica_hours.values())

    @property
    def actions(self) -> Mapping[str, int]:
        """Number of actions by their word."""
        return Counter(what.partition(" ")[0] for _, what in self.action_times)

    @property
    def failed_requests(self) -> int:
        """Requests without an answer."""
        return sum(request.failed for request in self.requests)

    @property
    def attainment(self) -> float:
        """Share of requests within both targets."""
        return self._share(lambda request: self.ttft_met(request) and self.tpot_met(request))

    @property
    def attainment_ttft(self) -> float:
        """Share of requests within the TTFT target."""
        return self._share(self.ttft_met)

    @property
    def attainment_tpot(self) -> float:
        """Share of requests within the TPOT target; answers of one token always are."""
        return self._share(self.tpot_met)

    def ttft_met(self, request: SimulatedRequest) -> bool:
        """Whether TTFT is within its target."""
        return request.ttft_s is not None and request.ttft_s <= self.slo.ttft_s

    def tpot_met(self, request: SimulatedRequest) -> bool:
        """Whether TPOT is within its target."""
        if request.failed:
            return False
        return request.tpot_s is None or request.tpot_s <= self.slo.tpot_s

    def _share(self, met: Any) -> float:
        return (
            sum(1 for request in self.requests if met(request)) / len(self.requests) if self.requests else 1.0
        )

    def phases(self) -> dict[str, dict[str, float]]:
        """p50, p95 and p99 of each phase of the requests' lives, seconds."""
        served = [request for request in self.requests if not request.failed]
        spans = {
            "ttft": [request.ttft_s for request in served],
            "tpot": [request.tpot_s for request in served],
            "reserve_wait": [_span(request.arrival_s, request.reserved_s) for request in served],
            "prefill_queue": [_span(request.reserved_s, request.started_s) for request in served],
            "prefill_compute": [_span(request.started_s, request.first_token_s) for request in served],
            "transfer": [_span(request.first_token_s, request.joined_s) for request in served],
        }
        return {
            name: _percentiles([value for value in values if value is not None])
            for name, values in spans.items()
        }

    def to_json(self) -> dict[str, Any]:
        """Plain values; times in seconds unless the name says otherwise."""
        return {
            "policy": self.name,
            "requests": len(self.requests),
            "attainment": round(self.attainment, 5),
            "attainment_ttft": round(self.attainment_ttft, 5),
            "attainment_tpot": round(self.attainment_tpot, 5),
            "failed_requests": self.failed_requests,
            "replica_hours": round(self.total_replica_hours, 4),
            "replica_hours_prefill": round(self.replica_hours["prefill"], 4),
            "replica_hours_decode": round(self.replica_hours["decode"], 4),
            "peak_replicas": self.peak_replicas,
            "actions": sum(self.actions.values()),
            "actions_by_kind": dict(self.actions),
            "phases_s": self.phases(),
            "duration_s": self.duration_s,
            "cpu_ms_per_request": round(self.cpu_s / max(1, len(self.requests)) * 1e3, 4),
        }

    @property
    def peak_replicas(self) -> int:
        """Most replicas of both pools together at a decision, in any state."""
        totals = (sum(sum(states.values()) for states in moment.replicas.values()) for moment in self.moments)
        return max(totals, default=0)


def _span(since_s: float | None, until_s: float | None) -> float | None:
    return None if since_s is None or until_s is None else until_s - since_s


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    percentiles = np.percentile(np.asarray(values), PERCENTILES)
    return {
        f"p{percent}": round(float(value), 6) for percent, value in zip(PERCENTILES, percentiles, strict=True)
    }
