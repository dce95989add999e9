"""What `splitserve top` shows, from two readings of the coordinators' signals. Pure.

The signals are cumulative; rates and latencies are those of the time between the readings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoscaler.signals.totals import NOTHING, totals_of
from splitserve.histograms import LATENCY_BOUNDS_S, Histogram
from splitserve.latency_model import LatencyModel
from splitserve.v1 import registry_pb2, scaling_pb2


@dataclass(frozen=True, slots=True)
class Reading:
    """The signals of all coordinators at one time."""

    at_s: float
    signals: Sequence[scaling_pb2.GetSignalsResponse]


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """The latencies that an answer shall not exceed, in seconds."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class LatencyFigures:
    """A latency of the answers between two readings; all None where there were none."""

    p50_ms: float | None = None
    p99_ms: float | None = None
    attained: float | None = None
    """Share that kept to the target, 0..1."""


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """One worker now."""

    worker_id: str
    role: str
    state: str
    running_requests: int
    waiting_requests: int
    waiting_tokens: int
    kv_used: float
    """Share of its KV blocks that are not free, 0..1."""
    prefill_tokens_per_s: float
    """0: not measured yet."""
    step_ms: float
    """Time of a decode step with its running requests; 0: not measured yet."""


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """One model on all coordinators."""

    model: str
    requests_per_s: float
    prompt_tokens_per_s: float
    outcomes_per_s: Mapping[str, float]
    """Requests that ended, by outcome, for example `completed`."""
    in_progress: Mapping[str, int]
    """Generations by what they wait for: `admitting`, `reserving`, `prefilling`, `decoding`."""
    ttft: LatencyFigures
    ttft_long: LatencyFigures
    """The TTFT of prompts of `long_prompt_tokens` or more."""
    tpot: LatencyFigures
    cached_share: float
    """Share of prompt tokens that recent prefills found cached, 0..1; the mean of the coordinators."""
    workers: Sequence[WorkerFigures]


def figures(before: Reading, now: Reading, targets: LatencyTargets) -> list[ModelFigures]:
    """The figures of each model, in order of the models' names.

    A coordinator that was not in `before` counts from the next reading on, and one of another version, whose histograms
    have other bounds, not at all.
    """
    earlier = {signals.coordinator_id: signals for signals in before.signals}
    signals = [answer for answer in now.signals if tuple(answer.bounds_seconds) == LATENCY_BOUNDS_S]
    pairs = [(earlier[new.coordinator_id], new) for new in signals if new.coordinator_id in earlier]
    names = sorted({model.model for answer in signals for model in answer.models})
    elapsed_s = max(now.at_s - before.at_s, 1e-9)
    return [_model_figures(name, pairs, signals, elapsed_s, targets) for name in names]


_Signals = scaling_pb2.GetSignalsResponse
_Pair = tuple[_Signals, _Signals]
"""A coordinator's signals of the two readings."""


def _model_figures(
    name: str, pairs: Sequence[_Pair], signals: Sequence[_Signals], elapsed_s: float, targets: LatencyTargets
) -> ModelFigures:
    both = [(_model_signals(old, name), _model_signals(new, name)) for old, new in pairs]
    models = [model for answer in signals for model in answer.models if model.model == name]
    grown = sum((totals_of([new]).since(totals_of([old])) for old, new in both), NOTHING)
    outcomes: Counter[str] = Counter()
    for old, new in both:
        outcomes.update(_outcomes(new))
        outcomes.subtract(_outcomes(old))
    waits = ("admitting", "reserving", "prefilling", "decoding")
    workers = {worker.worker_id: worker for model in models for worker in model.workers}
    return ModelFigures(
        name,
        grown.demand.requests / elapsed_s,
        grown.demand.prompt_tokens / elapsed_s,
        {outcome: count / elapsed_s for outcome, count in outcomes.items()},
        {wait: sum(getattr(model.in_progress, f"{wait}_requests") for model in models) for wait in waits},
        _latency_figures(grown.phases[scaling_pb2.PHASE_TTFT], targets.ttft_s),
        _latency_figures(grown.phases[scaling_pb2.PHASE_TTFT_LONG], targets.ttft_s),
        _latency_figures(grown.phases[scaling_pb2.PHASE_TPOT], targets.tpot_s),
        sum(model.cached_share for model in models) / max(1, len(models)),
        [_worker_figures(workers[worker_id]) for worker_id in sorted(workers)],
    )


def _model_signals(signals: _Signals, name: str) -> scaling_pb2.ModelSignals:
    return next((model for model in signals.models if model.model == name), scaling_pb2.ModelSignals())


def _outcomes(model: scaling_pb2.ModelSignals) -> dict[str, int]:
    prefix = "OUTCOME_"
    return {
        scaling_pb2.Outcome.Name(ends.outcome).removeprefix(prefix).lower(): ends.count
        for ends in model.outcomes
    }


def _latency_figures(times: Histogram, target_s: float) -> LatencyFigures:
    p50_ms, p99_ms = (
        None if value_s is None else value_s * 1e3 for value_s in map(times.percentile, (50, 99))
    )
    return LatencyFigures(p50_ms, p99_ms, times.share_within(target_s))


def _worker_figures(worker: scaling_pb2.WorkerSignals) -> WorkerFigures:
    load, latency = worker.load, LatencyModel.from_proto(worker.load.latency)
    used = 1.0 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0
    return WorkerFigures(
        worker.worker_id,
        registry_pb2.Role.Name(worker.role).removeprefix("ROLE_").lower(),
        scaling_pb2.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower(),
        load.running_requests,
        load.waiting_requests,
        load.waiting_tokens,
        used,
        latency.prefill_tokens_per_s,
        latency.present_step_s(load, worker.block_size_tokens) * 1e3,
    )
