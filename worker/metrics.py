"""A worker's Prometheus metrics. Label values are bounded: no requests, peers or pairs."""

from __future__ import annotations

from itertools import accumulate
from statistics import median

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from engine.scheduling.step_times import BATCH_BOUNDS, TotalsByKind
from splitserve.client.registry_client import RegistrationStatus
from splitserve.metrics import add_durations, bucket_label, counter, counters, gauge, gauges
from worker.build import StartPhases
from worker.connector import WorkerStatus


def registration_metrics(status: RegistrationStatus) -> list[Metric]:
    """Where the worker is registered and where it is refused; one label value for each configured coordinator."""
    registered = {name: float(now) for name, now in status.registered.items()}
    refusals = {name: float(count) for name, count in status.refusals.items()}
    return [
        gauges(
            "splitserve_registered", "Whether the coordinator knows the worker", "coordinator", registered
        ),
        counters("splitserve_registry_refusals", "Refused registrations", "coordinator", refusals),
    ]


def start_metrics(phases: StartPhases | None) -> list[Metric]:
    """How long the process took to start."""
    if phases is None:
        return []
    text = "Time of this process's start, by phase"
    return [gauges("splitserve_start_seconds", text, "phase", phases.fields())]


def worker_metrics(status: WorkerStatus) -> list[Metric]:
    """All metrics of a worker at one moment. Lanes are aggregated, because there is one for each pair of workers."""
    load, lanes = status.load, status.lanes
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
        counter("splitserve_handoffs_completed", "Handoffs sent or admitted", status.handoffs_completed),
        counters("splitserve_handoffs_rejected", "Handoffs that failed", "reason", status.handoffs_rejected),
        counter(
            "splitserve_kv_sent_bytes",
            "KV bytes of completed handoffs, at their sender",
            status.handoff_bytes,
        ),
        gauge(
            "splitserve_kv_slow_lanes", "Lanes below expectation", sum(bool(lane.problem) for lane in lanes)
        ),
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
    if status.writes is not None:
        written = CounterMetricFamily(
            "splitserve_handoffs", "Handoffs that it has written, by lane", labels=["lane", "outcome"]
        )
        for labels, count in status.writes.items():
            written.add_metric(labels, count)
        metrics.append(written)
    return metrics


def step_metrics(totals: TotalsByKind) -> list[Metric]:
    """What the engine's steps were."""
    durations = HistogramMetricFamily("splitserve_step_seconds", "Time of a step", labels=["kind"])
    batches = HistogramMetricFamily("splitserve_step_sequences", "Sequences of a step", labels=["kind"])
    tokens = CounterMetricFamily(
        "splitserve_step_tokens", "Tokens that steps computed", labels=["kind", "tokens"]
    )
    for kind, total in totals.items():
        add_durations(durations, [kind], total.durations)
        reached = list(accumulate(total.batches.copy()))
        bounds = (*map(bucket_label, BATCH_BOUNDS), "+Inf")
        buckets = [(bound, float(count)) for bound, count in zip(bounds, reached, strict=True)]
        batches.add_metric([kind], buckets, sum_value=total.sequences)
        tokens.add_metric([kind, "prompt"], total.prompt_tokens)
        tokens.add_metric([kind, "output"], total.output_tokens)
    return [durations, batches, tokens]
