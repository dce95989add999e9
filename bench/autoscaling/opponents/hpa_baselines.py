"""Baselines that scale through a HorizontalPodAutoscaler: on latency, on utilization, on the request rate as KEDA does,
on llm-d's token backlog, and on llm-d's queueing model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoscaler.decide import make_decide
from autoscaler.plan import Decide, Memory, PoolPlan, ScalingPlan
from autoscaler.policies.behavior import (
    Behavior,
    BehaviorMemory,
    Limits,
    ScalingRules,
    follow,
    record_change,
)
from autoscaler.policies.policy_file import PoolPolicy, parse_policy
from autoscaler.simulation.engine_model import EngineModel
from autoscaler.simulation.scenario import Slo
from autoscaler.snapshot import ArrivalBucket, Replica, ReplicaState, Snapshot
from splitserve.roles import POOLS, PoolName

HPA_TOLERANCE = 0.1
HPA_SYNC_S = 15.0
"""`--horizontal-pod-autoscaler-tolerance` and `--horizontal-pod-autoscaler-sync-period`, as shipped."""
HPA_DOWN_S = 300
"""Stabilization of scaling down, as shipped."""
LLM_D_KV_THRESHOLD = 0.8
LLM_D_TAIL_SHARE = 0.65
"""llm-d: "for a p90/p99 SLO, shave to ~60-70% of the formula result"."""
_LEAST_USE = 0.05

Wanted = Callable[[Snapshot, int], int | None]
"""(snapshot, ready replicas) -> desired replicas; None while the metric is missing."""


@dataclass(frozen=True, slots=True)
class _Scaled:
    """One pool's memory under an HPA."""

    desired: int
    behavior: BehaviorMemory


def hpa_p95_latency(slo: Slo, bounds: Mapping[PoolName, PoolPolicy], *, share: float = 1.0) -> Decide:
    """HorizontalPodAutoscaler v2 on latency: ceil(ready * p95 / target), TTFT for prefill and TPOT for decode.

    `share`: the HPA's target as a share of the SLO's.
    https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/#algorithm-details
    """

    def ttft(snapshot: Snapshot, ready: int) -> int | None:
        value = snapshot.prefill.ttft.percentile(95) if snapshot.prefill.ttft else None
        return hpa_formula(ready, value, slo.ttft_s * share)

    def tpot(snapshot: Snapshot, ready: int) -> int | None:
        value = snapshot.decode.tpot.percentile(95) if snapshot.decode.tpot else None
        return hpa_formula(ready, value, slo.tpot_s * share)

    return _by_hpa({"prefill": ttft, "decode": tpot}, bounds)


def hpa_formula(ready: int, value: float | None, target: float) -> int | None:
    """Desired replicas of an HPA; None without a value, `ready` within the tolerance."""
    if value is None:
        return None
    ratio = value / target
    return ready if abs(ratio - 1) <= HPA_TOLERANCE else math.ceil(ready * ratio - 1e-9)


def hpa_utilization(
    bounds: Mapping[PoolName, PoolPolicy], *, target: float = 0.7, down_s: int = HPA_DOWN_S
) -> Decide:
    """An HPA on the share of the pool's capacity in use (prefill: arriving tokens; decode: KV): the policy kind
    `target` with the metric `utilization`. `down_s`: its stabilization of scaling down."""
    pools: dict[str, Any] = {
        pool: {
            "kind": "target",
            "metric": "utilization",
            "target": target,
            "min_replicas": bounds[pool].min_replicas,
            "max_replicas": bounds[pool].max_replicas,
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": down_s}},
        }
        for pool in POOLS
    }
    return make_decide(parse_policy(pools))


