"""The coordinator's Prometheus metrics. Labels are bounded: no request, no worker, no pair.

Read on the scraping thread: values are copied out once, and nothing here takes a lock or walks requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from coordinator.phase_counts import DurationCounts, Phase
from coordinator.pools import PoolSnapshot
from coordinator.signal_book import ModelBook
from coordinator.worker_states import POOLS, state_counts
from splitserve.latency_bounds import LATENCY_BOUNDS_S
from splitserve.metrics import gauge, gauges
from splitserve.v1 import scaling_pb2

EVERY = 4
"""One of so many bounds is shown: buckets 75% apart are fine enough for dashboards, and a scrape stays small."""
SHOWN = tuple(range(EVERY - 1, len(LATENCY_BOUNDS_S), EVERY))
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

Books = Mapping[str, ModelBook]


def coordinator_metrics(snapshot: PoolSnapshot, running_requests: int, books: Books) -> list[Metric]:
    """All metrics of a coordinator at one moment. `books` are the models' figures by name."""
    pools: dict[str, float] = {
        pool: sum(snapshot.is_ready(worker) for worker in snapshot.workers if worker.pool == pool)
        for pool in POOLS
    }
    slow = sum(1 for w in snapshot.workers for _, lane in snapshot.lanes_of(w) if lane.problem)
    return [
        gauges("splitserve_requests", "Generations in progress", "state", {"running": running_requests}),
        gauges("splitserve_ready_workers", "Workers that can serve now", "pool", pools),
        gauge("splitserve_kv_slow_lanes", "Lanes below expectation", slow),
        _circuits(snapshot),
        _replicas(snapshot),
        *_demand(books),
        *_progress(snapshot, books),
        *_latencies(books),
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


def _demand(books: Books) -> Iterable[Metric]:
    ended = CounterMetricFamily(
        "splitserve_requests_ended", "Generations by how they ended", labels=["model", "outcome"]
    )
    arrived = CounterMetricFamily("splitserve_arrived_requests", "Generations that arrived", labels=["model"])
    tokens = CounterMetricFamily(
        "splitserve_arrived_tokens", "Tokens of the generations that arrived", labels=["model", "kind"]
    )
    for model, book in books.items():
        for outcome, count in book.outcomes.items():
            ended.add_metric([model, OUTCOME_LABELS[outcome]], count)
        arrived.add_metric([model], book.requests)
        kinds = {
            "prompt": book.prompt_tokens,
            "uncached": book.uncached_tokens,
            "expected_output": book.output_tokens,
        }
        for kind, value in kinds.items():
            tokens.add_metric([model, kind], value)
    return ended, arrived, tokens


def _progress(snapshot: PoolSnapshot, books: Books) -> Iterable[Metric]:
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
    for model, book in books.items():
        for stage, count in book.stages.items():
            stages.add_metric([model, stage.value], count)
        backlog.add_metric([model], book.backlog_tokens)
        loads = [worker.load for worker in snapshot.accepting(model, "decode")]
        if total := sum(load.total_blocks for load in loads):
            used.add_metric([model], 1 - sum(load.free_blocks for load in loads) / total)
    return stages, backlog, used


def _latencies(books: Books) -> Iterable[Metric]:
    """Cold samples under a label of their own, so that a policy can leave them out and an SLO can count them."""
    phases = HistogramMetricFamily(
        "splitserve_request_phase_seconds", "Parts of a generation's time", labels=["model", "phase", "cold"]
    )
    ttft = HistogramMetricFamily(
        "splitserve_time_to_first_token_seconds", "Receipt until the first token", labels=["model", "cold"]
    )
    tpot = HistogramMetricFamily(
        "splitserve_time_per_output_token_seconds", "Mean of a generation", labels=["model", "cold"]
    )
    for model, book in books.items():
        for phase, counts in book.phases.items():
            for cold, durations in (("false", counts.warm), ("true", counts.cold)):
                match phase:
                    case scaling_pb2.PHASE_TTFT:
                        add_durations(ttft, [model, cold], durations)
                    case scaling_pb2.PHASE_TPOT:
                        add_durations(tpot, [model, cold], durations)
                    case _:
                        add_durations(phases, [model, PHASE_LABELS[phase], cold], durations)
    return phases, ttft, tpot


def add_durations(family: HistogramMetricFamily, labels: list[str], durations: DurationCounts) -> None:
    """Adds one histogram, as coarse as all of them are shown."""
    reached = list(accumulate(durations.counts.copy()))
    buckets = [(f"{LATENCY_BOUNDS_S[index]:.6g}", float(reached[index])) for index in SHOWN]
    family.add_metric(labels, [*buckets, ("+Inf", float(reached[-1]))], sum_value=durations.sum_s)
