"""The default policy of the decode pool: enough KV for the expected sequences, and batches within the TPOT target."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoscaler.policies.demand import HYSTERESIS, SPAN_S, DemandForecast, measure
from autoscaler.policies.policy_file import SloPool
from autoscaler.policies.recommendation import PoolStatus, Recommendation, TrimMemory, trim
from autoscaler.snapshot import DecodeSignals, Snapshot, lead_s
from splitserve.latency_model import DecodeLatency

KV_UTILIZATION = 0.85
"""Share of the KV capacity that expected sequences may fill: answers may be longer than usual."""
BATCH_SPREAD = 1.0
"""Standard deviations of a replica's batch size that the TPOT target covers."""


@dataclass(frozen=True, slots=True)
class RequestShape:
    """A typical request."""

    output_tokens: float
    context_tokens: float
    """Mean KV tokens held: the prompt and half of the answer."""


def recommend_decode(
    pool: SloPool, memory: TrimMemory | None, snapshot: Snapshot, status: PoolStatus
) -> tuple[Recommendation, TrimMemory]:
    """How many decode replicas meet the TPOT target and hold the KV. Pure."""
    signals = snapshot.decode
    lead = lead_s(signals, pool.cold_start_s)
    demand = measure(snapshot.arrivals, lambda bucket: bucket.output_tokens, snapshot.now_s, lead, pool.slo)
    shape = _shape(snapshot, pool.slo.history_s)
    busy: float | None = None
    if demand is None or signals.step is None or signals.kv_capacity_tokens is None:
        recommendation = Recommendation(
            status.current, "no measured rate of arrivals, step time or KV capacity: count kept"
        )
    else:
        if shape is not None:
            recommendation = _by_velocity(pool, signals, signals.step, status, demand, shape, lead)
        else:
            wanted = status.current if signals.running_requests or signals.waiting_reservations else 1
            recommendation = Recommendation(wanted, "nothing arrives", 0.0)
        busy = recommendation.need
    return trim(pool, memory or TrimMemory(), snapshot.now_s, status, recommendation, signals.tpot, busy)


def _shape(snapshot: Snapshot, history_s: float) -> RequestShape | None:
    recent = snapshot.arrivals_of_last(history_s)
    requests = sum(bucket.requests for bucket in recent)
    if not requests:
        return None
    output = max(1.0, sum(bucket.output_tokens for bucket in recent) / requests)
    return RequestShape(output, sum(bucket.prompt_tokens for bucket in recent) / requests + output / 2)


def _by_velocity(
    pool: SloPool,
    signals: DecodeSignals,
    step: DecodeLatency,
    status: PoolStatus,
    demand: DemandForecast,
    shape: RequestShape,
    lead_s: float,
) -> Recommendation:
    tuning = pool.slo
    strict = 1 - (1 - pool.percentile / 100) * tuning.miss_share
    # Arrival peaks shorter than a sequence decodes do not enlarge the batch.
    span_s = max(SPAN_S, shape.output_tokens * pool.target_ms / 1e3)
    covered = demand.covered_rate(span_s, lead_s, strict, tuning.window_s)
    tokens = max(covered.with_headroom, demand.slow * demand.growth)
    need = replicas_needed(pool, signals, step, tokens, shape)
    wanted = max(1, math.ceil(need - 1e-9))
    if wanted < status.current:
        slack = replicas_needed(pool, signals, step, tokens + HYSTERESIS * demand.noise, shape)
        wanted = min(status.current, max(wanted, math.ceil(slack - 1e-9)))
        if not demand.settled:
            wanted = status.current
    reason = (
        f"{demand.slow:.0f} output tokens/s asked for, {tokens:.0f} covered (growth {demand.growth:.2f}), "
        f"{signals.running_requests} run"
    )
    return Recommendation(wanted, reason, need)


def replicas_needed(
    pool: SloPool, signals: DecodeSignals, step: DecodeLatency, tokens_per_s: float, shape: RequestShape
) -> float:
    """Replicas, not rounded, for `tokens_per_s` output tokens per second and for what runs and waits now.

    With N replicas each makes x = tokens_per_s / N; by Little's law its batch is b = x * step(b), and step(b) =
    base + k b with k = sequence_s + context_token_s * context. So step = base / (1 - x k), and the target is met
    while the batch is at most (target - base) / k. Batch sizes vary like a Poisson variable, so BATCH_SPREAD standard
    deviations are left free. KV capacity and `max_running_requests` bound the batch likewise.
    """
    each_s = step.sequence_s + step.context_token_s * shape.context_tokens
    by_time = (pool.target_ms / 1e3 - step.base_s) / each_s if each_s > 0 else math.inf
    if by_time < 1:
        by_time = math.inf  # A single sequence misses the target: more replicas would not help.
    usable = KV_UTILIZATION * (signals.kv_capacity_tokens or 0)
    slots = signals.max_running_requests or math.inf
    batch = max(1.0, min(by_time, usable / shape.context_tokens, slots))
    # b + spread sqrt(b) = batch, solved for the mean b.
    spread = BATCH_SPREAD
    mean = max(1.0, ((math.sqrt(spread**2 + 4 * batch) - spread) / 2) ** 2)
    steady = tokens_per_s / (mean / (step.base_s + each_s * mean))
    waiting = signals.waiting_reservations
    held = signals.context_tokens / usable if usable else 0.0
    # Waiting requests need slots and KV beside those in use. A burst adds at most the steady need once more.
    slots_need = (signals.running_requests + waiting) / batch
    kv_need = (signals.context_tokens + waiting * shape.context_tokens) / usable if usable else 0.0
    return max(steady, min(max(slots_need, kv_need), steady * 2), held)


def decode_for_rate(pool: SloPool, snapshot: Snapshot, tokens_per_s: float) -> int | None:
    """Replicas for a rate of output tokens per second; None while step time or request shape is unknown."""
    signals, shape = snapshot.decode, _shape(snapshot, pool.slo.history_s)
    if signals.step is None or signals.kv_capacity_tokens is None or shape is None:
        return None
    return max(1, math.ceil(replicas_needed(pool, signals, signals.step, tokens_per_s, shape) - 1e-9))
