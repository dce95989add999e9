"""What `splitserve top` shows, from two readings of the coordinators' signals. Pure.

The signals are cumulative; rates and latencies are those of the time between the readings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from splitserve.histograms import Histogram
from splitserve.latency_model import LatencyModel
from splitserve.v1 import registry_pb2, scaling_pb2


@dataclass(frozen=True, slots=True)
class Reading:
    """The signals of all coordinators at one time."""

    at_s: float
    signals: Sequence[scaling_pb2.GetSignalsResponse]


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """Latencies that an answer is to keep to. Seconds."""

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
    """Share of its KV blocks that cannot be had, 0..1."""
    prefill_tokens_per_s: float
    """0: not measured yet."""
    step_ms: float
    """A decode step of what it runs; 0: not measured yet."""


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """One model on all coordinators."""

    model: str
    requests_per_s: float
    prompt_tokens_per_s: float
    outcomes_per_s: Mapping[str, float]
    """Ends by their outcome, for example `completed`."""
    in_progress: Mapping[str, int]
    """Generations by what they wait for: `admitting`, `reserving`, `prefilling`, `decoding`."""
    ttft: LatencyFigures
    ttft_long: LatencyFigures
    """Of prompts of `long_prompt_tokens` or more."""
    tpot: LatencyFigures
    cached_share: float
    """Share of prompt tokens that recent prefills found cached, 0..1; the mean of the coordinators."""
    workers: Sequence[WorkerFigures]


def figures(before: Reading, now: Reading, targets: LatencyTargets) -> list[ModelFigures]:
    """One entry a model, in order of their names.

    A coordinator that was not in `before` counts from the next reading on.
    """
    earlier = {signals.coordinator_id: signals for signals in before.signals}
    pairs = [(earlier[new.coordinator_id], new) for new in now.signals if new.coordinator_id in earlier]
    names = sorted({model.model for signals in now.signals for model in signals.models})
    elapsed_s = max(now.at_s - before.at_s, 1e-9)
    return [_model(name, pairs, now.signals, elapsed_s, targets) for name in names]


_Signals = scaling_pb2.GetSignalsResponse
_Pair = tuple[_Signals, _Signals]


def _model(
    name: str, pairs: Sequence[_Pair], signals: Sequence[_Signals], elapsed_s: float, targets: LatencyTargets
) -> ModelFigures:
    both = [(_of(old, name), _of(new, name)) for old, new in pairs]
    mine = [model for answer in signals for model in answer.models if model.model == name]
    outcomes: dict[str, float] = {}
    for old, new in both:
        for outcome, count in _outcomes(new).items():
            outcomes[outcome] = (
                outcomes.get(outcome, 0.0) + (count - _outcomes(old).get(outcome, 0)) / elapsed_s
            )
    waits = ("admitting", "reserving", "prefilling", "decoding")
    workers = {worker.worker_id: worker for model in mine for worker in model.workers}
    return ModelFigures(
        name,
        sum(new.arrivals.requests - old.arrivals.requests for old, new in both) / elapsed_s,
        sum(new.arrivals.prompt_tokens - old.arrivals.prompt_tokens for old, new in both) / elapsed_s,
        outcomes,
        {wait: sum(getattr(model.in_progress, f"{wait}_requests") for model in mine) for wait in waits},
        _figures(_counted(pairs, name, scaling_pb2.PHASE_TTFT), targets.ttft_s),
        _figures(_counted(pairs, name, scaling_pb2.PHASE_TTFT_LONG), targets.ttft_s),
        _figures(_counted(pairs, name, scaling_pb2.PHASE_TPOT), targets.tpot_s),
        sum(model.cached_share for model in mine) / max(1, len(mine)),
        [_worker(workers[worker_id]) for worker_id in sorted(workers)],
    )


def _of(signals: _Signals, name: str) -> scaling_pb2.ModelSignals:
    return next((model for model in signals.models if model.model == name), scaling_pb2.ModelSignals())


def _outcomes(model: scaling_pb2.ModelSignals) -> dict[str, int]:
    prefix = "OUTCOME_"
    return {
        scaling_pb2.Outcome.Name(ends.outcome).removeprefix(prefix).lower(): ends.count
        for ends in model.outcomes
    }


def _counted(pairs: Iterable[_Pair], name: str, phase: scaling_pb2.Phase.ValueType) -> Histogram | None:
    total: Histogram | None = None
    for old, new in pairs:
        after = _histogram(new, name, phase)
        if after is None:
            continue
        earlier = _histogram(old, name, phase)
        # Histograms with other bounds, as of a coordinator of another version, cannot be added.
        part = after if earlier is None or earlier.bounds != after.bounds else after - earlier
        if total is None or total.bounds == part.bounds:
            total = part if total is None else total + part
    return total


def _figures(counted: Histogram | None, target_s: float) -> LatencyFigures:
    if counted is None:
        return LatencyFigures()
    ms = [None if value is None else value * 1e3 for value in map(counted.percentile, (50, 99))]
    return LatencyFigures(ms[0], ms[1], counted.share_within(target_s))


def _histogram(signals: _Signals, name: str, phase: scaling_pb2.Phase.ValueType) -> Histogram | None:
    bounds = tuple(signals.bounds_seconds)
    for times in _of(signals, name).phases:
        if times.phase == phase and len(times.counts) == len(bounds) + 1:
            return Histogram(bounds, tuple(times.counts))
    return None


def _worker(worker: scaling_pb2.WorkerSignals) -> WorkerFigures:
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