def keda_rate(
    work_s: Mapping[PoolName, float],
    bounds: Mapping[PoolName, PoolPolicy],
    *,
    use: float = 0.7,
    window_s: float = 120.0,
    down_s: int = HPA_DOWN_S,
) -> Decide:
    """KEDA's prometheus scaler on `sum(rate(requests[window]))` with a threshold of requests a second for each replica.

    The threshold is `use` of what a replica carries of the run's mean request, `work_s` seconds of each pool. KEDA's
    own example has a window of 2 min. https://keda.sh/docs/latest/scalers/prometheus/
    """

    def of(pool: PoolName) -> Wanted:
        return lambda snapshot, _: _replicas(request_rate(snapshot, window_s), use / work_s[pool])

    return _by_hpa({pool: of(pool) for pool in POOLS}, bounds, down_s, external=True)


def token_backlog(
    slo: Slo,
    engine: EngineModel,
    bounds: Mapping[PoolName, PoolPolicy],
    *,
    tail: float = LLM_D_TAIL_SHARE,
    kv: float = LLM_D_KV_THRESHOLD,
) -> Decide:
    """llm-d's token-aware autoscaling, with the two pools apart.

    Prefill: ceil(tokens in flight / V_P / threshold), V_P tokens a second of one replica, threshold = TTFT target -
    ISL / V_P, times `tail` for a tail percentile. Decode: ceil(sum of KV use / `kv`). Read from
    https://github.com/llm-d/llm-d/tree/main/guides/workload-autoscaling/keda-epp-token-aware; its example limits
    growth to one pod in 3 minutes, which is left to HPA's faster default here.
    """
    peak = engine.max_step_tokens / engine.prompt_s(engine.max_step_tokens)

    def prefill(snapshot: Snapshot, ready: int) -> int | None:
        prompt_s = mean_uncached(snapshot) / peak
        threshold_s = max(0.05 * slo.ttft_s, tail * (slo.ttft_s - prompt_s))
        value = snapshot.prefill.backlog_tokens / peak / max(1, ready)
        return hpa_formula(ready, value, threshold_s)

    def decode(snapshot: Snapshot, ready: int) -> int | None:
        used = snapshot.decode.context_tokens / engine.kv_capacity_tokens / max(1, ready)
        return hpa_formula(ready, used, kv)

    return _by_hpa({"prefill": prefill, "decode": decode}, bounds)


def llm_d_slo(
    slo: Slo,
    engine: EngineModel,
    bounds: Mapping[PoolName, PoolPolicy],
    *,
    share: float = 1.0,
    window_s: float = 60.0,
    down_s: int = HPA_DOWN_S,
) -> Decide:
    """llm-d's workload-variant autoscaler with its queueing model and explicit SLOs, each pool a variant.

    ceil(arrival rate / the highest rate at which a replica's mean TTFT and ITL keep `share` of their targets). Prefill:
    mean TTFT = s / (1 - use), s the mean prompt. Decode: the largest batch in time that has room, by Little's law. Its
    filter is taken to have learned the engine exactly. Read from slo-queuemodel.md in the developer guide of
    https://github.com/llm-d/llm-d-workload-variant-autoscaler, which is followed by an HPA.
    """

    def prefill(snapshot: Snapshot, _: int) -> int | None:
        prompt_s = engine.prompt_s(max(1, round(mean_uncached(snapshot))))
        use = max(_LEAST_USE, 1 - prompt_s / (slo.ttft_s * share))
        return _replicas(request_rate(snapshot, window_s), use / prompt_s)

    def decode(snapshot: Snapshot, _: int) -> int | None:
        prompt, output = mean_lengths(snapshot)
        return _replicas(
            request_rate(snapshot, window_s), decode_rate(engine, prompt, output, slo.tpot_s * share)
        )

    return _by_hpa({"prefill": prefill, "decode": decode}, bounds, down_s, external=True)


