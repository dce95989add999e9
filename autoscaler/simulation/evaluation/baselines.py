"""Published scaling rules as deciders: the baselines that the default policy is compared with.

Each follows the formula and defaults of its source; for sources that scale through an HPA, with HPA's default behavior.
Only `static-peak` knows the future: its count comes from the trace itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoscaler.plan import Decide, Memory, PoolPlan, ScalingPlan
from autoscaler.policies.behavior import Behavior, BehaviorMemory, Limits, follow, record_change
from autoscaler.reconcile import Bounds
from autoscaler.simulation.engine_model import EngineModel
from autoscaler.simulation.outcome import Slo
from autoscaler.snapshot import POOLS, PoolName, Replica, ReplicaState, Snapshot

HPA_TOLERANCE = 0.1
HPA_SYNC_S = 15.0
"""`--horizontal-pod-autoscaler-tolerance` and `--horizontal-pod-autoscaler-sync-period`, as shipped."""
LLM_D_KV_THRESHOLD = 0.8
LLM_D_TAIL_SHARE = 0.65
"""llm-d: "for a p90/p99 SLO, shave to ~60-70% of the formula result"."""
DYNAMO_INTERVAL_S = 5.0
DYNAMO_PREFILL_UP, DYNAMO_PREFILL_DOWN = 1.0, 0.1
DYNAMO_DECODE_UP, DYNAMO_DECODE_DOWN = 1.0, 0.6

Wanted = Callable[[Snapshot, int], int | None]
"""(snapshot, ready replicas) -> desired replicas; None while the metric is missing."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """A rule and its decision interval."""

    name: str
    decide: Decide
    interval_s: float


@dataclass(frozen=True, slots=True)
class _Scaled:
    """One pool's memory under an HPA."""

    desired: int | None = None
    behavior: BehaviorMemory = field(default_factory=BehaviorMemory)


def static_replicas(counts: Mapping[PoolName, int]) -> Decide:
    """A decider with constant counts."""
    plan = ScalingPlan(PoolPlan(counts["prefill"]), PoolPlan(counts["decode"]))
    return lambda memory, snapshot: (plan, memory)


def hpa_p95_latency(slo: Slo, bounds: Mapping[PoolName, Bounds]) -> Decide:
    """HorizontalPodAutoscaler v2 on latency: ceil(ready * p95 / target), TTFT for prefill and TPOT for decode.

    https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/#algorithm-details
    """

    def ttft(snapshot: Snapshot, ready: int) -> int | None:
        value = snapshot.prefill.ttft.percentile(95) if snapshot.prefill.ttft else None
        return hpa_formula(ready, value, slo.ttft_s)

    def tpot(snapshot: Snapshot, ready: int) -> int | None:
        value = snapshot.decode.tpot.percentile(95) if snapshot.decode.tpot else None
        return hpa_formula(ready, value, slo.tpot_s)

    return _by_hpa({"prefill": ttft, "decode": tpot}, bounds)


def hpa_formula(ready: int, value: float | None, target: float) -> int | None:
    """Desired replicas of an HPA; None without a value, `ready` within the tolerance."""
    if value is None:
        return None
    ratio = value / target
    return ready if abs(ratio - 1) <= HPA_TOLERANCE else math.ceil(ready * ratio - 1e-9)


def token_backlog(slo: Slo, engine: EngineModel, bounds: Mapping[PoolName, Bounds]) -> Decide:
    """llm-d's token-aware autoscaling, with the two pools apart.

    Prefill: ceil(tokens in flight / V_P / threshold), V_P tokens a second of one replica, threshold = TTFT target -
    ISL / V_P, times 0.65 for a tail percentile. Decode: ceil(sum of KV use / 0.8). Read from
    https://github.com/llm-d/llm-d/tree/main/guides/workload-autoscaling/keda-epp-token-aware; its example limits
    growth to one pod in 3 minutes, which is left to HPA's faster default here.
    """
    peak = engine.max_step_tokens / engine.prompt_s(engine.max_step_tokens)

    def prefill(snapshot: Snapshot, ready: int) -> int | None:
        prompt_s = _mean_prompt(snapshot) / peak
        threshold_s = max(0.05 * slo.ttft_s, LLM_D_TAIL_SHARE * (slo.ttft_s - prompt_s))
        value = snapshot.prefill.backlog_tokens / peak / max(1, ready)
        return hpa_formula(ready, value, threshold_s)

    def decode(snapshot: Snapshot, ready: int) -> int | None:
        used = snapshot.decode.context_tokens / engine.kv_capacity_tokens / max(1, ready)
        return hpa_formula(ready, used, LLM_D_KV_THRESHOLD)

    return _by_hpa({"prefill": prefill, "decode": decode}, bounds)


