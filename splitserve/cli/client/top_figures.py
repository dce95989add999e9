"""What `splitserve top` shows, from two readings of the coordinators' signals. Pure.

The signals are cumulative; rates and latencies are those of the time between the readings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from splitserve.histograms import Histogram
from splitserve.v1 import registry_pb2, scaling_pb2

NO_TIMES: tuple[float | None, float | None, float | None] = (None, None, None)


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

    p50_ms: float | None
    p99_ms: float | None
    attained: float | None
    """Share that kept to the target, 0..1."""


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """One worker now."""

    worker_id: str
    pool: str
    state: str
    running_requests: int
    waiting_requests: int
    waiting_tokens: int
    kv_used: float
    """Share of its KV blocks that cannot be had, 0..1."""
    prefill_tokens_per_s: float
    """0: not measured yet."""
    step_ms: float
    """Mean decode step; 0: not measured yet."""


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
    ttft_short: LatencyFigures
    """Of the others."""
    tpot: LatencyFigures
    cached_share: float
    """Share of prompt tokens that recent prefills found cached, 0..1; the mean of the coordinators."""
    workers: Sequence[WorkerFigures]


def figures(before: Reading, now: Reading, targets: LatencyTargets) -> list[ModelFigures]:
    """One entry a model, in order of their names.

    A coordinator that was not in `before` counts from the next reading on.
    """
    earlier = {one.coordinator_id: one for one in before.signals}
    pairs = [(earlier[one.coordinator_id], one) for one in now.signals if one.coordinator_id in earlier]
    names = sorted({model.model for one in now.signals for model in one.models})
    elapsed_s = max(now.at_s - before.at_s, 1e-9)
    return [_model(name, pairs, now.signals, elapsed_s, targets) for name in names]


_Signals = scaling_pb2.GetSignalsResponse
_Pair = tuple[_Signals, _Signals]


def _model(
    name: str, pairs: Sequence[_Pair], signals: Sequence[_Signals], elapsed_s: float, targets: LatencyTargets
) -> ModelFigures:
    both = [(_of(old, name), _of(new, name)) for old, new in pairs]
    mine = [model for one in signals for model in one.models if model.model == name]
    outcomes: dict[str, float] = {}
    for old, new in both:
        for outcome, count in _outcomes(new).items():
            outcomes[outcome] = (
                outcomes.get(outcome, 0.0) + (count - _outcomes(old).get(outcome, 0)) / elapsed_s
            )
    waits = ("admitting", "reserving", "prefilling", "decoding")
    workers = {worker.worker_id: worker for model in mine for worker in model.workers}
    ttft = _counted(pairs, name, scaling_pb2.PHASE_TTFT)
    long = _counted(pairs, name, scaling_pb2.PHASE_TTFT_LONG)
    return ModelFigures(
        name,
        sum(new.arrivals.requests - old.arrivals.requests for old, new in both) / elapsed_s,
        sum(new.arrivals.prompt_tokens - old.arrivals.prompt_tokens for old, new in both) / elapsed_s,
        outcomes,
        {wait: sum(getattr(model.in_progress, f"{wait}_requests") for model in mine) for wait in waits},
        _figures(ttft, targets.ttft_s),
        _figures(long, targets.ttft_s),
        _figures(None if ttft is None or long is None else _rest(ttft, long), targets.ttft_s),
        _figures(_counted(pairs, name, scaling_pb2.PHASE_TPOT), targets.tpot_s),
        sum(model.cached_share for model in mine) / max(1, len(mine)),
        [_worker(workers[worker_id]) for worker_id in sorted(workers)],
    )


def _of(signals: _Signals, name: str) -> scaling_pb2.ModelSignals:
    return next((model for model in signals.models if model.model == name), scaling_pb2.ModelSignals())


def _outcomes(model: scaling_pb2.ModelSignals) -> dict[str, int]:
    prefix = "OUTCOME_"
    return {
        scaling_pb2.Outcome.Name(one.outcome).removeprefix(prefix).lower(): one.count
        for one in model.outcomes
    }


def _counted(pairs: Iterable[_Pair], name: str, phase: scaling_pb2.Phase.ValueType) -> Histogram | None:
    total: Histogram | None = None
    for old, new in pairs:
        after = _histogram(new, name, phase)
        if after is None:
            continue
        earlier = _histogram(old, name, phase)
        # Coordinators of different versions may have other bounds, which cannot be added.
        part = after if earlier is None or earlier.bounds != after.bounds else after - earlier
        if total is None or total.bounds == part.bounds:
            total = part if total is None else total + part
    return total


def _rest(whole: Histogram, part: Histogram) -> Histogram | None:
    # Coordinators of an older version tell no part: their long prompts are in the rest.
    return whole - part if whole.bounds == part.bounds else None


def _figures(counted: Histogram | None, target_s: float) -> LatencyFigures:
    if counted is None:
        return LatencyFigures(*NO_TIMES)
    ms = [None if value is None else value * 1e3 for value in map(counted.percentile, (50, 99))]
    return LatencyFigures(ms[0], ms[1], counted.share_within(target_s))


def _histogram(signals: _Signals, name: str, phase: scaling_pb2.Phase.ValueType) -> Histogram | None:
    bounds = tuple(signals.bounds_seconds)
    for one in _of(signals, name).phases:
        if one.phase == phase and len(one.counts) == len(bounds) + 1:
            return Histogram(bounds, tuple(one.counts))
    return None


def _worker(worker: scaling_pb2.WorkerSignals) -> WorkerFigures:
    load = worker.load
    used = 1.0 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0
    return WorkerFigures(
        worker.worker_id,
        registry_pb2.Pool.Name(worker.pool).removeprefix("POOL_").lower(),
        scaling_pb2.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower(),
        load.running_requests,
        load.waiting_requests,
        load.waiting_tokens,
        used,
        load.prefill_tokens_per_second,
        load.decode_step_ms,
    )
