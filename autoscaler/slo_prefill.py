"""The default policy of the prefill pool: tokens that arrive and wait, over tokens that a replica computes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autoscaler.advice import Advice, Situation
from autoscaler.demand import Demand, measure
from autoscaler.latency_trim import TrimMemory, measured, trim
from autoscaler.policy_file import SloPool
from autoscaler.queueing import replicas_for_wait
from autoscaler.slo_tuning import SloTuning
from autoscaler.snapshot import ArrivalBucket, ReplicaState, Snapshot

STARTING = ReplicaState.STARTING


@dataclass(frozen=True, slots=True)
class PrefillMemory:
    """What is kept between decisions."""

    trim: TrimMemory = field(default_factory=TrimMemory)


def advise_prefill(
    pool: SloPool, memory: PrefillMemory | None, snapshot: Snapshot, situation: Situation
) -> tuple[Advice, PrefillMemory]:
    """How many prefill replicas meet the TTFT target. Pure."""
    memory = memory or PrefillMemory()
    signals, tuning = snapshot.prefill, pool.slo
    lead = signals.cold_start_s or pool.cold_start_s
    demand = measure(snapshot.arrivals, _uncached, snapshot.now_s, lead, tuning)
    rate = useful_rate(snapshot)
    if demand is None or not rate:
        advice = Advice(situation.current, "no measured rate of arrivals or of prefill: count kept")
    else:
        advice = _by_velocity(pool, snapshot, situation, demand, rate, lead)
    target_s = pool.target_ms / 1e3
    latency = measured(signals.latency, pool.percentile, tuning)
    idle = demand is not None and demand.idle and signals.backlog_tokens == 0
    busy = _utilization(snapshot, situation, demand)
    advice, trimmed = trim(
        memory.trim, snapshot.now_s, situation, advice, latency, idle, busy, target_s, tuning
    )
    return advice, PrefillMemory(trimmed)


def useful_rate(snapshot: Snapshot) -> float | None:
    """Tokens a second of one busy replica: what it computes, or what its lane to decode carries when that is less."""
    computed, link = snapshot.prefill.tokens_per_s, snapshot.link
    if not computed or not link.gb_per_s or not link.kv_bytes_per_token:
        return computed
    return min(computed, link.gb_per_s * 1e9 / link.kv_bytes_per_token)


def _uncached(bucket: ArrivalBucket) -> float:
    return float(bucket.uncached_tokens)


def _utilization(snapshot: Snapshot, situation: Situation, demand: Demand | None) -> float:
    """Share of the pool's capacity that arrivals and what waits take; 1 while unknown."""
    capacity = (useful_rate(snapshot) or 0.0) * situation.ready
    if demand is None or capacity <= 0:
        return 1.0
    return (demand.slow + snapshot.prefill.backlog_tokens / snapshot.window_s) / capacity


def _by_velocity(
    pool: SloPool, snapshot: Snapshot, situation: Situation, demand: Demand, rate: float, lead_s: float
) -> Advice:
    """Replicas by demand: for what may arrive one lead from now, and for a backlog that present replicas leave."""
    tuning = pool.slo
    prompt_s = _mean_prompt_s(snapshot, rate, tuning)
    backlog = _backlog_replicas(pool, snapshot, situation, demand, rate, lead_s)
    covered = _replicas(pool, demand, rate, prompt_s, lead_s)
    wanted = max(backlog, covered)
    why = f"{covered} carry what may arrive in {lead_s:.0f} s"
    if wanted < situation.current:
        slack = _replicas(pool, demand, rate, prompt_s, lead_s, tuning.hysteresis * demand.noise)
        wanted = min(situation.current, max(wanted, slack))
        if demand.covered_s < min(tuning.settle_s, tuning.history_s):
            wanted, why = situation.current, f"{why}, watched for only {demand.covered_s:.0f} s"
        elif situation.starting:
            wanted, why = situation.current, f"{why}, but {situation.starting} still start"
    elif backlog > covered:
        why = f"{backlog} to catch up with a step of the demand"
    reason = (
        f"{why}; {demand.slow:.0f} tokens/s arrive (growth {demand.growth:.2f}), "
        f"{snapshot.prefill.backlog_tokens} wait, {rate:.0f}/s a replica"
        f"{', bound by its link' if rate < (snapshot.prefill.tokens_per_s or 0.0) else ''}"
    )
    return Advice(wanted, reason, max(wanted - 1.0, demand.slow * demand.growth / rate))


def _backlog_replicas(
    pool: SloPool, snapshot: Snapshot, situation: Situation, demand: Demand, rate: float, lead_s: float
) -> int:
    """Replicas that catch up with demand which outruns those at work; 0 while the target is not in danger.

    New ones come one lead from now. Until then what waits grows by the fast rate, less what those at work and those
    on their way compute; they then have `drain_backlog_s` for the rest, beside what goes on arriving.
    """
    waiting = snapshot.prefill.backlog_tokens
    if waiting <= situation.ready * rate * pool.target_ms / 1e3:
        return 0
    started = [
        max(0.0, r.since_s + lead_s - snapshot.now_s)
        for r in snapshot.prefill.replicas
        if r.state is STARTING
    ]
    soon = sorted(started)[: situation.starting]
    left = (
        waiting + (demand.fast - situation.ready * rate) * lead_s - sum(rate * (lead_s - eta) for eta in soon)
    )
    if left <= 0:
        return 0
    # What is left is demand that was not foreseen; more of it than the fast rate brings in `drain_backlog_s` is taken
    # to be a burst that passes.
    left = min(left, waiting + demand.fast * pool.slo.drain_backlog_s)
    return math.ceil((demand.fast + left / pool.slo.drain_backlog_s) / rate)


def _mean_prompt_s(snapshot: Snapshot, rate: float, tuning: SloTuning) -> float:
    recent = [b for b in snapshot.arrivals if b.start_s >= snapshot.now_s - tuning.history_s]
    requests = sum(bucket.requests for bucket in recent)
    return sum(bucket.uncached_tokens for bucket in recent) / requests / rate if requests else 0.0


def _replicas(
    pool: SloPool, demand: Demand, rate: float, prompt_s: float, lead_s: float, spare_per_s: float = 0.0
) -> int:
    """Enough for the covered demand and `spare_per_s` tokens more, and for the wait that chance makes at its mean."""
    target_s = pool.target_ms / 1e3
    wait_s = max(target_s - prompt_s, 0.1 * target_s)
    share = pool.percentile / 100
    strict = 1 - (1 - share) * pool.slo.miss_share
    span_s = max(pool.slo.span_s, wait_s)
    rates = demand.covered_rate(span_s, lead_s, strict, pool.slo.slow_window_s)
    tokens = max(rates.with_headroom, demand.slow * demand.growth)
    covered = math.ceil((tokens + spare_per_s) / rate - 1e-9)
    chance = replicas_for_wait(
        (rates.expected + spare_per_s) / rate, prompt_s, wait_s, share, pool.max_replicas
    )
    return min(pool.max_replicas, max(covered, chance))


def prefill_for_rate(pool: SloPool, snapshot: Snapshot, tokens_per_s: float) -> int | None:
    """Replicas that carry so steady an arrival of tokens; None while the rate of a replica is not measured."""
    rate = useful_rate(snapshot)
    if not rate:
        return None
    target_s = pool.target_ms / 1e3
    prompt_s = _mean_prompt_s(snapshot, rate, pool.slo)
    wait_s = max(target_s - prompt_s, 0.1 * target_s)
    return replicas_for_wait(tokens_per_s / rate, prompt_s, wait_s, pool.percentile / 100, pool.max_replicas)
