"""What limits both pools together, apart from what they want: their ratio, the shared link, and the GPUs. Pure."""

from __future__ import annotations

import math

from autoscaler.policies.policy_file import ScalingPolicy
from autoscaler.snapshot import LEAVING, PoolName, Snapshot


def link_carries(policy: ScalingPolicy, snapshot: Snapshot) -> int | None:
    """Busy prefill replicas whose KV the shared link can carry; None while unknown or not shared."""
    rate, kv_bytes = snapshot.prefill.tokens_per_s, snapshot.link.kv_bytes_per_token
    if policy.link_gb_per_s is None or not rate or not kv_bytes:
        return None
    return max(1, math.ceil(policy.link_gb_per_s * 1e9 / (kv_bytes * rate) - 1e-9))


def gpu_budget(policy: ScalingPolicy, snapshot: Snapshot) -> int | None:
    """GPUs for both pools: the policy's, else the actuator's inventory and what workers of others have beside it."""
    if policy.prefill.classes or policy.decode.classes:
        return None  # units are no GPUs: the mixes of classes keep a budget
    if policy.gpu_budget is not None or snapshot.gpu_inventory is None:
        return policy.gpu_budget
    return snapshot.gpu_inventory + sum(
        pool.gpus_per_replica * sum(not r.ours and r.state not in LEAVING for r in replicas)
        for pool, replicas in (
            (policy.prefill, snapshot.prefill.replicas),
            (policy.decode, snapshot.decode.replicas),
        )
    )


def within_ratio(policy: ScalingPolicy, p: int, d: int) -> tuple[int, int, dict[PoolName, str]]:
    """The counts of prefill and decode with replicas added to the pool that is too small for the other, as far as its
    own maximum allows; and why, for people, where any were."""
    low, high = policy.ratio.min_prefill_per_decode, policy.ratio.max_prefill_per_decode
    why: dict[PoolName, str] = {}
    if low is not None and p < low * d:
        raised = min(policy.prefill.max_replicas, math.ceil(low * d - 1e-9))
        if raised > p:
            p, why["prefill"] = raised, f"{raised} for a ratio of at least {low:g}"
    if high is not None and p > high * d:
        raised = min(policy.decode.max_replicas, math.ceil(p / high - 1e-9))
        if raised > d:
            d, why["decode"] = raised, f"{raised} for a ratio of at most {high:g}"
    return p, d, why
