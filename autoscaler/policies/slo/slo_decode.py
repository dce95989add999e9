"""The default policy of the decode pool: enough KV for the expected sequences, and batches within the TPOT target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

from autoscaler.policies.demand import DemandForecast, measure
from autoscaler.policies.policy_file import SloPool
from autoscaler.policies.recommendation import PoolStatus, Recommendation, TrimMemory, measured, trim
from autoscaler.snapshot import ArrivalBucket, DecodeSignals, Snapshot, StepTimeModel, lead_s


@dataclass(frozen=True, slots=True)
class DecodeMemory:
    """Memory between decisions."""

    trim: TrimMemory = field(default_factory=TrimMemory)


@dataclass(frozen=True, slots=True)
class RequestShape:
    """A typical request."""

    output_tokens: float
    context_tokens: float
    """Mean KV tokens held: the prompt and half of the answer."""


def recommend_decode(
    pool: SloPool, memory: DecodeMemory | None, snapshot: Snapshot, status: PoolStatus
) -> tuple[Recommendation, DecodeMemory]:
    """How many decode replicas meet the TPOT target and hold the KV. Pure."""
    memory = memory or DecodeMemory()
    signals, tuning = snapshot.decode, pool.slo
    lead = lead_s(signals, pool.cold_start_s)
    demand = measure(snapshot.arrivals, _output, snapshot.now_s, lead, tuning)
    shape = _shape(snapshot, tuning.history_s)
    if demand is None or signals.step is None or signals.kv_capacity_tokens is None:
        recommendation = Recommendation(
            status.current, "no measured rate of arrivals, step time or KV capacity: count kept"
        )
    elif shape is None:
        recommendation = _empty(signals, status)
    else:
        recommendation = _by_velocity(pool, signals, signals.step, status, demand, shape, lead)
    target_s = pool.target_ms / 1e3
    latency = measured(signals.tpot, pool.percentile, tuning)
    idle = demand is not None and demand.idle and signals.running_requests + signals.waiting_reservations == 0
    busy = recommendation.need / status.ready if recommendation.need > 0 and status.ready else 1.0
    recommendation, trimmed = trim(
        memory.trim, snapshot.now_s, status, recommendation, latency, idle, busy, target_s, tuning
    )
    return recommendation, DecodeMemory(trimmed)


def _output(bucket: ArrivalBucket) -> float:
    return bucket.output_tokens


def _shape(snapshot: Snapshot, history_s: float) -> RequestShape | None:
    recent = [b for b in snapshot.arrivals if b.start_s + b.length_s > snapshot.now_s - history_s]
    requests = sum(bucket.requests for bucket in recent)
    if not requests:
        return None
    output = max(1.0, sum(bucket.output_tokens for bucket in recent) / requests)
    return RequestShape(output, sum(bucket.prompt_tokens for bucket in recent) / requests + output / 2)


def _empty(signals: DecodeSignals, status: PoolStatus) -> Recommendation:
    wanted = status.current if signals.running_requests or signals.waiting_reservations else 1
    return Recommendation(wanted, "nothing arrives", 0.0)


def _by_velocity(
    pool: SloPool,
    signals: DecodeSignals,
    step: StepTimeModel,
    status: PoolStatus,
    demand: DemandForecast,
    shape: RequestShape,
    lead_s: float,
) -> Recommendation:
    tuning = pool.slo
    strict = 1 - (1 - pool.percentile / 100) * tuning.miss_share
    # Arrival peaks shorter than a sequence decodes do not enlarge the batch.
    span_s = max(tuning.span_s, shape.output_tokens * pool.target_ms / 1e3)
    covered = demand.covered_rate(span_s, lead_s, strict, tuning.slow_window_s)
    tokens = max(covered.with_headroom, demand.slow * demand.growth)
    need = replicas_needed(pool, signals, step, tokens, shape)
    wanted = max(1, math.ceil(need - 1e-9))
    if wanted < status.current:
        slack = replicas_needed(pool, signals, step, tokens + tuning.hysteresis * demand.noise, shape)
        wanted = min(status.current, max(wanted, math.ceil(slack - 1e-9)))
        if demand.covered_s < min(tuning.settle_s, tuning.history_s):
            wanted = status.current
    reason = (
        f"{demand.slow:.0f} output tokens/s asked for, {tokens:.0f} covered (growth {demand.growth:.2f}), "
        f"{signals.running_requests} run"
    )
    return Recommendation(wanted, reason, need)


def replicas_needed(
    pool: SloPool, signals: DecodeSignals, step: StepTimeModel, tokens_per_s: float, shape: RequestShape
) -> float:
    """Replicas, not rounded, for `tokens_per_s` output tokens per second and for what runs and waits now.

    With N replicas each makes x = tokens_per_s / N; by Little's law its batch is b = x * step(b), and step(b) =
    base + k b with k = per_sequence + per_context_token * context. So step = base / (1 - x k), and the target is met
    while the batch is at most (target - base) / k. Batch sizes vary like a Poisson variable, so `batch_spread` standard
    deviations are left free. KV capacity and `max_running_requests` bound the batch likewise.
    """
    each = _each_s(step, shape)
    by_time = _batch_in_time(pool, step, shape)
    if by_time < 1:
        by_time = math.inf  # Not even one sequence alone meets the target: no number of replicas would help.
    capacity = signals.kv_capacity_tokens or 0
    batch = max(1.0, min(by_time, _batch_with_room(pool, signals, shape)))
    # b + spread sqrt(b) = batch, solved for the mean b.
    spread = pool.slo.batch_spread
    mean = max(1.0, ((math.sqrt(spread**2 + 4 * batch) - spread) / 2) ** 2)
    each_per_s = mean / (step.base_s + each * mean)
    steady = tokens_per_s / each_per_s
    usable = pool.slo.kv_utilization * capacity
    waiting = signals.waiting_reservations
    held = signals.context_tokens / usable if usable else 0.0
    # What waits for room needs it beside what is held; a burst counts for twice the steady need at most.
    crowd = (signals.running_requests + waiting) / batch
    wanted_kv = (signals.context_tokens + waiting * shape.context_tokens) / usable if usable else 0.0
    return max(steady, min(max(crowd, wanted_kv), steady * 2), held)


def _each_s(step: StepTimeModel, shape: RequestShape) -> float:
    """What one more sequence adds to a step, seconds."""
    return step.per_sequence_s + step.per_context_token_s * shape.context_tokens


def _batch_in_time(pool: SloPool, step: StepTimeModel, shape: RequestShape) -> float:
    """Sequences with which a step takes as long as the target."""
    each = _each_s(step, shape)
    return (pool.target_ms / 1e3 - step.base_s) / each if each > 0 else math.inf


def _batch_with_room(pool: SloPool, signals: DecodeSignals, shape: RequestShape) -> float:
    """Sequences for which a replica has KV and places."""
    by_kv = pool.slo.kv_utilization * (signals.kv_capacity_tokens or 0) / shape.context_tokens
    return min(by_kv, signals.max_running_requests or math.inf)


def decode_shares(pool: SloPool, snapshot: Snapshot, counts: Sequence[int]) -> list[float] | None:
    """Share of steps that would keep the target with each number of replicas, at the demand of now and its growth
    within a cold start: the chance that a batch, spread about its mean as in `replicas_needed`, is no larger than the
    target and the room allow.

    None before demand, step time and KV capacity are measured.
    """
    signals, shape = snapshot.decode, _shape(snapshot, pool.slo.history_s)
    lead = lead_s(signals, pool.cold_start_s)
    demand = measure(snapshot.arrivals, _output, snapshot.now_s, lead, pool.slo)
    if demand is None or signals.step is None or signals.kv_capacity_tokens is None:
        return None
    if shape is None:
        return [1.0 if count > 0 else 0.0 for count in counts]
    step, tokens_per_s = signals.step, demand.slow * demand.growth
    most = min(_batch_in_time(pool, step, shape), _batch_with_room(pool, signals, shape))
    return [_share_of_steps(step, _each_s(step, shape), tokens_per_s, count, most) for count in counts]


def _share_of_steps(
    step: StepTimeModel, each_s: float, tokens_per_s: float, replicas: int, most: float
) -> float:
    if replicas < 1 or tokens_per_s * each_s >= replicas:
        return 0.0
    mean = tokens_per_s / replicas * step.base_s / (1 - tokens_per_s / replicas * each_s)
    if mean < 1:  # mostly one sequence at a time, or none
        return 1.0 if most >= 1 else 0.0
    return NormalDist(mean, math.sqrt(mean)).cdf(most) if math.isfinite(most) else 1.0


def decode_for_rate(pool: SloPool, snapshot: Snapshot, tokens_per_s: float) -> int | None:
    """Replicas for a rate of output tokens per second; None while step time or request shape is unknown."""
    signals, shape = snapshot.decode, _shape(snapshot, pool.slo.history_s)
    if signals.step is None or signals.kv_capacity_tokens is None or shape is None:
        return None
    return max(1, math.ceil(replicas_needed(pool, signals, signals.step, tokens_per_s, shape) - 1e-9))
