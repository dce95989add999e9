"""A worker's Prometheus metrics. Label values are bounded: no requests, peers or pairs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from statistics import median

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from engine.core.step_stats import BATCH_BOUNDS, StepWork, TotalsByKind
from engine.tiers.kv_tiers import KvTiers
from engine.tiers.tier import Tier
from engine.worker.start_phases import StartPhases
from engine.worker.status import HandoffWrites, WorkerStatus
from splitserve.client.registry_client import RegistrationStatus
from splitserve.config.engine import EngineConfig
from splitserve.metrics import add_durations, counter, counters, gauge, gauges


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


def sleep_metrics(asleep: bool, wake_s: float) -> list[Metric]:
    """Whether the worker sleeps, and how long it took to wake up the last time."""
    return [
        gauge("splitserve_sleeping", "Whether the worker sleeps", float(asleep)),
        gauge("splitserve_wake_seconds", "Time of the last waking", wake_s),
    ]


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
        gauge("splitserve_late_prompts", "Prompts predicted to miss their TTFT target", load.late_prompts),
        counter("splitserve_handoffs_completed", "Handoffs sent or admitted", status.handoffs_completed),
        counters("splitserve_handoffs_rejected", "Handoffs that failed", "reason", status.handoffs_rejected),
        counter(
            "splitserve_kv_sent_bytes",
            "KV bytes of completed handoffs, at their sender",
            status.handoff_bytes,
        ),
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
    if status.writes is not None:
        metrics += _writes(status.writes)
    return metrics


def _writes(writes: HandoffWrites) -> list[Metric]:
    ended = CounterMetricFamily(
        "splitserve_handoffs", "Handoffs that it has written, by lane", labels=["lane", "outcome"]
    )
    for (lane, outcome), count in writes.by_lane.items():
        ended.add_metric([lane, outcome], count)
    return [
        ended,
        counter(
            "splitserve_handoff_descriptors", "Write descriptors of completed handoffs", writes.descriptors
        ),
        counter(
            "splitserve_handoff_contiguous_runs",
            "Runs of blocks that were contiguous at both ends, of completed handoffs",
            writes.contiguous_runs,
        ),
    ]


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
        bounds = (*(str(bound) for bound in BATCH_BOUNDS), "+Inf")
        buckets = [(bound, float(count)) for bound, count in zip(bounds, reached, strict=True)]
        batches.add_metric([kind], buckets, sum_value=total.sequences)
        tokens.add_metric([kind, "prompt"], total.prompt_tokens)
        tokens.add_metric([kind, "output"], total.output_tokens)
    lent = {str(kind): float(total.lent_steps) for kind, total in totals.items()}
    text = "Steps that neighbours lent cores to"
    decode = totals["decode"]
    drafts = {"drafted": float(decode.drafted_tokens), "accepted": float(decode.accepted_tokens)}
    metrics = [counters("splitserve_speculated_tokens", "Drafted tokens and accepted ones", "tokens", drafts)]
    return [
        *metrics,
        durations,
        batches,
        tokens,
        counters("splitserve_steps_with_lent_cores", text, "kind", lent),
    ]


def work_metrics(totals: TotalsByKind, work: StepWork | None, config: EngineConfig) -> list[Metric]:
    """What the steps asked of the device, and what the device was measured to give, each as far as it is known."""
    metrics = []
    if work is not None:
        read: dict[str, float] = {kind: float(work.read_bytes(total)) for kind, total in totals.items()}
        flops: dict[str, float] = {kind: float(work.flops(total)) for kind, total in totals.items()}
        metrics += [
            counters("splitserve_step_read_bytes", "Weights and KV that steps read", "kind", read),
            counters("splitserve_step_matmul_flops", "Operations of linear layers", "kind", flops),
        ]
    if (rate := config.measured_memory_gb_per_s) is not None:
        text = "Memory rate of the device, as the settings say"
        metrics.append(gauge("splitserve_measured_memory_bytes_per_second", text, rate * 1e9))
    if (rate := config.measured_matmul_tflops) is not None:
        text = "Rate of matrix products of the device, as the settings say"
        metrics.append(gauge("splitserve_measured_matmul_flops_per_second", text, rate * 1e12))
    return metrics


def tier_metrics(tiers: KvTiers | None) -> list[Metric]:
    """What the tiers below the KV blocks hold and did; nothing without any."""
    if tiers is None:
        return []
    all_tiers = {str(name): tier for name, tier in tiers.all.items()}
    failures = CounterMetricFamily(
        "splitserve_kv_tier_failures", "Blocks that were not written or not read", labels=["tier", "kind"]
    )
    for name, tier in all_tiers.items():
        for kind, count in tier.stats.failures.items():
            failures.add_metric([name, kind], count)

    def each(name: str, text: str, values: Callable[[Tier], float]) -> Metric:
        return counters(name, text, "tier", {key: float(values(tier)) for key, tier in all_tiers.items()})

    held = {name: tier.bytes for name, tier in all_tiers.items()}
    return [
        gauges("splitserve_kv_tier_bytes", "KV that a tier holds", "tier", held),
        each(
            "splitserve_kv_tier_hit_tokens",
            "Prompt tokens whose KV was read from a tier",
            lambda tier: tier.stats.hit_tokens,
        ),
        each("splitserve_kv_tier_read_bytes", "KV read from a tier", lambda tier: tier.stats.read_bytes),
        each("splitserve_kv_tier_read_seconds", "Time of these reads", lambda tier: tier.stats.read_s),
        each(
            "splitserve_kv_tier_found_blocks",
            "Blocks of other workers that were found in a store that they share",
            lambda tier: tier.stats.found_blocks,
        ),
        each(
            "splitserve_kv_tier_evictions",
            "Blocks that gave way to others",
            lambda tier: tier.index.evictions,
        ),
        failures,
    ]
