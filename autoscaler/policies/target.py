"""The HPA formula on any metric: ceil(ready replicas * value / target), unless that is within the tolerance.

https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/#algorithm-details, as for metrics of type
Object and External. As there, a missing metric leaves the count unchanged.
"""

from __future__ import annotations

import math

from autoscaler.policies.policy_file import MOST_REPLICAS, TargetPool
from autoscaler.policies.recommendation import PoolStatus, Recommendation
from autoscaler.snapshot import Snapshot
from splitserve.histograms import Histogram
from splitserve.roles import PoolName


def recommend_target(
    pool: TargetPool, name: PoolName, memory: None, snapshot: Snapshot, status: PoolStatus
) -> tuple[Recommendation, None]:
    """The recommendation of an HPA. Pure."""
    value = metric_value(pool.metric, name, pool.percentile, snapshot, status.ready)
    if value is None:
        return Recommendation(status.current, f"{pool.metric} is missing: count kept"), memory
    if pool.target_type == "AverageValue":
        need = value / pool.target
        ratio = need / status.ready if status.ready else math.inf
    else:
        ratio = value / pool.target
        need = ratio * status.ready
    limits = pool.limits(pool.cold_start_s)
    within = 1 - limits.down.tolerance <= ratio <= 1 + limits.up.tolerance
    need = min(need, MOST_REPLICAS)
    wanted = status.current if within else math.ceil(need)
    return Recommendation(wanted, f"{pool.metric} {value:.4g}, target {pool.target:.4g}", need), memory


def metric_value(
    metric: str, name: PoolName, percentile: float, snapshot: Snapshot, ready: int
) -> float | None:
    """The metric now; None while it is unknown. Latencies in ms."""
    if metric == "ttft":
        return _ms(snapshot.prefill.ttft, percentile)
    if metric == "tpot":
        return _ms(snapshot.decode.tpot, percentile)
    if metric == "backlog_tokens":
        return float(snapshot.prefill.backlog_tokens)
    if metric == "utilization":
        return _utilization(name, snapshot, ready)
    return snapshot.metrics.get(metric)


def _ms(histogram: Histogram | None, percentile: float) -> float | None:
    value = histogram.percentile(percentile) if histogram is not None else None
    return None if value is None else value * 1e3


def _utilization(name: PoolName, snapshot: Snapshot, ready: int) -> float | None:
    """Prefill: arriving tokens over the pool's rate. Decode: share of the KV capacity in use."""
    if name == "decode":
        capacity = (snapshot.decode.kv_capacity_tokens or 0) * ready
        return snapshot.decode.context_tokens / capacity if capacity else None
    capacity_per_s = (snapshot.prefill.tokens_per_s or 0.0) * ready
    recent = snapshot.arrivals_of_last(snapshot.window_s)
    span_s = snapshot.now_s - recent[0].start_s if recent else 0.0
    if capacity_per_s <= 0 or span_s <= 0:
        return None
    return sum(bucket.uncached_tokens for bucket in recent) / span_s / capacity_per_s
