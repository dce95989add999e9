"""From a policy file to a `Decide` function: each pool's advice, then `behavior`, then the joint plan. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from autoscaler.advice import Advice, Advise, Situation, count
from autoscaler.behavior import BehaviorMemory, Limits, follow, record_change
from autoscaler.plan import Decide, Memory, Plan, PoolPlan
from autoscaler.planner import Proposal, joint_plan
from autoscaler.policy_file import (
    AnyPool,
    PredictivePool,
    ScalingPolicy,
    SchedulePool,
    SloPool,
    TargetPool,
)
from autoscaler.schedule import scheduled_replicas
from autoscaler.slo_decode import advise_decode
from autoscaler.slo_prefill import advise_prefill
from autoscaler.snapshot import PoolName, ReplicaState, Snapshot
from autoscaler.target_policy import advise_target


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """What is remembered of one pool."""

    desired: int | None = None
    """What the last plan wanted."""
    behavior: BehaviorMemory = field(default_factory=BehaviorMemory)
    policy: Any = None
    """The policy's own memory."""


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """What is remembered between decisions. Losing it (a restart) costs stabilization, never replicas."""

    prefill: PoolMemory = field(default_factory=PoolMemory)
    decode: PoolMemory = field(default_factory=PoolMemory)
    lending: bool = False


def make_decide(policy: ScalingPolicy) -> Decide:
    """The decider of this policy. It holds no state: memory goes in and comes out."""
    advise_p, advise_d = advisor(policy.prefill, "prefill"), advisor(policy.decode, "decode")

    def decide(memory: Memory, snapshot: Snapshot) -> tuple[Plan, Memory]:
        before = memory if isinstance(memory, PlanMemory) else PlanMemory()
        prefill, after_p = _propose(policy.prefill, "prefill", advise_p, before.prefill, snapshot)
        decode, after_d = _propose(policy.decode, "decode", advise_d, before.decode, snapshot)
        plan = joint_plan(policy, snapshot, prefill, decode, before.lending)
        return plan, PlanMemory(
            _recorded(policy.prefill, "prefill", after_p, plan.prefill, prefill.current, snapshot),
            _recorded(policy.decode, "decode", after_d, plan.decode, decode.current, snapshot),
            plan.lend_decode_to_prefill,
        )

    return decide


def advisor(pool: AnyPool, name: PoolName) -> Advise:
    """The policy of one pool, by its kind."""
    match pool:
        case PredictivePool():
            from autoscaler.predictive_policy import advise_predictive

            return partial(advise_predictive, pool, name)
        case SloPool():
            return partial(advise_prefill if name == "prefill" else advise_decode, pool)
        case TargetPool():
            return partial(advise_target, pool, name)
        case SchedulePool():
            return _only_schedule


def _only_schedule(memory: None, snapshot: Snapshot, situation: Situation) -> tuple[Advice, None]:
    return Advice(0, "by schedule", 0.0), memory


def situation_of(pool: AnyPool, name: PoolName, desired: int | None, snapshot: Snapshot) -> Situation:
    """The pool as it is. Without a plan to go by (a start), the replicas that exist are the plan, but standby."""
    replicas = (snapshot.prefill if name == "prefill" else snapshot.decode).replicas
    ready = count(replicas, ReplicaState.READY)
    starting, standby = count(replicas, ReplicaState.STARTING), count(replicas, ReplicaState.STANDBY)
    if desired is None:
        return Situation(max(ready, ready + starting + standby - pool.warm_standby), ready, starting)
    return Situation(desired, ready, min(starting, max(0, desired - ready)))


def _propose(
    pool: AnyPool, name: PoolName, advise: Advise, memory: PoolMemory, snapshot: Snapshot
) -> tuple[Proposal, PoolMemory]:
    situation = situation_of(pool, name, memory.desired, snapshot)
    advice, policy_memory = advise(memory.policy, snapshot, situation)
    floor = scheduled_replicas(pool.schedule, snapshot.wall_s, cold_start_s(pool, name, snapshot))
    wanted, reason = advice.wanted, advice.reason
    if floor > wanted:
        wanted, reason = floor, f"{floor} by schedule; {reason}"
    if not snapshot.complete and wanted < situation.current:
        wanted, reason = situation.current, f"a coordinator does not answer: no scaling down; {reason}"
    if memory.desired is None:
        # As an HPA does, so that a restart does not undo what was stabilized before it.
        memory = replace(memory, behavior=BehaviorMemory(((snapshot.now_s, situation.current),)))
    counted, behavior = follow(
        limits_of(pool, name, snapshot),
        memory.behavior,
        snapshot.now_s,
        situation.current,
        wanted,
        pool.min_replicas,
        pool.max_replicas,
    )
    if counted != wanted:
        reason = f"{counted} for {wanted} by bounds and behavior; {reason}"
    proposal = Proposal(counted, max(advice.need, 0.0), situation.current, situation.ready, reason)
    return proposal, replace(memory, behavior=behavior, policy=policy_memory)


def _recorded(
    pool: AnyPool, name: PoolName, memory: PoolMemory, plan: PoolPlan, current: int, snapshot: Snapshot
) -> PoolMemory:
    limits = limits_of(pool, name, snapshot)
    behavior = record_change(limits, memory.behavior, snapshot.now_s, plan.desired - current)
    return PoolMemory(plan.desired, behavior, memory.policy)


def limits_of(pool: AnyPool, name: PoolName, snapshot: Snapshot) -> Limits:
    """The pool's `behavior`, complete."""
    return pool.limits(cold_start_s(pool, name, snapshot))


def cold_start_s(pool: AnyPool, name: PoolName, snapshot: Snapshot) -> float:
    """The cold start as measured, else as the policy file says."""
    return (snapshot.prefill if name == "prefill" else snapshot.decode).cold_start_s or pool.cold_start_s
