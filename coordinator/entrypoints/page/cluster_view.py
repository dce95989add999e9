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
WORKER_COLUMNS = (
    "id",
    "role",
    "model",
    "state",
    "state_s",
    "circuit",
    "running",
    "waiting",
    "waiting_tokens",
    "total_blocks",
    "referenced_blocks",
    "reserved_blocks",
    "quarantined_blocks",
    "free_blocks",
    "transfers",
    "prefill_tokens_per_s",
    "step_ms",
)


def workers_view(snapshot: PoolSnapshot, states: WorkerStates, now_s: float) -> dict[str, Any]:
    """The workers with their last reports, as rows of `WORKER_COLUMNS`. At most `MAX_WORKERS`."""
    return {
        "count": len(snapshot.workers),
        "columns": WORKER_COLUMNS,
        "rows": [_row(worker, states, now_s) for worker in snapshot.workers[:MAX_WORKERS]],
    }


def _row(worker: Worker, states: WorkerStates, now_s: float) -> list[Any]:
    load, latency = worker.load, LatencyModel.from_proto(worker.load.latency)
    known = states.since.get(worker.key)
    return [
        worker.worker_id,
        worker.role,
        worker.model.name,
        STATE_NAMES[known[0]] if known is not None else "starting",
        round(now_s - known[1], 1) if known is not None else 0.0,
        worker.circuit.state,
        load.running_requests,
        load.waiting_requests,
        load.waiting_tokens,
        load.total_blocks,
        load.referenced_blocks,
        load.reserved_blocks,
        load.quarantined_blocks,
        load.free_blocks,
        load.transfers_in_flight,
        round(latency.prefill_tokens_per_s, 1),
        round(latency.present_step_s(load, worker.block_size_tokens) * 1e3, 2),
    ]


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
