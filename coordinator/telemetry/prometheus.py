"""The coordinator's Prometheus metrics. Label sets are bounded: no requests, workers or pairs.

Runs on the scraping thread: values are copied once, without locks and without iterating over requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from prometheus_client.core import HistogramMetricFamily, Metric

from coordinator.admission.controller import AdmissionCounts
from coordinator.telemetry.request_stats import ModelStats, Phase, outcome_label
from coordinator.workers.snapshot import PoolSnapshot, WorkerState
from splitserve.metrics import add_durations, counters, gauge, gauges
from splitserve.roles import POOLS_OF, PoolName
from splitserve.v1 import scaling_pb2

PHASE_LABELS: Mapping[Phase, str] = {
    scaling_pb2.PHASE_ADMIT: "admit",
    scaling_pb2.PHASE_RESERVE: "reserve",
    scaling_pb2.PHASE_PREFILL_QUEUE: "prefill_queue",
    scaling_pb2.PHASE_PREFILL_COMPUTE: "prefill_compute",
    scaling_pb2.PHASE_PREFILL: "prefill",
    scaling_pb2.PHASE_LOCAL_PREFILL: "local_prefill",
    scaling_pb2.PHASE_TRANSFER: "transfer",
    scaling_pb2.PHASE_DECODE_ADMIT: "decode_admit",
}
StatsByModel = Mapping[str, ModelStats]
T = TypeVar("T")


def coordinator_metrics(snapshot: PoolSnapshot, running_requests: int, stats: StatsByModel) -> list[Metric]:
    """All request and worker metrics at one moment."""
    ready = [worker for worker in snapshot.workers if snapshot.is_ready(worker)]
    pools: dict[str, float] = {pool: sum(pool in worker.pools for worker in ready) for pool in POOLS}
    slow = sum(1 for worker in snapshot.workers for _, lane in snapshot.lanes_of(worker) if lane.problem)
    return [
        gauges("splitserve_requests", "Generations in progress", "state", {"running": running_requests}),
        gauges("splitserve_ready_workers", "Workers that can serve now", "pool", pools),
        gauge("splitserve_kv_slow_lanes", "Lanes below expectation", slow),
        _circuits(snapshot),
        gauges("splitserve_replicas", "Registered workers", ("role", "state"), state_counts(snapshot)),
        *_demand(stats),
        *_progress(snapshot, stats),
        *_latencies(stats),
    ]


def _circuits(snapshot: PoolSnapshot) -> Metric:
    counts = {(kind, state): 0 for kind in (*POOLS, "pair") for state in ("open", "half-open")}
    for worker in snapshot.workers:
        own = [(pool, worker.circuit.state) for pool in worker.pools]
        for key in (*own, *(("pair", state) for _, state in worker.circuit.pairs)):
            if key in counts:
                counts[key] += 1
    text = "Circuit breakers that are not closed"
    return gauges("splitserve_circuits", text, ("kind", "state"), counts)


def _demand(stats: StatsByModel) -> Iterable[Metric]:
    ended = _by(stats, lambda counts: {outcome_label(key): count for key, count in counts.outcomes.items()})
    tokens = _by(
        stats,
        lambda counts: {
            "prompt": counts.prompt_tokens,
            "uncached": counts.uncached_tokens,
            "local": counts.local_tokens,
            "expected_output": counts.output_tokens,
        },
    )
    requests = {model: counts.requests for model, counts in stats.items()}
    looked_up = {model: counts.looked_up_tokens for model, counts in stats.items()}
    hits = _by(stats, lambda counts: counts.hit_tokens)
    yield counters("splitserve_requests_ended", "Generations by how they ended", ("model", "outcome"), ended)
    yield counters("splitserve_arrived_requests", "Generations that arrived", "model", requests)
    text = "Tokens of the generations that arrived"
    yield counters("splitserve_arrived_tokens", text, ("model", "kind"), tokens)
    text = "Prompt tokens of the requests that got a token"
    yield counters("splitserve_prefix_looked_up_tokens", text, "model", looked_up)
    text = "Those that a worker's prefix cache held"
    yield counters("splitserve_prefix_hit_tokens", text, ("model", "pool"), hits)


def _by(stats: Mapping[str, T], values: Callable[[T], Mapping[Any, float]]) -> dict[tuple[str, str], float]:
    """Some values of each model by (model, name of the value)."""
    return {(model, name): value for model, counts in stats.items() for name, value in values(counts).items()}


def _progress(snapshot: PoolSnapshot, stats: StatsByModel) -> Iterable[Metric]:
    stages = _by(stats, lambda counts: {stage.value: count for stage, count in counts.stages.items()})
    backlog = {model: counts.backlog_tokens for model, counts in stats.items()}
    waiting = {model: counts.waiting_for_workers for model, counts in stats.items()}
    used: dict[str, float] = {}
    for model in stats:
        loads = [worker.load for worker in snapshot.accepting(model, "decode")]
        if total := sum(load.total_blocks for load in loads):
            used[model] = 1 - sum(load.free_blocks for load in loads) / total
    text = "Generations in progress by what they wait for"
    yield gauges("splitserve_request_stages", text, ("model", "stage"), stages)
    text = "Uncached prompt tokens not computed yet"
    yield gauges("splitserve_prefill_backlog_tokens", text, "model", backlog)
    text = "KV blocks in use on decode workers in rotation"
    yield gauges("splitserve_decode_kv_usage_ratio", text, "model", used)
    text = "Generations that wait for the first workers of a pool, which are started on demand"
    yield gauges("splitserve_requests_waiting_for_workers", text, "model", waiting)


def _latencies(stats: StatsByModel) -> Iterable[Metric]:
    """Cold samples have their own label value, so that a policy can ignore them and an SLO can count them."""
    phases = HistogramMetricFamily(
        "splitserve_request_phase_seconds", "Parts of a generation's time", labels=["model", "phase", "cold"]
    )
    ttft = HistogramMetricFamily(
        "splitserve_time_to_first_token_seconds",
        "Receipt until the first token",
        labels=["model", "cold", "prompt"],
    )
    tpot = HistogramMetricFamily(
        "splitserve_time_per_output_token_seconds", "Mean of a generation", labels=["model", "cold"]
    )
    for model, model_stats in stats.items():
        for phase, counts in model_stats.phases.items():
            for cold, durations in (("false", counts.warm), ("true", counts.cold)):
                match phase:
                    case scaling_pb2.PHASE_TTFT:
                        short = model_stats.short_ttft.cold if cold == "true" else model_stats.short_ttft.warm
                        add_durations(ttft, [model, cold, "short"], short)
                    case scaling_pb2.PHASE_TTFT_LONG:
                        add_durations(ttft, [model, cold, "long"], durations)
                    case scaling_pb2.PHASE_TPOT:
                        add_durations(tpot, [model, cold], durations)
                    case _:
                        add_durations(phases, [model, PHASE_LABELS[phase], cold], durations)
    return phases, ttft, tpot


def admission_metrics(counts: Mapping[str, AdmissionCounts]) -> list[Metric]:
    """All admission metrics; `counts` are by model. Classes and reasons are fixed sets."""
    queued = _by(counts, lambda admission: admission.queued)
    tokens = {model: admission.queued_prompt_tokens for model, admission in counts.items()}
    refused = _by(counts, lambda admission: {key.lower(): count for key, count in admission.refused.items()})
    text = "Requests that were not let in"
    return [
        gauges("splitserve_admission_queued_requests", "Requests in the queue", ("model", "class"), queued),
        gauges("splitserve_admission_queued_prompt_tokens", "Their prompt tokens", "model", tokens),
        counters("splitserve_admission_refused", text, ("model", "reason"), refused),
    ]


POOLS: tuple[PoolName, PoolName] = ("prefill", "decode")
STATE_NAMES: Mapping[WorkerState, str] = MappingProxyType(
    {
        scaling_pb2.WORKER_STATE_STARTING: "starting",
        scaling_pb2.WORKER_STATE_STANDBY: "standby",
        scaling_pb2.WORKER_STATE_READY: "ready",
        scaling_pb2.WORKER_STATE_DRAINING: "draining",
    }
)


def state_counts(snapshot: PoolSnapshot) -> dict[tuple[str, str], int]:
    """Number of workers by (role, state), zeros included."""
    counts: dict[tuple[str, str], int] = {
        (role, state): 0 for role in POOLS_OF for state in STATE_NAMES.values()
    }
    for worker in snapshot.workers:
        counts[worker.role, STATE_NAMES[snapshot.state_of(worker)]] += 1
    return counts
