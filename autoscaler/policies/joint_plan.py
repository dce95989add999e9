"""The joint plan: both pools' proposals under one GPU budget. Pure and deterministic.

The budget removes standby first, then replicas of the less loaded pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoscaler.plan import Cause, PoolPlan, ScalingPlan
from autoscaler.policies.policy_file import ScalingPolicy
from autoscaler.snapshot import LEAVING, Snapshot
from splitserve.roles import POOLS, PoolName

WORTH_MOVING = 0.1
"""GPUs move from pool to pool only if that lowers the worse pool's overload by this share."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """One pool's proposal, without regard to the other pool."""

    count: int
    """Replicas in rotation, within the pool's bounds and `behavior`."""
    need: float
    """Replicas kept busy by the demand, not rounded."""
    current: int
    """Desired replicas of the last plan."""
    reason: str
    error: str = ""
    cause: Cause = "policy"
    least: int = 1
    """Fewest replicas at this moment; the GPU budget does not go below."""


Counts = Mapping[PoolName, int]
NO_STANDBY: Counts = dict.fromkeys(POOLS, 0)
Proposals = Mapping[PoolName, Proposal]


def joint_plan(policy: ScalingPolicy, snapshot: Snapshot, prefill: Proposal, decode: Proposal) -> ScalingPlan:
    """The plan for both pools."""
    proposals: Proposals = {"prefill": prefill, "decode": decode}
    counts: Counts = {name: proposal.count for name, proposal in proposals.items()}
    standby: Counts = {name: pool.warm_standby for name, pool in policy.pools.items()}
    budget = gpu_budget(policy, snapshot)
    if budget is not None and _gpus(policy, counts, standby) > budget:
        standby = _less_standby(policy, counts, standby, budget)
        if _gpus(policy, counts, standby) > budget:
            counts = _shared(policy, proposals, counts, budget)
    return ScalingPlan(
        _pool_plan(prefill, counts["prefill"], standby["prefill"], budget),
        _pool_plan(decode, counts["decode"], standby["decode"], budget),
        policy.one_shape,
    )


def _pool_plan(proposal: Proposal, count: int, standby: int, budget: int | None) -> PoolPlan:
    if count >= proposal.count:
        return PoolPlan(count, standby, proposal.reason, proposal.error, proposal.cause)
    reason = f"{proposal.reason}; {proposal.count} wanted, {count} within a budget of {budget} GPUs"
    return PoolPlan(count, standby, reason, proposal.error, "gpu_budget")


def gpu_budget(policy: ScalingPolicy, snapshot: Snapshot) -> int | None:
    """GPUs for both pools: the policy's budget; else the actuator's inventory and the GPUs of workers that are not
    ours; None: no budget. The GPUs of a worker of role `both` count twice, since it is in both pools."""
    living = [
        (pool, replica)
        for name, pool in policy.pools.items()
        for replica in snapshot.pool(name).replicas
        if replica.state not in LEAVING
    ]
    if policy.gpu_budget is not None:
        counted_twice = {replica.name: pool.gpus_per_replica for pool, replica in living if replica.both}
        return policy.gpu_budget + sum(counted_twice.values())
    if snapshot.gpu_inventory is None:
        return None
    both = {replica.name: pool.gpus_per_replica for pool, replica in living if replica.both and replica.ours}
    others = sum(pool.gpus_per_replica for pool, replica in living if not replica.ours)
    return snapshot.gpu_inventory + sum(both.values()) + others


def _gpus(policy: ScalingPolicy, counts: Counts, standby: Counts = NO_STANDBY) -> int:
    return sum((counts[name] + standby[name]) * pool.gpus_per_replica for name, pool in policy.pools.items())


def _less_standby(policy: ScalingPolicy, counts: Counts, standby: Counts, budget: int) -> Counts:
    """Standby that fits beside the replicas in rotation. The larger standby is reduced first."""
    left = dict(standby)
    while _gpus(policy, counts, left) > budget:
        able = [name for name, pool in policy.pools.items() if left[name] > 0 and pool.gpus_per_replica > 0]
        if not able:
            break
        left[max(able, key=lambda name: left[name])] -= 1
    return left


def _shared(policy: ScalingPolicy, proposals: Proposals, counts: Counts, budget: int) -> Counts:
    """Shares the budget by overload: beyond both minima each next replica goes to the pool with the higher demand over
    capacity, decode first when equal, because a full decode pool delays prefill as well.

    Replicas move from one pool to the other only if that is `WORTH_MOVING`; else the counts stay.
    """
    shares = {name: min(counts[name], proposal.least) for name, proposal in proposals.items()}
    while able := [
        name
        for name in reversed(POOLS)
        if shares[name] < counts[name] and _gpus(policy, {**shares, name: shares[name] + 1}) <= budget
    ]:
        shares[max(able, key=lambda name: _overload(proposals[name], shares[name]))] += 1
    now = {name: proposal.current for name, proposal in proposals.items()}
    moves = {shares[name] > now[name] for name in POOLS if shares[name] != now[name]} == {True, False}
    overload_now, overload = (
        max(_overload(proposals[name], counts[name]) for name in POOLS) for counts in (now, shares)
    )
    if moves and _gpus(policy, now) <= budget and overload_now - overload < WORTH_MOVING * overload_now:
        return now
    return shares


def _overload(proposal: Proposal, count: int) -> float:
    """Demand over the capacity of `count` replicas."""
    return proposal.need / max(count, 1)
