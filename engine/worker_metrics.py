"""A worker's Prometheus metrics. Labels are bounded: no request, no peer, no pair."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from prometheus_client.core import Metric

from engine.types import EngineLoad
from kv_transfer.lanes import JudgedLane
from splitserve.metrics import counter, counters, gauge, gauges


def worker_metrics(
    load: EngineLoad,
    lanes: tuple[JudgedLane, ...],
    handoffs_completed: int,
    handoff_bytes: int,
    handoffs_rejected: Mapping[str, int],
) -> list[Metric]:
    """All metrics of a worker at one moment. Lanes are summed up, for their number is prefill times decode."""
    blocks = {
        "free": load.free_blocks,
        "reserved": load.reserved_blocks,
        "quarantined": load.quarantined_blocks,
        "referenced": load.referenced_blocks,
    }
    requests = {"running": load.running_requests, "waiting": load.waiting_requests}
    metrics = [
        gauges("splitserve_kv_blocks", "KV blocks by owner", "state", blocks),
        gauges("splitserve_requests", "Sequences in the engine", "state", requests),
        counter("splitserve_handoffs_completed", "Handoffs sent or admitted", handoffs_completed),
        counters("splitserve_handoffs_rejected", "Handoffs that failed", "reason", handoffs_rejected),
        counter("splitserve_kv_sent_bytes", "KV bytes of completed handoffs, at their sender", handoff_bytes),
        gauge("splitserve_kv_slow_lanes", "Lanes below expectation", sum(1 for j in lanes if j.problem)),
    ]
    if speeds := [judged.lane.gb_per_s for judged in lanes]:
        metrics.append(
            gauges(
                "splitserve_kv_lane_gigabytes_per_second",
                "Lanes to peers at first contact",
                "stat",
                {"min": min(speeds), "median": median(speeds)},
            )
        )
    return metrics
