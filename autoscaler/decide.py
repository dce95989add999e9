"""Makes a `Decide` function of a policy file: each pool's recommendation, `behavior`, the joint plan, then the
classes of replicas. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from autoscaler.classes.class_plan import in_units, with_classes
from autoscaler.leanings.side_room import SideRoom, side_rooms
from autoscaler.leanings.turned_capacity import TurnedCapacity, turned_capacity
from autoscaler.plan import Cause, Decide, Memory, PoolPlan, Proposal, Proposals, ScalingPlan, joint_plan
from autoscaler.policies.behavior import BehaviorMemory, Limits, follow, record_change
from autoscaler.policies.custom import custom_policy, loaded_functions
from autoscaler.policies.joint_limits import link_carries
from autoscaler.policies.policy_file import (
    AnyPool,
    CustomPool,
    PredictivePool,
    ScalingPolicy,
    SchedulePool,
    SloPool,
    TargetPool,
)
from autoscaler.policies.recommendation import PoolStatus, Recommend, Recommendation, count
from autoscaler.policies.schedule import scheduled_replicas
from autoscaler.policies.slo.slo_decode import recommend_decode
from autoscaler.policies.slo.slo_prefill import recommend_prefill
from autoscaler.policies.target import recommend_target
from autoscaler.policies.zero import ZeroMemory, ZeroState, zero_state
from autoscaler.sharing.claims.class_shares import with_shared_classes
from autoscaler.sharing.claims.gpu_shares import gpu_claims, gpu_share
from autoscaler.snapshot import POOLS, PoolName, ReplicaState, Snapshot, lead_s


@dataclass(frozen=True, slots=True)
class PoolState:
    """Memory of one pool."""

    desired: int | None = None
    """Desired replicas of the last plan that was carried out."""
    behavior: BehaviorMemory = field(default_factory=BehaviorMemory)
    policy: Any = None
    """The policy's own memory."""


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """Memory between decisions. Losing it (a restart) costs stabilization, never replicas."""

    prefill: PoolState = field(default_factory=PoolState)
    decode: PoolState = field(default_factory=PoolState)
    lending: bool = False
    zero: ZeroMemory | None = None
    decided_s: float = float("-inf")
    """When the last decision looked."""


def make_decide(policy: ScalingPolicy, functions: Mapping[str, Recommend] | None = None) -> Decide:
    """The decider of this policy. Stateless: it takes the memory and returns the next one.

    `functions`: the loaded functions of pools of the kind `custom`; None loads them. Raises ConfigError.
    """
    loaded = loaded_functions(policy) if functions is None else functions
    recommend_p = loaded.get("prefill") or recommender(policy.prefill, "prefill")
    recommend_d = loaded.get("decode") or recommender(policy.decode, "decode")

    def decide(memory: Memory, snapshot: Snapshot) -> tuple[ScalingPlan, Memory]:
        before = memory if isinstance(memory, PlanMemory) else PlanMemory()
        units = in_units(policy, snapshot)
        zero, zero_memory = zero_state(policy, before.zero, units)
        turned = turned_capacity(policy, snapshot.turns, before.decided_s)
        state_p, state_d = (
            _turned(before.prefill, turned["prefill"]),
            _turned(before.decode, turned["decode"]),
        )
        parts = units, zero, turned
        prefill, after_p = _propose(policy.prefill, "prefill", recommend_p, state_p, *parts)
        decode, after_d = _propose(policy.decode, "decode", recommend_d, state_d, *parts)
        proposals = Proposals(prefill, decode)
        claims = gpu_claims(policy, units, proposals)
        most = gpu_share(policy, units, claims)
        plan = joint_plan(policy, units, prefill, decode, before.lending, most)
        if most is not None:
            plan = replace(
                plan, claims={str(pool): one for pool, one in claims.items()}, worth_moving=most.worth_moving
            )
        mixed = with_classes if snapshot.shared is None else with_shared_classes
        plan = mixed(policy, snapshot, units, plan, proposals)
        plan = replace(plan, rooms=_rooms(policy, units, plan, zero))
        return plan, PlanMemory(
            _recorded(policy.prefill, "prefill", after_p, plan.prefill, prefill.current, snapshot),
            _recorded(policy.decode, "decode", after_d, plan.decode, decode.current, snapshot),
            plan.lend_decode_to_prefill,
            zero_memory,
            snapshot.now_s,
        )

    return decide


def _turned(memory: PoolState, turned: TurnedCapacity) -> PoolState:
    """The memory with what the side has since coordinators moved workers."""
    if memory.desired is None:
        return memory
    return replace(memory, desired=max(0, memory.desired + turned.since_decision))


def _rooms(
    policy: ScalingPolicy, units: Snapshot, plan: ScalingPlan, zero: ZeroState
) -> Mapping[PoolName, SideRoom]:
    floors = {
        name: max(zero.least[name], _scheduled(pool, name, units)) for name, pool in policy.pools.items()
    }
    wanted = {name: plan.pool(name).capacity for name in POOLS}
    return {} if zero.at_zero else side_rooms(policy, wanted, floors, link_carries(policy, units))


def _scheduled(pool: AnyPool, name: PoolName, snapshot: Snapshot) -> int:
    return scheduled_replicas(pool.schedule, snapshot.wall_s, cold_start_s(pool, name, snapshot))


def carried(memory: Memory, before: ScalingPolicy, after: ScalingPolicy) -> Memory:
    """The memory with which `after` goes on where `before` stopped: counts, behavior, forecasts and trends."""
    if not isinstance(memory, PlanMemory):
        return memory
    return replace(
        memory,
        prefill=_carried(memory.prefill, before.prefill, after.prefill),
        decode=_carried(memory.decode, before.decode, after.decode),
    )


