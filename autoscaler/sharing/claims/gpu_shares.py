"""How many GPUs a model without classes may have where several share an inventory. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoscaler.classes.class_demand import MOST_RUNGS, expected_shares, weight_of
from autoscaler.plan import Proposals, joint_plan
from autoscaler.policies.policy_file import AnyPool, ScalingPolicy
from autoscaler.sharing.claims.shared_view import GpuShare
from autoscaler.sharing.claims.shares import GPUS, Claim, Rung
from autoscaler.snapshot import LEAVING, PoolName, Snapshot


def gpu_claims(policy: ScalingPolicy, snapshot: Snapshot, proposals: Proposals) -> dict[PoolName, Claim]:
    """The claims of both pools, for all that they want without a budget for several models; none without a limit on
    GPUs that is shared."""
    shared = snapshot.shared
    if shared is None or GPUS not in shared.limits or any(pool.classes for pool in policy.pools.values()):
        return {}  # units are no GPUs
    wanted = joint_plan(
        policy, replace(snapshot, gpu_inventory=None), proposals.prefill, proposals.decode, False
    )
    return {
        name: _claim(name, pool, snapshot, proposals, wanted.pool(name).desired)
        for name, pool in policy.pools.items()
    }


def gpu_share(policy: ScalingPolicy, snapshot: Snapshot, claims: Mapping[PoolName, Claim]) -> GpuShare | None:
    """What the model may have by its share; None where none is limited. What others still have it may not start."""
    shared = snapshot.shared
    if shared is None or not claims:
        return None
    got = shared.granted(claims)
    mine = sum(claim.rungs[at].uses[GPUS] for claim, at in zip(claims.values(), got.rungs, strict=True))
    live = sum(shared.live.get((shared.model, name), {}).get(GPUS, 0.0) for name in policy.pools)
    gpus = min(mine + got.left[GPUS], live + shared.free(GPUS))
    others = sum(pool.gpus_per_replica * _others(name, snapshot) for name, pool in policy.pools.items())
    return GpuShare(
        int(gpus + 1e-9) + others,
        f", of {shared.limits[GPUS]:g} for all models ({shared.who(GPUS)})",
        got.worth_moving,
    )


def _claim(name: PoolName, pool: AnyPool, snapshot: Snapshot, proposals: Proposals, wanted: int) -> Claim:
    proposal = proposals.pool(name)
    least = min(wanted, proposal.least)
    stride = max(1, -(-(wanted - least) // MOST_RUNGS))
    counts = [*range(least, wanted, stride), wanted]
    served = [min(1.0, count / proposal.need) if proposal.need > 0 else 1.0 for count in counts]
    shares = expected_shares(name, pool, snapshot, counts) or served
    rungs = zip(counts, shares, served, strict=True)
    each, others = pool.gpus_per_replica, _others(name, snapshot)
    return Claim(
        tuple(
            Rung(float(count), {GPUS: float(max(0, count - others) * each)}, kept, part)
            for count, kept, part in rungs
        ),
        weight_of(snapshot),
    )


def _others(name: PoolName, snapshot: Snapshot) -> int:
    """Replicas that the actuator does not have: they run on GPUs of others."""
    return sum(not one.ours and one.state not in LEAVING for one in snapshot.pool(name).replicas)
