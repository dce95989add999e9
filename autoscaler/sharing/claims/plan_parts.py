"""What plans of models with classes say of what is shared: room for starts, and reasons for people. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autoscaler.classes.class_demand import ClassedDemand
from autoscaler.classes.search.offer import ClassMix
from autoscaler.plan import Cause, ScalingPlan
from autoscaler.sharing.claims.shared_view import ModelShare, SharedView
from autoscaler.sharing.claims.shares import AMOUNTS, GPUS, MONEY, Rung, Uses, of_class


def with_room(plan: ScalingPlan, shared: SharedView, limited: Iterable[str]) -> ScalingPlan:
    """The plan with what may be started now: what the model has and what nobody has, and of `limited` classes what
    nobody has. Mixes are within its shares; while they change, old and new replicas use what others have not taken
    yet."""
    room = {name: shared.own(name) + shared.free(name) for name in AMOUNTS if name in shared.limits}
    return replace(
        plan,
        budget_per_hour=room.get(MONEY),
        gpu_budget=int(room[GPUS] + 1e-9) if GPUS in room else None,
        class_room={name: int(shared.free(of_class(name)) + 1e-9) for name in limited},
    )


def lacking_notes(got: ModelShare, rung: Rung, shared: SharedView) -> list[str]:
    """Why what a pool must have cannot be, for people."""
    return [
        f"the least of all models takes {shared.limits[name] + lacking:g} {_shown(name)}, and there are "
        f"{shared.limits[name]:g} ({shared.who(name)}): nothing moves for that"
        for name, lacking in sorted(got.lacking.items())
        if rung.uses.get(name)
    ]


def _shown(name: str) -> str:
    """What is limited, for people."""
    return {MONEY: "an hour", GPUS: "GPUs"}.get(name, name.removeprefix(of_class("")))


def bound_by(
    one: ClassedDemand, units: float, mix: ClassMix, left: Uses, shared: SharedView
) -> tuple[str, Cause]:
    """What a pool that was granted so many units gets no more for, for people, and the one of money and GPUs of which
    least is left."""
    limits = shared.limits
    is_short = mix.units < units - 1e-9 or units < one.units - 1e-9
    what = [f"a budget of {limits[MONEY]:g} an hour ({shared.who(MONEY)})"] if MONEY in limits else []
    what += [f"a budget of {limits[GPUS]:g} GPUs ({shared.who(GPUS)})"] if GPUS in limits else []
    names = sorted({offer.name for offer in one.offers if of_class(offer.name) in limits and is_short})
    what += [f"{limits[of_class(name)]:g} {name} ({shared.who(of_class(name))})" for name in names]
    parts = {name: left[name] / max(limits[name], 1e-9) for name in AMOUNTS if name in limits}
    scarcest = min(parts, key=lambda name: parts[name], default=MONEY)
    cause: Cause = "gpu_budget" if scarcest == GPUS else "money_budget"
    return f"{' and '.join(what)} for all models", cause
