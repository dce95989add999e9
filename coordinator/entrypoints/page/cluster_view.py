"""The cluster at one moment as JSON for the page. Pure. Lists are cut at a bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from coordinator.admission.controller import AdmissionCounts
from coordinator.telemetry.prometheus import STATE_NAMES
from coordinator.telemetry.record_keeper import KvFlow
from coordinator.telemetry.request_stats import ModelStats
from coordinator.telemetry.scaling_service import WorkerStates
from coordinator.telemetry.scaling_timeline import ScalingTimeline
from coordinator.workers.rotation import NO_PLAN, RotationPlan
from coordinator.workers.snapshot import PoolSnapshot, Worker
from splitserve.latency_model import LatencyModel

MAX_WORKERS = 1024
MAX_FLOWS = 256
MAX_MODELS = 64
FLOW_WINDOW_S = 5.0


def workers_view(snapshot: PoolSnapshot, states: WorkerStates, now_s: float) -> dict[str, Any]:
    """The first `MAX_WORKERS` workers with their last reports, as rows of named columns. Without workers there are no
    columns either."""
    figures = [_figures(worker, states, now_s) for worker in snapshot.workers[:MAX_WORKERS]]
    return {
        "count": len(snapshot.workers),
        "columns": list(figures[0]) if figures else [],
        "rows": [list(row.values()) for row in figures],
    }


def _figures(worker: Worker, states: WorkerStates, now_s: float) -> dict[str, Any]:
    load, latency = worker.load, LatencyModel.from_proto(worker.load.latency)
    state, since_s = states.since.get(worker.key, (None, now_s))
    return {
        "id": worker.worker_id,
        "role": worker.role,
        "model": worker.model.name,
        "state": "starting" if state is None else STATE_NAMES[state],
        "state_s": round(now_s - since_s, 1),
        "circuit": worker.circuit.state,
        "running": load.running_requests,
        "waiting": load.waiting_requests,
        "waiting_tokens": load.waiting_tokens,
        "total_blocks": load.total_blocks,
        "referenced_blocks": load.referenced_blocks,
        "reserved_blocks": load.reserved_blocks,
        "quarantined_blocks": load.quarantined_blocks,
        "free_blocks": load.free_blocks,
        "transfers": load.transfers_in_flight,
        "prefill_tokens_per_s": round(latency.prefill_tokens_per_s, 1),
        "step_ms": round(latency.present_step_s(load, worker.block_size_tokens) * 1e3, 2),
    }


def flows_view(flows: Sequence[KvFlow]) -> list[list[Any]]:
    """The pairs with the most KV traffic, as [prefill worker, decode worker, handoffs/s, bytes/s]."""
    return [
        [
            flow.prefill_worker,
            flow.decode_worker,
            round(flow.handoffs / FLOW_WINDOW_S, 2),
            round(flow.written_bytes / FLOW_WINDOW_S),
        ]
        for flow in flows[:MAX_FLOWS]
    ]


def models_view(
    stats: Mapping[str, ModelStats], queues: Mapping[str, AdmissionCounts]
) -> list[dict[str, Any]]:
    """Each model's requests in progress, its queue by class, and the hit rates of its prefix caches."""
    return [_model(name, stats[name], queues.get(name)) for name in sorted(stats)[:MAX_MODELS]]


def _model(name: str, stats: ModelStats, queue: AdmissionCounts | None) -> dict[str, Any]:
    looked_up = stats.looked_up_tokens
    return {
        "model": name,
        "stages": {stage.value: count for stage, count in stats.stages.items()},
        "queued": dict(queue.queued) if queue is not None else {},
        "queued_prompt_tokens": queue.queued_prompt_tokens if queue is not None else 0,
        "backlog_tokens": round(stats.backlog_tokens),
        "hits": {
            pool: round(count / looked_up, 4) if looked_up else 0.0
            for pool, count in stats.hit_tokens.items()
        },
    }


def scaling_view(timeline: ScalingTimeline, plan: RotationPlan, now_s: float) -> dict[str, Any]:
    """The last decision about each pool with its actions, and the earlier decisions, the latest first."""
    in_force = plan is not NO_PLAN
    return {
        "in_force": in_force,
        "expires_in_s": round(max(0.0, plan.expires_s - now_s), 1) if in_force else None,
        "latest": [asdict(entry) for entry in timeline.latest],
        "entries": [asdict(entry) for entry in reversed(timeline.entries)],
    }
