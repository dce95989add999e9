"""Makes the `Decide` function of a policy file: each pool's recommendation, `behavior`, then the joint plan. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from autoscaler.plan import Cause, Decide, Memory, PoolPlan, ScalingPlan
from autoscaler.policies.behavior import BehaviorMemory, follow, record_change
from autoscaler.policies.custom import custom_policy
from autoscaler.policies.joint_plan import Proposal, joint_plan
from autoscaler.policies.policy_file import (
    AnyPool,
    CustomPool,
    PredictivePool,
    ScalingPolicy,
    SchedulePool,
    SloPool,
    TargetPool,
)
from autoscaler.policies.recommendation import PoolStatus, Recommend, Recommendation
from autoscaler.policies.schedule import scheduled_replicas
from autoscaler.policies.slo.slo_decode import recommend_decode
from autoscaler.policies.slo.slo_prefill import recommend_prefill
from autoscaler.policies.target import recommend_target
from autoscaler.policies.zero import ZeroMemory, ZeroState, zero_state
from autoscaler.snapshot import ReplicaState, Snapshot, lead_s
from splitserve.roles import PoolName


@dataclass(frozen=True, slots=True)
class PoolState:
    """Memory of one pool."""

    desired: int | None = None
    """Desired replicas of the last plan; None before the first, and while plans are not carried out."""
    behavior: BehaviorMemory = field(default_factory=BehaviorMemory)
    policy: Any = None
    """The policy's own memory."""


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """Memory between decisions. Losing it (a restart) costs stabilization, never replicas."""

    prefill: PoolState = field(default_factory=PoolState)
    decode: PoolState = field(default_factory=PoolState)
    zero: ZeroMemory | None = None


