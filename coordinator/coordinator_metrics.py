"""The coordinator's Prometheus metrics. Labels are bounded: no request, no worker, no pair."""

from __future__ import annotations

from prometheus_client.core import Metric

from coordinator.pools import PoolSnapshot
from splitserve.metrics import gauge, gauges


def coordinator_metrics(snapshot: PoolSnapshot, running_requests: int) -> list[Metric]:
    """All metrics of a coordinator at one moment. A snapshot may be read on any thread."""
    pools = {
        pool: sum(snapshot.is_ready(worker) for worker in snapshot.workers if worker.pool == pool)
        for pool in ("prefill", "decode")
    }
    slow = sum(1 for w in snapshot.workers for _, lane in snapshot.lanes_of(w) if lane.problem)
    return [
        gauges("splitserve_requests", "Generations in progress", "state", {"running": running_requests}),
        gauges("splitserve_ready_workers", "Workers that can serve now", "pool", pools),
        gauge("splitserve_kv_slow_lanes", "Lanes below expectation", slow),
    ]
