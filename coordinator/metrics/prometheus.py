"""The coordinator's Prometheus metrics. Label sets are bounded: no requests, workers or pairs.

Runs on the scraping thread: values are copied once, without locks and without iterating over requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from coordinator.admission.controller import AdmissionCounts
from coordinator.metrics.stats import ModelStats, Phase
from coordinator.workers.snapshot import PoolName, PoolSnapshot, WorkerState
from splitserve.metrics import add_durations, gauge, gauges
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
OUTCOME_LABELS = {
    outcome: scaling_pb2.Outcome.Name(outcome).removeprefix("OUTCOME_").lower()
    for outcome in scaling_pb2.Outcome.values()
}

StatsByModel = Mapping[str, ModelStats]


def coordinator_metrics(snapshot: PoolSnapshot, running_requests: int, stats: StatsByModel) -> list[Metric]:
    """All request and worker metrics at one moment."""
    ready = [worker for worker in snapshot.workers if snapshot.is_ready(worker)]
    neutral = sum(worker.neutral for worker in ready)
    pools: dict[str, float] = {
        pool: sum(worker.pool == pool for worker in ready) or neutral  # these stand in for an empty pool
        for pool in POOLS
    }
    slow = sum(1 for w in snapshot.workers for _, lane in snapshot.lanes_of(w) if lane.problem)
    return [
        gauges("splitserve_requests", "Generations in progress", "state", {"running": running_requests}),
        gauges("splitserve_ready_workers", "Workers that can serve now", "pool", pools),
        gauge("splitserve_kv_slow_lanes", "Lanes below expectation", slow),
        _circuits(snapshot),
        _replicas(snapshot),
        *_demand(stats),
        *_progress(snapshot, stats),
        *_latencies(stats),
    ]


def _circuits(snapshot: PoolSnapshot) -> Metric:
    family = GaugeMetricFamily(
        "splitserve_circuits", "Circuit breakers that are not closed", labels=["kind", "state"]
    )
    pools = Counter((w.pool, w.circuit.state) for w in snapshot.workers)
    pairs = Counter(("pair", state) for w in snapshot.workers for _, state in w.circuit.pairs)
    for kind in (*POOLS, "pair"):
        for state in ("open", "half-open"):
            family.add_metric([kind, state], pools[kind, state] + pairs[kind, state])  # type: ignore[index]
    return family


def _replicas(snapshot: PoolSnapshot) -> Metric:
    family = GaugeMetricFamily("splitserve_replicas", "Registered workers", labels=["pool", "state"])
    for labels, count in state_counts(snapshot).items():
        family.add_metric(labels, count)
    return family


def _demand(stats: StatsByModel) -> Iterable[Metric]:
    ended = CounterMetricFamily(
        "splitserve_requests_ended", "Generations by how they ended", labels=["model", "outcome"]
    )
    arrived = CounterMetricFamily("splitserve_arrived_requests", "Generations that arrived", labels=["model"])
    tokens = CounterMetricFamily(
        "splitserve_arrived_tokens", "Tokens of the generations that arrived", labels=["model", "kind"]
    )
    for model, model_stats in stats.items():
        for outcome, count in model_stats.outcomes.items():
            ended.add_metric([model, OUTCOME_LABELS[outcome]], count)
        arrived.add_metric([model], model_stats.requests)
        kinds = {
            "prompt": model_stats.prompt_tokens,
            "uncached": model_stats.uncached_tokens,
            "expected_output": model_stats.output_tokens,
        }
        for kind, value in kinds.items():
            tokens.add_metric([model, kind], value)
    return ended, arrived, tokens, *_prefix_hits(stats)


def _prefix_hits(stats: StatsByModel) -> Iterable[Metric]:
    looked_up = CounterMetricFamily(
        "splitserve_prefix_looked_up_tokens",
        "Prompt tokens of the requests that got a token",
        labels=["model"],
    )
    hits = CounterMetricFamily(
        "splitserve_prefix_hit_tokens", "Those that a worker's prefix cache held", labels=["model", "pool"]
    )
    for model, model_stats in stats.items():
        looked_up.add_metric([model], model_stats.looked_up_tokens)
        for pool, count in model_stats.hit_tokens.items():
            hits.add_metric([model, pool], count)
    return looked_up, hits


def _progress(snapshot: PoolSnapshot, stats: StatsByModel) -> Iterable[Metric]:
    stages = GaugeMetricFamily(
        "splitserve_request_stages",
        "Generations in progress by what they wait for",
        labels=["model", "stage"],
    )
    backlog = GaugeMetricFamily(
        "splitserve_prefill_backlog_tokens", "Uncached prompt tokens not computed yet", labels=["model"]
    )
    used = GaugeMetricFamily(
        "splitserve_decode_kv_usage_ratio", "KV blocks in use on decode workers in rotation", labels=["model"]
    )
    waiting = GaugeMetricFamily(
        "splitserve_requests_waiting_for_workers",
        "Generations that wait for the first workers of a pool, which are started on demand",
        labels=["model"],
    )
    for model, model_stats in stats.items():
        waiting.add_metric([model], model_stats.waiting_for_workers)
        for stage, count in model_stats.stages.items():
            stages.add_metric([model, stage.value], count)
        backlog.add_metric([model], model_stats.backlog_tokens)
        loads = [worker.load for worker in snapshot.serving(model, "decode")]
        if total := sum(load.total_blocks for load in loads):
            used.add_metric([model], 1 - sum(load.free_blocks for load in loads) / total)
    return stages, backlog, used, waiting


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
    waited = HistogramMetricFamily(
        "splitserve_admission_queue_seconds",
        "Time in the coordinator's queue of requests that went on",
        labels=["model", "class"],
    )
    queued = GaugeMetricFamily(
        "splitserve_admission_queued_requests", "Requests in the queue", labels=["model", "class"]
    )
    tokens = GaugeMetricFamily(
        "splitserve_admission_queued_prompt_tokens", "Their prompt tokens", labels=["model"]
    )
    refused = CounterMetricFamily(
        "splitserve_admission_refused", "Requests that were not let in", labels=["model", "reason"]
    )
    for model, count in counts.items():
        for name, durations in count.waited.items():
            add_durations(waited, [model, name], durations)
            queued.add_metric([model, name], count.queued[name])
        tokens.add_metric([model], count.queued_prompt_tokens)
        for reason, number in count.refused.items():
            refused.add_metric([model, reason.lower()], number)
    return [waited, queued, tokens, refused]


POOLS: tuple[PoolName, PoolName] = ("prefill", "decode")
STATE_NAMES: Mapping[WorkerState, str] = MappingProxyType(
    {
        scaling_pb2.WORKER_STATE_STARTING: "starting",
        scaling_pb2.WORKER_STATE_STANDBY: "standby",
        scaling_pb2.WORKER_STATE_READY: "ready",
        scaling_pb2.WORKER_STATE_DRAINING: "draining",
        scaling_pb2.WORKER_STATE_SLEEPING: "sleeping",
    }
)


def state_counts(snapshot: PoolSnapshot) -> dict[tuple[str, str], int]:
    """Number of workers by (pool, state), zeros included."""
    counts: dict[tuple[str, str], int] = {
        (pool, state): 0 for pool in POOLS for state in STATE_NAMES.values()
    }
    for worker in snapshot.workers:
        counts[worker.pool, STATE_NAMES[snapshot.state_of(worker)]] += 1
    return counts
