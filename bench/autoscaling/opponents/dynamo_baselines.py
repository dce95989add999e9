"""NVIDIA Dynamo's planner as baselines: `optimization_target: throughput` or `latency` (thresholds), and `sla`.

Read from https://github.com/ai-dynamo/dynamo/tree/main/components/src/dynamo/planner: `load_scaling.py`,
`throughput_scaling.py`, `perf_model/`, `predictors.py` and `defaults.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from autoscaler.plan import Decide, Memory, PoolPlan, ScalingPlan
from autoscaler.policies.policy_file import PoolPolicy
from autoscaler.simulation.engine_model import EngineModel
from autoscaler.simulation.scenario import Slo
from autoscaler.snapshot import Replica, ReplicaState, Snapshot
from bench.autoscaling.opponents.hpa_baselines import (
    counted,
    decode_rate,
    mean_lengths,
    mean_uncached,
    recent_arrivals,
)
from bench.autoscaling.opponents.trend_filter import TrendFilter
from splitserve.roles import POOLS, PoolName

DYNAMO_INTERVAL_S = 5.0
"""`load_adjustment_interval`."""
_THRESHOLDS: Mapping[str, Mapping[PoolName, tuple[float, float]]] = {
    "throughput": {"prefill": (1.0, 0.1), "decode": (1.0, 0.6)},
    "latency": {"prefill": (0.1, 0.0), "decode": (0.4, 0.1)},
}
"""(one more at, one less under) of the tokens queued over the context length, and of the KV pool in use."""


@dataclass(frozen=True, slots=True)
class SlaKnobs:
    """Settings of `optimization_target: sla`."""

    interval_s: float = 180.0
    """`throughput_adjustment_interval`."""
    predictor: Literal["constant", "kalman"] = "constant"
    """`load_predictor`. Its default is `arima`, which its own comments call a worse match for bursts than `kalman`;
    `prophet` needs more history than these traces have."""
    load_scaling: bool = False
    """`enable_load_scaling`."""
    sensitivity: float = 0.8
    """`load_scaling_down_sensitivity`, a share."""
    use: float = 1.0
    """Share of an engine's rate that its profile gives. As it ships prefill has no head-room, and a queue once there
    stays; an operator can profile with less."""


@dataclass(frozen=True, slots=True)
class _Traffic:
    """What arrived in one interval: requests a second, and mean tokens of a request."""

    requests: float
    uncached: float
    prompt: float
    output: float


@dataclass(frozen=True, slots=True)
class _SlaMemory:
    due_s: float = 0.0
    desired: Mapping[PoolName, int] = field(default_factory=dict)
    floor: Mapping[PoolName, int] = field(default_factory=dict)
    filters: tuple[TrendFilter, ...] = ()


def dynamo_thresholds(
    engine: EngineModel,
    bounds: Mapping[PoolName, PoolPolicy],
    *,
    target: Literal["throughput", "latency"] = "throughput",
) -> Decide:
    """The planner without targets, which looks at no latency; `throughput` is its default.

    Prefill: one more when any worker has a context length of tokens queued, one less when all have under a tenth.
    Decode: one more when any worker's KV use, queued requests included, is above 100%, one less when all are under
    60%. Decided every 5 s, never while an earlier change is on its way. Its queues leave out prompts in computation.
    A worker's part of the pool's queue is taken by its share of requests.
    """

    def decide(memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        desired: dict[PoolName, int] = memory or {}
        ratios = {
            "prefill": [tokens / engine.context_tokens for tokens in _queued(snapshot)],
            "decode": [tokens / engine.kv_capacity_tokens for tokens in _held(snapshot)],
        }
        replicas: dict[PoolName, int] = {}
        for pool, (up, down) in _THRESHOLDS[target].items():
            ready, pending = counted(snapshot.pool(pool).replicas)
            count = desired.get(pool, ready + pending)
            if not _changing(snapshot, pool) and ratios[pool]:
                count = ready
                if any(ratio >= up for ratio in ratios[pool]):
                    count += 1
                elif all(ratio < down or ratio == down == 0 for ratio in ratios[pool]):
                    count -= 1
            replicas[pool] = min(max(count, bounds[pool].min_replicas), bounds[pool].max_replicas)
        return ScalingPlan(PoolPlan(replicas["prefill"]), PoolPlan(replicas["decode"])), replicas

    return decide


def dynamo_sla(
    slo: Slo, engine: EngineModel, bounds: Mapping[PoolName, PoolPolicy], knobs: SlaKnobs | None = None
) -> Decide:
    """The planner with targets. Every `interval_s`: predicted requests a second over what one engine carries.

    Prefill: 1 / (time of the mean uncached prompt), and at least that time over the TTFT target. Decode: the largest
    batch in time that has room, by Little's law. With `load_scaling` this is a floor, and every 5 s one more is
    wanted where every engine is expected to miss its target, one less where the rest would keep `sensitivity` of it;
    never while a change is on its way. Its regressions are taken to have learned the engine exactly.
    """
    knobs = knobs or SlaKnobs()

    def decide(memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        kept = (
            memory if isinstance(memory, _SlaMemory) else _SlaMemory(due_s=snapshot.now_s + knobs.interval_s)
        )
        desired = dict(kept.desired) or {pool: sum(counted(snapshot.pool(pool).replicas)) for pool in POOLS}
        if snapshot.now_s >= kept.due_s - 1e-6:
            seen, filters = _predicted(snapshot, knobs, kept.filters)
            kept = replace(kept, due_s=snapshot.now_s + knobs.interval_s, filters=filters)
            if seen is not None:
                kept = replace(kept, floor=_by_throughput(slo, engine, seen, knobs.use))
                desired = dict(kept.floor) if not knobs.load_scaling else desired
        if knobs.load_scaling:
            for pool, step in _by_load(slo, engine, snapshot, knobs.sensitivity).items():
                if not _changing(snapshot, pool):
                    desired[pool] = counted(snapshot.pool(pool).replicas)[0] + step
                desired[pool] = max(desired[pool], kept.floor.get(pool, 1))
        replicas = {
            pool: min(max(desired[pool], bounds[pool].min_replicas), bounds[pool].max_replicas)
            for pool in POOLS
        }
        plan = ScalingPlan(PoolPlan(replicas["prefill"]), PoolPlan(replicas["decode"]))
        return plan, replace(kept, desired=replicas)

    return decide


def _predicted(
    snapshot: Snapshot, knobs: SlaKnobs, filters: tuple[TrendFilter, ...]
) -> tuple[_Traffic | None, tuple[TrendFilter, ...]]:
    """The next interval's traffic; None where nothing arrived."""
    recent = recent_arrivals(snapshot, knobs.interval_s)
    requests = sum(bucket.requests for bucket in recent)
    if not requests:
        return None, filters
    sums = [
        sum(bucket.uncached_tokens for bucket in recent) / requests,
        sum(bucket.prompt_tokens for bucket in recent) / requests,
        sum(bucket.output_tokens for bucket in recent) / requests,
    ]
    values = [float(requests), *sums]
    if knobs.predictor == "kalman":
        filters = tuple(
            trend.observed(value)
            for trend, value in zip(filters or (TrendFilter(),) * 4, values, strict=True)
        )
        values = [max(0.0, trend.forecast) for trend in filters]
    return _Traffic(values[0] / knobs.interval_s, values[1], values[2], values[3]), filters