def make_decide(policy: ScalingPolicy, functions: Mapping[str, Recommend] | None = None) -> Decide:
    """The `Decide` function of this policy. It keeps no state: it takes the memory and returns the next one.

    `functions`: the functions of pools of kind `custom`, by pool; missing ones are loaded. Raises ConfigError.
    """
    given = functions or {}
    recommend_p = given.get("prefill") or recommender(policy.prefill, "prefill")
    recommend_d = given.get("decode") or recommender(policy.decode, "decode")

    def decide(memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        before = memory if isinstance(memory, PlanMemory) else PlanMemory()
        zero, zero_memory = zero_state(policy, before.zero, snapshot)
        prefill, after_p = _propose(policy.prefill, "prefill", recommend_p, before.prefill, snapshot, zero)
        decode, after_d = _propose(policy.decode, "decode", recommend_d, before.decode, snapshot, zero)
        plan = joint_plan(policy, snapshot, prefill, decode)
        return plan, PlanMemory(
            _recorded(policy.prefill, "prefill", after_p, plan.prefill, prefill.current, snapshot),
            _recorded(policy.decode, "decode", after_d, plan.decode, decode.current, snapshot),
            zero_memory,
        )

    return decide


def carried(memory: Memory, before: ScalingPolicy, after: ScalingPolicy) -> Memory:
    """The memory with which `after` goes on where `before` stopped: counts, behavior, forecasts and trends."""
    if not isinstance(memory, PlanMemory):
        return memory
    return replace(
        memory,
        prefill=replace(memory.prefill, policy=_kept(memory.prefill.policy, before.prefill, after.prefill)),
        decode=replace(memory.decode, policy=_kept(memory.decode.policy, before.decode, after.decode)),
    )


_MEANING = ("kind", "function", "season_s", "interval_s")
"""Settings that say what a policy's memory means. Not every kind has all of them."""


def _kept(memory: Any, before: AnyPool, after: AnyPool) -> Any:
    """One pool's policy memory, where the new policy understands it; else None, as at the start."""
    same = all(getattr(before, name, None) == getattr(after, name, None) for name in _MEANING)
    return memory if same else None


def recommender(pool: AnyPool, name: PoolName) -> Recommend:
    """The policy of one pool, by its kind."""
    match pool:
        case PredictivePool():
            from autoscaler.policies.predictive import recommend_predictive

            return partial(recommend_predictive, pool, name)
        case SloPool():
            return partial(recommend_prefill if name == "prefill" else recommend_decode, pool)
        case TargetPool():
            return partial(recommend_target, pool, name)
        case SchedulePool():
            return _only_schedule
        case CustomPool():
            return custom_policy(pool, name)


def _only_schedule(memory: None, snapshot: Snapshot, status: PoolStatus) -> tuple[Recommendation, None]:
    return Recommendation(0, "by schedule", 0.0), memory


def status_of(pool: AnyPool, name: PoolName, desired: int | None, snapshot: Snapshot) -> PoolStatus:
    """The pool's status. `desired` is the last plan's count. Before the first plan, and while plans are not carried
    out, the existing replicas less the standbys count as desired."""
    states = Counter(replica.state for replica in snapshot.pool(name).replicas)
    ready, starting = states[ReplicaState.READY], states[ReplicaState.STARTING]
    existing = max(ready, ready + starting + states[ReplicaState.STANDBY] - pool.warm_standby)
    if desired is None and snapshot.acting:
        # Preempted replicas were wanted until now, and are to be replaced.
        existing += states[ReplicaState.PREEMPTED]
    if desired is None or not snapshot.acting:
        return PoolStatus(existing, ready, starting, existing)
    return PoolStatus(desired, ready, min(starting, max(0, desired - ready)), existing)


def _propose(
    pool: AnyPool,
    name: PoolName,
    recommend: Recommend,
    memory: PoolState,
    snapshot: Snapshot,
    zero: ZeroState,
) -> tuple[Proposal, PoolState]:
    status = status_of(pool, name, memory.desired, snapshot)
    recommendation, policy_memory = recommend(memory.policy, snapshot, status)
    least = zero.least[name]
    if zero.at_zero:
        at_zero = Proposal(least, 0.0, status.current, zero.reason, "", "to_zero", least)
        return at_zero, replace(memory, policy=policy_memory)
    floor = scheduled_replicas(pool.schedule, snapshot.wall_s, cold_start_s(pool, name, snapshot))
    wanted, reason = recommendation.wanted, recommendation.reason
    cause: Cause = "policy"
    if floor > wanted:
        wanted, reason, cause = floor, f"{floor} by schedule; {reason}", "schedule"
    if not snapshot.complete and wanted < status.current:
        wanted, cause = status.current, "silent_coordinator"
        reason = f"a coordinator does not answer: no scaling down; {reason}"
    if memory.desired is None and not memory.behavior.recommendations:
        # As an HPA does: after a restart the current count is the first recommendation to stabilize by.
        memory = replace(memory, behavior=BehaviorMemory(((snapshot.now_s, status.current),)))
    limits, now_s = pool.limits(cold_start_s(pool, name, snapshot)), snapshot.now_s
    counted, behavior = follow(
        limits, memory.behavior, now_s, status.current, wanted, least, pool.max_replicas
    )
    if zero.reason:
        reason, cause = f"{zero.reason}; {reason}", "from_zero" if counted > wanted else cause
    elif counted != wanted:
        reason, cause = f"{counted} for {wanted} by bounds and behavior; {reason}", "bounds"
    need = max(recommendation.need, 0.0)
    proposal = Proposal(counted, need, status.current, reason, recommendation.error, cause, least)
    return proposal, replace(memory, behavior=behavior, policy=policy_memory)


def _recorded(
    pool: AnyPool, name: PoolName, memory: PoolState, plan: PoolPlan, current: int, snapshot: Snapshot
) -> PoolState:
    limits = pool.limits(cold_start_s(pool, name, snapshot))
    # A plan that is not carried out adds no replicas, so it does not count against the rates of change.
    added = plan.desired - current if snapshot.acting else 0
    behavior = record_change(limits, memory.behavior, snapshot.now_s, added)
    return PoolState(plan.desired if snapshot.acting else None, behavior, memory.policy)


def cold_start_s(pool: AnyPool, name: PoolName, snapshot: Snapshot) -> float:
    """The measured cold start, seconds; the policy file's before the first measurement."""
    return lead_s(snapshot.pool(name), pool.cold_start_s)
