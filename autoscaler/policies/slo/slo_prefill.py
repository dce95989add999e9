"""The default policy of the prefill pool: arriving and waiting tokens over a replica's measured rate."""

from __future__ import annotations

import math

from autoscaler.policies.demand import HYSTERESIS, SPAN_S, DemandForecast, measure
from autoscaler.policies.policy_file import SloPool, SloTuning
from autoscaler.policies.recommendation import PoolStatus, Recommendation, TrimMemory, trim
from autoscaler.snapshot import ReplicaState, Snapshot, lead_s


def recommend_prefill(
    pool: SloPool, memory: TrimMemory | None, snapshot: Snapshot, status: PoolStatus
) -> tuple[Recommendation, TrimMemory]:
    """How many prefill replicas meet the TTFT target. Pure."""
    signals, tuning = snapshot.prefill, pool.slo
    lead = lead_s(signals, pool.cold_start_s)
    demand = measure(snapshot.arrivals, lambda bucket: bucket.uncached_tokens, snapshot.now_s, lead, tuning)
    rate = useful_rate(snapshot)
    busy: float | None = None
    if demand is not None and rate:
        recommendation = _by_velocity(pool, snapshot, status, demand, rate, lead)
        busy = (demand.slow + signals.backlog_tokens / snapshot.window_s) / rate
    elif demand is not None and demand.settled and not demand.amounts.any() and not signals.backlog_tokens:
        recommendation, busy = Recommendation(1, "nothing to compute arrives"), 0.0
    else:
        recommendation = Recommendation(
            status.current, "no measured rate of arrivals or of prefill: count kept"
        )
    return trim(pool, memory or TrimMemory(), snapshot.now_s, status, recommendation, signals.latency, busy)


def useful_rate(snapshot: Snapshot) -> float | None:
    """Tokens per second of one busy replica: its compute rate, or the rate of its lane to decode if that is lower."""
    computed, link = snapshot.prefill.tokens_per_s, snapshot.link
    if not computed or not link.gb_per_s or not link.kv_bytes_per_token:
        return computed
    return min(computed, link.gb_per_s * 1e9 / link.kv_bytes_per_token)


def _by_velocity(
    pool: SloPool,
    snapshot: Snapshot,
    status: PoolStatus,
    demand: DemandForecast,
    rate: float,
    lead_s: float,
) -> Recommendation:
    """Replicas for the demand one lead time from now, and for a backlog that the present replicas cannot clear."""
    tuning = pool.slo
    prompt_s = _mean_prompt_s(snapshot, rate, tuning)
    backlog = _backlog_replicas(pool, snapshot, status, demand, rate, lead_s)
    covered = _replicas(pool, demand, rate, prompt_s, lead_s)
    wanted = max(backlog, covered)
    why = f"{covered} carry what may arrive in {lead_s:.0f} s"
    if wanted < status.current:
        slack = _replicas(pool, demand, rate, prompt_s, lead_s, HYSTERESIS * demand.noise)
        wanted = min(status.current, max(wanted, slack))
        if not demand.settled:
            wanted, why = status.current, f"{why}, watched for only {demand.covered_s:.0f} s"
        elif status.starting:
            wanted, why = status.current, f"{why}, but {status.starting} still start"
    elif backlog > covered:
        why = f"{backlog} to catch up with a step of the demand"
    reason = (
        f"{why}; {demand.slow:.0f} tokens/s arrive (growth {demand.growth:.2f}), "
        f"{snapshot.prefill.backlog_tokens} wait, {rate:.0f}/s a replica"
        f"{', bound by its link' if rate < (snapshot.prefill.tokens_per_s or 0.0) else ''}"
    )
    return Recommendation(wanted, reason, max(wanted - 1.0, demand.slow * demand.growth / rate))