def dynamo_thresholds(engine: EngineModel, bounds: Mapping[PoolName, Bounds]) -> Decide:
    """NVIDIA Dynamo's planner in its default mode (`optimization_target: throughput`), which looks at no latency.

    Prefill: one more when any worker has a context length of tokens queued, one less when all have under a tenth.
    Decode: one more when any worker's KV use, queued requests included, is above 100%, one less when all are under
    60%. Decided every 5 s, never while an earlier change is on its way. Read from `load_scaling.py` and
    `defaults.py` of https://github.com/ai-dynamo/dynamo/tree/main/components/src/dynamo/planner. Its queues
    leave out prompts in computation. A worker's part of the pool's queue is taken by its share of requests.
    """

    def decide(memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        prefill, decode = snapshot.prefill, snapshot.decode
        desired: dict[PoolName, int] = memory or {}
        queued = [
            share * prefill.backlog_tokens * prefill.waiting_requests / max(1.0, _loads(prefill.replicas))
            for share in _shares(prefill.replicas)
        ]
        held = decode.context_tokens + decode.waiting_reservations * _mean_prompt(snapshot)
        kv = [share * held for share in _shares(decode.replicas)]
        ratios = {
            "prefill": [tokens / engine.context_tokens for tokens in queued],
            "decode": [tokens / engine.kv_capacity_tokens for tokens in kv],
        }
        found: dict[PoolName, int] = {}
        for pool, (up, down) in _DYNAMO.items():
            replicas = prefill.replicas if pool == "prefill" else decode.replicas
            ready, pending = _count(replicas)
            count = desired.get(pool, ready + pending)
            if pending == 0 and not any(r.state is ReplicaState.DRAINING for r in replicas) and ratios[pool]:
                count = ready
                if any(ratio >= up for ratio in ratios[pool]):
                    count += 1
                elif all(ratio < down for ratio in ratios[pool]):
                    count -= 1
            found[pool] = min(max(count, bounds[pool].min), bounds[pool].max)
        return ScalingPlan(PoolPlan(found["prefill"]), PoolPlan(found["decode"])), found

    return decide


_DYNAMO: Mapping[PoolName, tuple[float, float]] = {
    "prefill": (DYNAMO_PREFILL_UP, DYNAMO_PREFILL_DOWN),
    "decode": (DYNAMO_DECODE_UP, DYNAMO_DECODE_DOWN),
}
BASELINES = ("static-peak", "hpa-p95-latency", "token-backlog", "dynamo-thresholds")


def baselines(
    slo: Slo, engine: EngineModel, bounds: Mapping[PoolName, Bounds], peak: Mapping[PoolName, int]
) -> dict[str, Baseline]:
    """All baselines by name; `peak` are the constant counts of `static-peak`."""
    deciders = {
        "static-peak": (static_replicas(peak), HPA_SYNC_S),
        "hpa-p95-latency": (hpa_p95_latency(slo, bounds), HPA_SYNC_S),
        "token-backlog": (token_backlog(slo, engine, bounds), HPA_SYNC_S),
        "dynamo-thresholds": (dynamo_thresholds(engine, bounds), DYNAMO_INTERVAL_S),
    }
    return {name: Baseline(name, decide, interval_s) for name, (decide, interval_s) in deciders.items()}


def _by_hpa(formulas: Mapping[PoolName, Wanted], bounds: Mapping[PoolName, Bounds]) -> Decide:
    limits = Limits.of(Behavior())

    def decide(memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        before: dict[PoolName, _Scaled] = memory or {}
        after: dict[PoolName, _Scaled] = {}
        for pool in POOLS:
            replicas = snapshot.prefill.replicas if pool == "prefill" else snapshot.decode.replicas
            ready, pending = _count(replicas)
            kept = before.get(pool, _Scaled())
            current = ready + pending if kept.desired is None else kept.desired
            wanted = formulas[pool](snapshot, ready)
            if wanted is None:
                after[pool] = replace(kept, desired=current)
                continue
            low, high = bounds[pool].min, bounds[pool].max
            # When growing, HPA counts pods that are not ready with a metric of 0, so it adds none on their account.
            if wanted > ready and pending:
                wanted = max(wanted, current) if wanted > current else current
            desired, behavior = follow(limits, kept.behavior, snapshot.now_s, current, wanted, low, high)
            behavior = record_change(limits, behavior, snapshot.now_s, desired - current)
            after[pool] = _Scaled(desired, behavior)
        counts = {pool: after[pool].desired or 1 for pool in POOLS}
        return ScalingPlan(PoolPlan(counts["prefill"]), PoolPlan(counts["decode"])), after

    return decide


def _count(replicas: Sequence[Replica]) -> tuple[int, int]:
    ready = sum(replica.state is ReplicaState.READY for replica in replicas)
    return ready, sum(replica.state is ReplicaState.STARTING for replica in replicas)


def _mean_prompt(snapshot: Snapshot) -> float:
    """Mean uncached tokens of a request."""
    requests = sum(bucket.requests for bucket in snapshot.arrivals)
    return sum(bucket.uncached_tokens for bucket in snapshot.arrivals) / requests if requests else 0.0


def _loads(replicas: Sequence[Replica]) -> float:
    return sum(replica.load for replica in replicas)


def _shares(replicas: Sequence[Replica]) -> list[float]:
    total = _loads(replicas)
    ready = [replica for replica in replicas if replica.state is ReplicaState.READY]
    return [replica.load / total if total else 0.0 for replica in ready]
