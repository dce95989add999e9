"""The HPA formula on any metric: ceil(ready replicas * value / target), unless that is within the tolerance.

https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/#algorithm-details, as for metrics of type
Object and External. Here as there, a metric that is missing leaves the count alone.
"""

from __future__ import annotations

import math

from autoscaler.advice import Advice, Situation
from autoscaler.histogram import Histogram
from autoscaler.policy_file import TargetPool
from autoscaler.snapshot import PoolName, Snapshot


def advise_target(
    pool: TargetPool, name: PoolName, memory: None, snapshot: Snapshot, situation: Situation
) -> tuple[Advice, None]:
    """What an HPA would want. Pure."""
    value = metric_value(pool.metric, name, pool.percentile, snapshot, situation.ready)
    if value is None:
        return Advice(situation.current, f"{pool.metric} is missing: count kept"), memory
    if pool.target_type == "AverageValue":
        need = value / pool.target
        ratio = need / situation.ready if situation.ready else math.inf
    else:
        ratio = value / pool.target
        need = ratio * situation.ready
    limits = pool.limits(pool.cold_start_s)
    within = 1 - limits.down.tolerance <= ratio <= 1 + limits.up.tolerance
    wanted = situation.current if within else math.ceil(need)
    return Advice(wanted, f"{pool.metric} {value:.4g}, target {pool.target:.4g}", need), memory


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
    """Prefill: tokens that arrive over tokens that the pool can compute. Decode: share of the KV capacity held."""
    if name == "decode":
        capacity = (snapshot.decode.kv_capacity_tokens or 0) * ready
        return snapshot.decode.context_tokens / capacity if capacity else None
    capacity_per_s = (snapshot.prefill.tokens_per_s or 0.0) * ready
    recent = [b for b in snapshot.arrivals if b.start_s + b.length_s > snapshot.now_s - snapshot.window_s]
    span = snapshot.now_s - recent[0].start_s if recent else 0.0
    if capacity_per_s <= 0 or span <= 0:
        return None
    return sum(bucket.uncached_tokens for bucket in recent) / span / capacity_per_s
