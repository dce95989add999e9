"""A scaling policy of one's own, as the documentation shows it: a replica for each ten requests that wait."""

from __future__ import annotations

from autoscaler.policies.recommendation import PoolStatus, Recommendation
from autoscaler.snapshot import Snapshot


def by_queue(
    memory: int | None, snapshot: Snapshot, status: PoolStatus, *, each: float = 10.0
) -> tuple[Recommendation, int]:
    """`memory` counts the decisions."""
    depth = snapshot.metrics.get("queue_depth")
    decisions = (memory or 0) + 1
    if depth is None:
        return Recommendation(status.current, "nothing measured: count kept"), decisions
    need = depth / each
    return Recommendation(max(1, round(need)), f"{depth:.0f} wait", need), decisions


def one_with_need(memory: None, snapshot: Snapshot, status: PoolStatus) -> tuple[Recommendation, None]:
    """One replica, kept as busy as the metric `need` says."""
    need = snapshot.metrics.get("need") or 0.0
    return Recommendation(1, f"{need:g} of a replica is busy", need), memory
