"""Figures over time: every two seconds the growth of the statistics that metrics and autoscalers read. Pure.

A point holds sums and counts of its two seconds, so that points add up to the metrics.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.admission.controller import AdmissionCounts
from coordinator.telemetry.prometheus import PHASE_LABELS
from coordinator.telemetry.request_stats import ModelStats, Phase, PhaseCounts
from coordinator.workers.snapshot import PoolSnapshot
from splitserve.histograms import LATENCY_BOUNDS_S, Histogram
from splitserve.v1 import scaling_pb2

STEP_S = 2.0
MAX_POINTS = 300
MAX_MODELS = 16
"""Most models with figures: those with most requests."""
TTFT_PHASES: tuple[Phase, ...] = (
    scaling_pb2.PHASE_ADMIT,
    scaling_pb2.PHASE_RESERVE,
    scaling_pb2.PHASE_PREFILL_QUEUE,
    scaling_pb2.PHASE_PREFILL_COMPUTE,
    scaling_pb2.PHASE_LOCAL_PREFILL,
)
"""Phases of the time to the first token; the rest of it is spent on transporting prompt and token."""
COLUMNS = (
    "at",
    "requests",
    "failed",
    "ttft_count",
    "ttft_ms",
    "ttft_p50_ms",
    "ttft_p99_ms",
    *(f"{PHASE_LABELS[phase]}_ms" for phase in TTFT_PHASES),
    "tpot_count",
    "tpot_ms",
    "tpot_p50_ms",
    "tpot_p99_ms",
    "queued",
    "in_progress",
    "prefill_kv",
    "decode_kv",
)
"""Columns of a point. `at`: the end of its interval, seconds since 1970. Milliseconds are sums over the interval's
requests, except percentiles, which are None without requests. `queued` and the shares of KV in use (0..1, None: no
worker) are the values at `at`."""

Row = tuple[float | int | None, ...]
NO_HISTOGRAM = Histogram(LATENCY_BOUNDS_S, (0.0,) * (len(LATENCY_BOUNDS_S) + 1))


@dataclass(frozen=True, slots=True)
class _Counts:
    """Cumulative counts of a model at one moment."""

    requests: int
    failed: int
    ttft: Histogram
    tpot: Histogram
    sums_s: Mapping[Phase, float]

    @classmethod
    def of(cls, stats: ModelStats) -> _Counts:
        ended = stats.outcomes
        bad = (scaling_pb2.OUTCOME_REJECTED, scaling_pb2.OUTCOME_TIMED_OUT, scaling_pb2.OUTCOME_FAILED)
        phases = stats.phases
        return cls(
            stats.requests,
            sum(ended[outcome] for outcome in bad),
            _histogram(phases[scaling_pb2.PHASE_TTFT]),
            _histogram(phases[scaling_pb2.PHASE_TPOT]),
            {phase: counts.warm.sum_s + counts.cold.sum_s for phase, counts in phases.items()},
        )


_NOTHING = _Counts(0, 0, NO_HISTOGRAM, NO_HISTOGRAM, {})


class FigureSeries:
    """The points of all models of the last `MAX_POINTS * STEP_S` seconds."""

    def __init__(self) -> None:
        self._before: dict[str, _Counts] = {}
        self._points: dict[str, deque[Row]] = {}

    def sample(
        self,
        stats: Mapping[str, ModelStats],
        queues: Mapping[str, AdmissionCounts],
        snapshot: PoolSnapshot,
        now_unix_s: float,
    ) -> None:
        """Adds a point to each model. Cold requests count too: clients saw them."""
        shown = sorted(stats, key=lambda name: (-stats[name].requests, name))[:MAX_MODELS]
        used = kv_shares(snapshot)
        for name in shown:
            now, before = _Counts.of(stats[name]), self._before.get(name, _NOTHING)
            self._before[name] = now
            queue = queues.get(name)
            row = _row(now, before, now_unix_s)
            state: Row = (
                sum(queue.queued.values()) if queue is not None else 0,
                sum(stats[name].in_stage.values()),
                used.get((name, "prefill")),
                used.get((name, "decode")),
            )
            self._points.setdefault(name, deque(maxlen=MAX_POINTS)).append((*row, *state))
        for name in [*self._points]:
            if name not in shown:
                del self._points[name], self._before[name]

    def latest(self) -> dict[str, Row]:
        """The last point of each model."""
        return {name: points[-1] for name, points in sorted(self._points.items())}

    def document(self) -> dict[str, Any]:
        """All points as JSON."""
        return {
            "step_s": STEP_S,
            "columns": COLUMNS,
            "models": {name: list(points) for name, points in sorted(self._points.items())},
        }


def _row(now: _Counts, before: _Counts, now_unix_s: float) -> Row:
    ttft, tpot = now.ttft - before.ttft, now.tpot - before.tpot

    def grown_ms(phase: Phase) -> float:
        return round(max(0.0, now.sums_s[phase] - before.sums_s.get(phase, 0.0)) * 1e3, 3)

    return (
        round(now_unix_s, 3),
        now.requests - before.requests,
        now.failed - before.failed,
        int(ttft.total),
        grown_ms(scaling_pb2.PHASE_TTFT),
        *_percentiles_ms(ttft),
        *(grown_ms(phase) for phase in TTFT_PHASES),
        int(tpot.total),
        grown_ms(scaling_pb2.PHASE_TPOT),
        *_percentiles_ms(tpot),
    )


def kv_shares(snapshot: PoolSnapshot) -> dict[tuple[str, str], float]:
    """Share of KV blocks that are not free, by (model, pool) with workers."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for worker in snapshot.workers:
        load = worker.load
        for pool in worker.pools:
            free, total = sums.get((worker.model.name, pool), (0, 0))
            sums[worker.model.name, pool] = free + load.free_blocks, total + load.total_blocks
    return {key: round(1 - free / total, 4) for key, (free, total) in sums.items() if total}


def _histogram(counts: PhaseCounts) -> Histogram:
    both = zip(counts.warm.counts, counts.cold.counts, strict=True)
    return Histogram(LATENCY_BOUNDS_S, tuple(warm + cold for warm, cold in both))


def _percentiles_ms(values: Histogram) -> Iterator[float | None]:
    for percent in (50, 99):
        value_s = values.percentile(percent)
        yield None if value_s is None else round(value_s * 1e3, 3)
