"""What plans of models with classes say of what is shared: room for starts, and reasons for people. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autoscaler.classes.class_demand import ClassedDemand
from autoscaler.classes.search.offer import ClassMix
from autoscaler.plan import Cause, ScalingPlan
from autoscaler.sharing.claims.shared_view import ModelShare, SharedView
from autoscaler.sharing.claims.shares import (
    GPUS,
    MONEY,
    Rung,
    Uses,
    amounts_in,
    kinds_in,
    limit_text,
    of_class,
    unit_of,
)


def with_room(plan: ScalingPlan, shared: SharedView, limited: Iterable[str]) -> ScalingPlan:
    """The plan with what may be started now: what the model has and what nobody has, and of `limited` classes what
    nobody has. Mixes are within its shares; while they change, old and new replicas use what others have not taken
    yet."""
    room = {name: shared.own(name) + shared.free(name) for name in amounts_in(shared.limits)}
    return replace(
        plan,
        budget_per_hour=room.get(MONEY),
        gpu_budget=int(room[GPUS] + 1e-9) if GPUS in room else None,
        gpu_limits={name: int(room[name] + 1e-9) for name in kinds_in(room)},
        class_room={name: int(shared.free(of_class(name)) + 1e-9) for name in limited},
    )


def lacking_notes(got: ModelShare, rung: Rung, shared: SharedView) -> list[str]:
    """Why what a pool must have cannot be, for people."""
    return [
        f"the least of all models takes {shared.limits[name] + lacking:g} {unit_of(name)}, and there are "
        f"{shared.limits[name]:g} ({shared.who(name)}): nothing moves for that"
        for name, lacking in sorted(got.lacking.items())
        if rung.uses.get(name)
    ]


def bound_by(
    one: ClassedDemand, units: float, mix: ClassMix, left: Uses, shared: SharedView
) -> tuple[str, Cause]:
    """What a pool that was granted so many units gets no more for, for people, and the one of money and GPUs of which
    least is left."""
    limits = shared.limits
    is_short = mix.units < units - 1e-9 or units < one.units - 1e-9
    of_kinds = {name for offer in one.offers for name in offer.kinds}
    amounts = [name for name in (MONEY, GPUS, *sorted(of_kinds)) if name in limits]
    places = sorted({of_class(offer.name) for offer in one.offers} & set(limits)) if is_short else []
    what = [f"{limit_text(name, limits[name])} ({shared.who(name)})" for name in (*amounts, *places)]
    parts = {name: left[name] / max(limits[name], 1e-9) for name in amounts}
    scarcest = min(parts, key=lambda name: parts[name], default=MONEY)
    cause: Cause = "money_budget" if scarcest == MONEY else "gpu_budget"
    return f"{' and '.join(what)} for all models", cause