def decode_rate(engine: EngineModel, prompt: float, output: float, step_s: float) -> float:
    """Requests a second that a decode replica carries with steps of at most `step_s`, by Little's law; those of one
    sequence alone where even that takes longer."""
    output, context = max(1.0, output), prompt + output / 2
    step = engine.decode
    each_s = step.sequence_s + step.context_token_s * context
    in_time = (step_s - step.base_s) / each_s if each_s > 0 else math.inf
    with_room = min(engine.kv_capacity_tokens / max(1.0, context), engine.max_running_requests)
    batch = max(1.0, math.floor(min(in_time, with_room) + 1e-9))
    return batch / (output * (step.base_s + each_s * batch))


def request_rate(snapshot: Snapshot, window_s: float) -> float | None:
    """Requests a second that arrived in the last `window_s`; None before anything is known."""
    recent = recent_arrivals(snapshot, window_s)
    length_s = snapshot.now_s - recent[0].start_s if recent else 0.0
    return sum(bucket.requests for bucket in recent) / length_s if length_s > 0 else None


def recent_arrivals(snapshot: Snapshot, window_s: float) -> list[ArrivalBucket]:
    """The buckets of the last `window_s`."""
    return [bucket for bucket in snapshot.arrivals if bucket.start_s >= snapshot.now_s - window_s - 1e-6]


def mean_uncached(snapshot: Snapshot) -> float:
    """Mean uncached tokens of a request."""
    requests = sum(bucket.requests for bucket in snapshot.arrivals)
    return sum(bucket.uncached_tokens for bucket in snapshot.arrivals) / requests if requests else 0.0


def mean_lengths(snapshot: Snapshot) -> tuple[float, float]:
    """Mean tokens of a prompt, and of an answer."""
    requests = max(1, sum(bucket.requests for bucket in snapshot.arrivals))
    prompts = sum(bucket.prompt_tokens for bucket in snapshot.arrivals)
    return prompts / requests, sum(bucket.output_tokens for bucket in snapshot.arrivals) / requests


def counted(replicas: Sequence[Replica]) -> tuple[int, int]:
    """Ready and starting replicas."""
    ready = sum(replica.state is ReplicaState.READY for replica in replicas)
    return ready, sum(replica.state is ReplicaState.STARTING for replica in replicas)


def _replicas(rate: float | None, per_replica: float) -> int | None:
    return None if rate is None else math.ceil(rate / per_replica - 1e-9)


def _by_hpa(
    formulas: Mapping[PoolName, Wanted],
    bounds: Mapping[PoolName, PoolPolicy],
    down_s: int = HPA_DOWN_S,
    external: bool = False,
) -> Decide:
    """`external`: the metric is the whole pool's and divided by a target for each replica (AverageValue), so that pods
    which are not ready make no difference to it."""
    limits = Limits.of(Behavior(scaleDown=ScalingRules(stabilizationWindowSeconds=down_s)))

    def decide(memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        before: dict[PoolName, _Scaled] = memory or {}
        after: dict[PoolName, _Scaled] = {}
        for pool in POOLS:
            ready, pending = counted(snapshot.pool(pool).replicas)
            current = ready + pending
            # An HPA begins with what it finds as its first recommendation.
            kept = before.get(pool) or _Scaled(current, BehaviorMemory(((snapshot.now_s, current),)))
            current = kept.desired
            wanted = formulas[pool](snapshot, ready)
            if wanted is None:
                after[pool] = kept
                continue
            low, high = bounds[pool].min_replicas, bounds[pool].max_replicas
            if external:
                wanted = current if abs(wanted / max(1, current) - 1) <= HPA_TOLERANCE else wanted
            # When growing, HPA counts pods that are not ready with a metric of 0, so it adds none on their account.
            elif wanted > ready and pending:
                wanted = max(wanted, current) if wanted > current else current
            desired, behavior = follow(limits, kept.behavior, snapshot.now_s, current, wanted, low, high)
            behavior = record_change(limits, behavior, snapshot.now_s, desired - current)
            after[pool] = _Scaled(desired, behavior)
        plan = ScalingPlan(PoolPlan(after["prefill"].desired), PoolPlan(after["decode"].desired))
        return plan, after

    return decide