def _backlog_replicas(
    pool: SloPool,
    snapshot: Snapshot,
    status: PoolStatus,
    demand: DemandForecast,
    rate: float,
    lead_s: float,
) -> int:
    """Replicas that clear a backlog which the ready ones cannot clear in time; 0 while the target is not in danger.

    New replicas are ready one lead time from now. Until then the backlog grows by the fast rate and shrinks by the work
    of ready and starting replicas. The rest is to be cleared within another half `window_s`, beside new arrivals:
    prompts are computed in the order of their deadlines, so no request is in time before the backlog is gone.
    """
    waiting = snapshot.prefill.backlog_tokens
    if waiting <= status.ready * rate * pool.target_ms / 1e3:
        return 0
    started = [
        max(0.0, r.since_s + lead_s - snapshot.now_s)
        for r in snapshot.prefill.replicas
        if r.state is ReplicaState.STARTING
    ]
    soon = sorted(started)[: status.starting]
    left = waiting + (demand.fast - status.ready * rate) * lead_s - sum(rate * (lead_s - eta) for eta in soon)
    if left <= 0:
        return 0
    drain_s = pool.slo.window_s / 2
    # At most half a lead time of the fast rate is added: more counts as a passing burst.
    left = min(left, waiting + demand.fast * max(drain_s, lead_s / 2))
    return math.ceil((demand.fast + left / drain_s) / rate)


def _mean_prompt_s(snapshot: Snapshot, rate: float, tuning: SloTuning) -> float:
    recent = [b for b in snapshot.arrivals if b.start_s >= snapshot.now_s - tuning.history_s]
    requests = sum(bucket.prefill_requests for bucket in recent)
    return sum(bucket.uncached_tokens for bucket in recent) / requests / rate if requests else 0.0


def _replicas(
    pool: SloPool,
    demand: DemandForecast,
    rate: float,
    prompt_s: float,
    lead_s: float,
    spare_per_s: float = 0.0,
) -> int:
    """Replicas for the covered demand plus `spare_per_s` tokens per second, and for random queueing at mean demand."""
    wait_s = _longest_wait_s(pool, prompt_s)
    share = pool.percentile / 100
    strict = 1 - (1 - share) * pool.slo.miss_share
    span_s = max(SPAN_S, wait_s)
    rates = demand.covered_rate(span_s, lead_s, strict, pool.slo.window_s)
    tokens = max(rates.with_headroom, demand.slow * demand.growth)
    covered = math.ceil((tokens + spare_per_s) / rate - 1e-9)
    chance = replicas_for_wait(
        (rates.expected + spare_per_s) / rate, prompt_s, wait_s, share, pool.max_replicas
    )
    return min(pool.max_replicas, max(covered, chance))


def prefill_for_rate(pool: SloPool, snapshot: Snapshot, tokens_per_s: float) -> int | None:
    """Replicas for a steady rate of tokens per second; None before a replica's rate is measured."""
    rate = useful_rate(snapshot)
    if not rate:
        return None
    prompt_s = _mean_prompt_s(snapshot, rate, pool.slo)
    wait_s = _longest_wait_s(pool, prompt_s)
    return replicas_for_wait(tokens_per_s / rate, prompt_s, wait_s, pool.percentile / 100, pool.max_replicas)


def _longest_wait_s(pool: SloPool, prompt_s: float) -> float:
    """How long a mean prompt may wait: the target less its computation, at least a tenth of the target."""
    target_s = pool.target_ms / 1e3
    return max(target_s - prompt_s, 0.1 * target_s)


def erlang_c(servers: int, load: float) -> float:
    """Probability that an arrival waits in M/M/c. `load` in erlangs; 1.0 from `servers` on.

    By the recursion of Erlang B (B(0) = 1, B(k) = load B(k-1) / (k + load B(k-1))) and C = B / (1 - rho (1 - B)).
    """
    if load >= servers:
        return 1.0
    blocked = 1.0
    for k in range(1, servers + 1):
        blocked = load * blocked / (k + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def wait_exceeds(servers: int, load: float, service_s: float, wait_s: float) -> float:
    """P(wait > wait_s) in an M/M/c queue: Erlang C times the exponential tail."""
    if load >= servers:
        return 1.0
    if service_s <= 0:
        return 0.0
    return erlang_c(servers, load) * math.exp(-(servers - load) * wait_s / service_s)


def replicas_for_wait(load: float, service_s: float, wait_s: float, share: float, most: int) -> int:
    """Fewest replicas with which `share` of requests wait at most `wait_s`; `most` + 1 if none suffices."""
    servers = max(1, math.floor(load) + 1)
    while servers <= most and wait_exceeds(servers, load, service_s, wait_s) > 1 - share:
        servers += 1
    return servers