def _by_throughput(slo: Slo, engine: EngineModel, seen: _Traffic, use: float) -> dict[PoolName, int]:
    prompt_s = engine.prompt_s(max(1, round(seen.uncached)))
    late = math.ceil(prompt_s / slo.ttft_s) if prompt_s > slo.ttft_s else 1
    carried = decode_rate(engine, seen.prompt, seen.output, slo.tpot_s)
    return {
        "prefill": max(1, late, math.ceil(seen.requests * prompt_s / use - 1e-9)),
        "decode": max(1, math.ceil(seen.requests / (carried * use) - 1e-9)),
    }


def _by_load(slo: Slo, engine: EngineModel, snapshot: Snapshot, sensitivity: float) -> dict[PoolName, int]:
    """One more, one less, or as many, by what each engine's next request would see."""
    uncached = mean_uncached(snapshot)
    own_s = engine.prompt_s(max(1, round(uncached)))
    token_s = own_s / max(1.0, uncached)
    queued, held = _queued(snapshot), _held(snapshot)
    up_p = bool(queued) and all(own_s + token_s * tokens > slo.ttft_s for tokens in queued)
    room_s = (slo.ttft_s - own_s) * sensitivity
    rest = len(queued) / max(1, len(queued) - 1)
    down_p = len(queued) > 1 and room_s > 0 and all(token_s * tokens * rest < room_s for tokens in queued)
    running = snapshot.decode.running_requests / max(1, len(held)) + 1
    length = snapshot.decode.context_tokens / max(1, snapshot.decode.running_requests)
    up_d = bool(held) and all(engine.decode.decode_step_s(running, kv + length) > slo.tpot_s for kv in held)
    rest = len(held) / max(1, len(held) - 1)
    down_d = len(held) > 1 and all(
        kv * rest < engine.kv_capacity_tokens
        and engine.decode.decode_step_s(running, kv * rest + length) < slo.tpot_s * sensitivity
        for kv in held
    )
    return {"prefill": int(up_p) or -int(down_p), "decode": int(up_d) or -int(down_d)}


def _queued(snapshot: Snapshot) -> list[float]:
    """Prompt tokens that wait at each ready prefill worker."""
    prefill = snapshot.prefill
    loads = sum(replica.load for replica in prefill.replicas)
    waiting = prefill.backlog_tokens * prefill.waiting_requests / max(1.0, loads)
    return [share * waiting for share in _shares(prefill.replicas)]


def _held(snapshot: Snapshot) -> list[float]:
    """KV tokens at each ready decode worker, those of queued requests included."""
    decode = snapshot.decode
    held = decode.context_tokens + decode.waiting_reservations * mean_lengths(snapshot)[0]
    return [share * held for share in _shares(decode.replicas)]


def _changing(snapshot: Snapshot, pool: PoolName) -> bool:
    moving = (ReplicaState.STARTING, ReplicaState.DRAINING)
    return any(replica.state in moving for replica in snapshot.pool(pool).replicas)


def _shares(replicas: Sequence[Replica]) -> list[float]:
    total = sum(replica.load for replica in replicas)
    ready = [replica for replica in replicas if replica.state is ReplicaState.READY]
    return [replica.load / total if total else 0.0 for replica in ready]