def plan_holds(before: ScalingPolicy, after: ScalingPolicy) -> bool:
    """Whether a plan of `before` may be acted on under `after` until that has decided: a replica is the same thing, and
    all may take the same. Bounds of pools without classes are kept by those who act."""
    return _counts_of(before) == _counts_of(after)


def _counts_of(policy: ScalingPolicy) -> tuple[object, ...]:
    pools = [
        (pool.gpus_per_replica, pool.warm_standby, pool.classes, pool.max_replicas if pool.classes else 0)
        for pool in policy.pools.values()
    ]
    return policy.workers, policy.gpu_budget, policy.gpu_limits, policy.budget_per_hour, pools


def _carried(memory: PoolState, before: AnyPool, after: AnyPool) -> PoolState:
    """Where a unit is another one than before, counts mean nothing: what exists counts, as after a restart."""
    kept = replace(memory, policy=_kept(memory.policy, before, after))
    if tuple(before.speeds.items()) == tuple(after.speeds.items()):
        return kept
    return replace(kept, desired=None, behavior=BehaviorMemory())


def _kept(memory: Any, before: AnyPool, after: AnyPool) -> Any:
    """One pool's policy memory, as far as the new policy understands it."""
    if isinstance(before, PredictivePool) and isinstance(after, SloPool):
        if isinstance(after, PredictivePool):
            same = (before.season_s, before.interval_s) == (after.season_s, after.interval_s)
            return memory if same or memory is None else type(memory)(inner=memory.inner)
        return memory.inner if memory is not None else None
    if isinstance(before, SloPool) and isinstance(after, PredictivePool):
        from autoscaler.policies.predictive import PredictiveMemory

        return PredictiveMemory(inner=memory)
    if type(before) is not type(after):
        return None
    if isinstance(before, CustomPool) and isinstance(after, CustomPool) and before.function != after.function:
        return None
    return memory


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
    """The pool's status. `desired` is the last plan's. Without one, and while plans are not carried out, the replicas
    that exist less the standbys count as desired."""
    replicas = snapshot.pool(name).replicas
    ready = count(replicas, ReplicaState.READY)
    starting, standby = count(replicas, ReplicaState.STARTING), count(replicas, ReplicaState.STANDBY)
    warm = pool.warm_standby
    if warm and pool.classes:
        warm = max(warm, standby)  # in units one replica on standby may be more than is wanted of them
    existing = max(ready, ready + starting + standby - warm)
    if desired is None and snapshot.acting:
        # Those whose machines are taken away were wanted until now, and are to be replaced.
        existing += count(replicas, ReplicaState.PREEMPTED)
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
    turned: Mapping[PoolName, TurnedCapacity],
) -> tuple[Proposal, PoolState]:
    status = status_of(pool, name, memory.desired, snapshot)
    recommendation, policy_memory = recommend(memory.policy, snapshot, status)
    least = zero.least[name]
    if zero.at_zero:
        at_zero = Proposal(least, 0.0, status.current, status.ready, zero.reason, "", "to_zero", least)
        return at_zero, replace(memory, policy=policy_memory)
    floor = _scheduled(pool, name, snapshot)
    wanted, reason = recommendation.wanted, recommendation.reason
    cause: Cause = "policy"
    if (since := turned[name].wanted(wanted, status.current)) != wanted:
        wanted, reason = since, f"{since} for {wanted} as coordinators moved workers since; {reason}"
    if floor > wanted:
        wanted, reason, cause = floor, f"{floor} by schedule; {reason}", "schedule"
    if not snapshot.complete and wanted < status.current:
        wanted, cause = status.current, "silent_coordinator"
        reason = f"a coordinator does not answer: no scaling down; {reason}"
    if memory.desired is None and not memory.behavior.recommendations:
        # As an HPA does, so that a restart does not discard the stabilization before it.
        memory = replace(memory, behavior=BehaviorMemory(((snapshot.now_s, status.current),)))
    counted, behavior = follow(
        limits_of(pool, name, snapshot),
        memory.behavior,
        snapshot.now_s,
        status.current,
        wanted,
        least,
        pool.max_replicas,
    )
    if zero.reason:
        reason, cause = f"{zero.reason}; {reason}", "from_zero" if counted > wanted else cause
    elif counted != wanted:
        reason, cause = f"{counted} for {wanted} by bounds and behavior; {reason}", "bounds"
    need = max(recommendation.need, 0.0)
    proposal = Proposal(
        counted, need, status.current, status.ready, reason, recommendation.error, cause, least
    )
    return proposal, replace(memory, behavior=behavior, policy=policy_memory)


def _recorded(
    pool: AnyPool, name: PoolName, memory: PoolState, plan: PoolPlan, current: int, snapshot: Snapshot
) -> PoolState:
    limits = limits_of(pool, name, snapshot)
    # A plan that is not carried out changes nothing that rates of change could be limited by.
    added = plan.capacity - current if snapshot.acting else 0
    behavior = record_change(limits, memory.behavior, snapshot.now_s, added)
    return PoolState(plan.capacity if snapshot.acting else None, behavior, memory.policy)


def limits_of(pool: AnyPool, name: PoolName, snapshot: Snapshot) -> Limits:
    """The pool's `behavior` with all defaults filled in."""
    return pool.limits(cold_start_s(pool, name, snapshot))


def cold_start_s(pool: AnyPool, name: PoolName, snapshot: Snapshot) -> float:
    """The measured cold start, seconds; the policy file's before the first measurement."""
    return lead_s(snapshot.pool(name), pool.cold_start_s)
