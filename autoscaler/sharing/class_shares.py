"""What a model with classes may have where several share money, GPUs or machines of a class. Pure.

As `with_classes` does for one model alone, with what others claim. What is wanted is by shares; what may be started now
is what nobody has. Standbys are kept of what nobody claims.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autoscaler.classes.class_demand import ClassedDemand
from autoscaler.classes.class_plan import Granted, demands, planned, with_pool
from autoscaler.classes.mix import ClassMix
from autoscaler.plan import Cause, Proposals, ScalingPlan
from autoscaler.policies.policy_file import ScalingPolicy
from autoscaler.sharing.shared_view import SharedView
from autoscaler.sharing.shares import AMOUNTS, GPUS, MONEY, Rung, Uses, of_class
from autoscaler.snapshot import PoolName, Snapshot


def with_shared_classes(
    policy: ScalingPolicy, snapshot: Snapshot, units: Snapshot, plan: ScalingPlan, proposals: Proposals
) -> ScalingPlan:
    """See `with_classes`."""
    wanted, shared = demands(policy, snapshot, plan, proposals), snapshot.shared
    if not wanted or shared is None:
        return plan
    limits = shared.limits
    names = {one.name for pool in wanted for one in pool.offers if of_class(one.name) in limits}
    limited = {name: int(limits[of_class(name)]) for name in sorted(names)}
    claims = {one.name: one.claim(proposals.pool(one.name), units, limited, GPUS in limits) for one in wanted}
    got = shared.granted(claims)
    rungs = [claim.rungs[at] for claim, at in zip(claims.values(), got.rungs, strict=True)]
    left, mixes = dict(got.left), []
    for one, rung in zip(wanted, rungs, strict=True):
        mix = one.mix(rung.units, *_most(one, rung, left))
        uses = one.shared_uses(mix, limits)
        claims[one.name] = replace(claims[one.name], wanted=uses)
        left = {name: max(0.0, left[name] + rung.uses.get(name, 0.0) - uses.get(name, 0.0)) for name in left}
        mixes.append(mix)
    for one, rung, mix in zip(wanted, rungs, mixes, strict=True):
        standbys = one.standbys(mix, left)
        resting = one.shared_uses(standbys, limits)
        claims[one.name] = replace(claims[one.name], standbys=resting)
        left = {name: amount - resting.get(name, 0.0) for name, amount in left.items()}
        limit, cause = _bound(one, rung, mix, got.left, shared)
        given = Granted(rung.units, mix, standbys, limit, cause)
        plan = with_pool(plan, one.name, planned(one, plan.pool(one.name), given))
    plan = _giving_way(plan, shared.gives_way(claims, got))
    # Mixes are within its shares. While they change, old and new replicas use what others have not taken yet.
    room = {name: shared.own(name) + shared.free(name) for name in AMOUNTS if name in limits}
    return replace(
        plan,
        budget_per_hour=room.get(MONEY),
        gpu_budget=int(room[GPUS] + 1e-9) if GPUS in room else None,
        class_room={name: int(shared.free(of_class(name)) + 1e-9) for name in limited},
        claims=claims,
        worth_moving=got.worth_moving,
    )


def _most(one: ClassedDemand, rung: Rung, left: Uses) -> tuple[float | None, dict[str, float], float | None]:
    """Money, replicas by class and GPUs that a mix may take: what its rung takes, and what nobody claims."""
    able = {name: rung.uses.get(name, 0.0) + amount for name, amount in left.items()}
    most = {offer.name: able[of_class(offer.name)] for offer in one.offers if of_class(offer.name) in able}
    return able.get(MONEY), most, able.get(GPUS)


def _bound(
    one: ClassedDemand, rung: Rung, mix: ClassMix, left: Uses, shared: SharedView
) -> tuple[str, Cause]:
    """What the pool gets no more for, for people, and the one of money and GPUs of which least is left."""
    limits = shared.limits
    is_short = mix.units < rung.units - 1e-9 or rung.units < one.units - 1e-9
    what = [f"a budget of {limits[MONEY]:g} an hour ({shared.who(MONEY)})"] if MONEY in limits else []
    what += [f"a budget of {limits[GPUS]:g} GPUs ({shared.who(GPUS)})"] if GPUS in limits else []
    names = sorted({offer.name for offer in one.offers if of_class(offer.name) in limits and is_short})
    what += [f"{limits[of_class(name)]:g} {name} ({shared.who(of_class(name))})" for name in names]
    parts = {name: left[name] / limits[name] for name in AMOUNTS if name in limits}
    scarcest = min(parts, key=lambda name: parts[name], default=MONEY)
    cause: Cause = "gpu_budget" if scarcest == GPUS else "money_budget"
    return f"{' and '.join(what)} for all models", cause


def _giving_way(plan: ScalingPlan, given_way: Mapping[PoolName, str]) -> ScalingPlan:
    for name, of in given_way.items():
        pool = plan.pool(name)
        kind = next(share.name for share in pool.mix if of_class(share.name) == of)
        note = f"one {kind} ends first: another pool waits for it, and has what this one waits for"
        plan = with_pool(plan, name, replace(pool, gives=kind, reason=f"{pool.reason}; {note}"))
    return plan
