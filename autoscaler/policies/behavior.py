"""Limits how fast a pool follows its recommendations: `behavior` of HorizontalPodAutoscaler v2.

Names, defaults and semantics are those of Kubernetes:
https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/#configurable-scaling-behavior and, where the
page is silent, pkg/controller/podautoscaler/horizontal.go. In that order: recommendations are stabilized, then the
rate of change is limited, then the pool's bounds apply.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic_core import PydanticCustomError

from splitserve.config.base import ConfigModel


def broken_rule(message: str) -> PydanticCustomError:
    """Error of a rule over several fields. The message begins with the name of the field to change."""
    return PydanticCustomError("rule", "{message}", {"message": message})


class PolicyModel(ConfigModel):
    """Base of everything in a policy file."""

    model_config = ConfigDict(allow_inf_nan=False)


class ScalingRule(PolicyModel):
    """One limit: `type: Pods` allows `value` replicas, `type: Percent` that share, in any `periodSeconds`."""

    type: Literal["Pods", "Percent"]
    """Whether `value` is a number of replicas or a percentage of those at the period's start."""
    value: Annotated[int, Field(ge=1, le=1_000_000)]
    """Largest change in a period, in replicas or percent."""
    periodSeconds: Annotated[int, Field(ge=1, le=1800)]
    """Length of the period."""


class ScalingRules(PolicyModel):
    """Limits in one direction. A field that is not given has HPA's default for that direction."""

    stabilizationWindowSeconds: Annotated[int, Field(ge=0, le=3600)] | None = None
    """The most careful recommendation of this many seconds counts: the highest when scaling down, the lowest when
    scaling up. HPA's defaults: 0 up, 300 down."""
    selectPolicy: Literal["Max", "Min", "Disabled"] | None = None
    """Which of several policies counts: the one that allows the most change, the least, or no scaling at all.
    HPA's default: Max."""
    policies: Annotated[tuple[ScalingRule, ...], Field(min_length=1)] | None = None
    """HPA's defaults: up 100 percent or 4 pods in 15 s, down 100 percent in 15 s."""
    tolerance: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Policies of kind `target` keep the count while value / target is within 1 ± this. HPA's default: 0.1."""


class Behavior(PolicyModel):
    """Limits on how a pool grows and shrinks, as in an HPA's `spec.behavior`."""

    scaleUp: ScalingRules = ScalingRules()
    """Limits on growing."""
    scaleDown: ScalingRules = ScalingRules()
    """Limits on shrinking."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits in one direction with every default filled in."""

    window_s: float
    select: Literal["Max", "Min", "Disabled"]
    policies: tuple[ScalingRule, ...]
    tolerance: float


def _rule(kind: Literal["Pods", "Percent"], value: int) -> ScalingRule:
    return ScalingRule(type=kind, value=value, periodSeconds=15)


HPA_UP = Rules(0.0, "Max", (_rule("Percent", 100), _rule("Pods", 4)), 0.1)
HPA_DOWN = Rules(300.0, "Max", (_rule("Percent", 100),), 0.1)


@dataclass(frozen=True, slots=True)
class Limits:
    """Both directions, complete."""

    up: Rules = HPA_UP
    down: Rules = HPA_DOWN

    @classmethod
    def of(cls, given: Behavior, defaults: Limits | None = None) -> Limits:
        """The given behavior, completed by `defaults` (HPA's own unless given)."""
        base = defaults or cls()
        return cls(_filled(given.scaleUp, base.up), _filled(given.scaleDown, base.down))


def _filled(given: ScalingRules, base: Rules) -> Rules:
    window, policies, tolerance = given.stabilizationWindowSeconds, given.policies, given.tolerance
    return Rules(
        base.window_s if window is None else float(window),
        given.selectPolicy or base.select,
        base.policies if policies is None else policies,
        base.tolerance if tolerance is None else tolerance,
    )


@dataclass(frozen=True, slots=True)
class BehaviorMemory:
    """Recommendations and changes inside the windows, oldest first."""

    recommendations: tuple[tuple[float, int], ...] = ()
    """(seconds, replicas), before any limit."""
    changes: tuple[tuple[float, int], ...] = ()
    """(seconds, replicas added; negative where removed)."""


def follow(
    limits: Limits, memory: BehaviorMemory, now_s: float, current: int, wanted: int, low: int, high: int
) -> tuple[int, BehaviorMemory]:
    """The count to go to from `current` replicas when `wanted` are recommended, within [`low`, `high`].

    The caller records the change that it makes with `record_change`. Pure; times in seconds on one clock.
    """
    kept = _since(memory.recommendations, now_s - max(limits.up.window_s, limits.down.window_s))
    stable = _stabilized(limits, kept, now_s, current, wanted)
    kept = (*kept, (now_s, wanted))
    if stable > current:
        allowed = max(current, min(_reached(limits.up, 1, memory.changes, now_s, current), high))
        result = min(stable, allowed)
    elif stable < current:
        allowed = min(current, max(_reached(limits.down, -1, memory.changes, now_s, current), low))
        result = max(stable, allowed)
    else:
        result = current
    return min(max(result, low), high), BehaviorMemory(kept, memory.changes)


def record_change(limits: Limits, memory: BehaviorMemory, now_s: float, added: int) -> BehaviorMemory:
    """The memory after the count changed by `added`, without changes that are older than every period."""
    longest = max((rule.periodSeconds for rule in limits.up.policies + limits.down.policies), default=0)
    changes = _since(memory.changes, now_s - longest)
    return BehaviorMemory(memory.recommendations, (*changes, (now_s, added)) if added else changes)


def _since(entries: tuple[tuple[float, int], ...], cutoff_s: float) -> tuple[tuple[float, int], ...]:
    return tuple(entry for entry in entries if entry[0] > cutoff_s)


def _stabilized(
    limits: Limits, past: tuple[tuple[float, int], ...], now_s: float, current: int, wanted: int
) -> int:
    up = min((count for at_s, count in past if at_s > now_s - limits.up.window_s), default=wanted)
    down = max((count for at_s, count in past if at_s > now_s - limits.down.window_s), default=wanted)
    return min(max(current, min(up, wanted)), max(down, wanted))


def _reached(
    rules: Rules, sign: Literal[1, -1], changes: tuple[tuple[float, int], ...], now_s: float, current: int
) -> int:
    """The count farthest from `current` that the rules allow now: for growing (`sign` 1) or for shrinking (-1)."""
    if rules.select == "Disabled":
        return current
    allowed = []
    for rule in rules.policies:
        at_start = current - sum(added for at_s, added in changes if at_s > now_s - rule.periodSeconds)
        if rule.type == "Pods":
            allowed.append(at_start + sign * rule.value)
        else:
            allowed.append(sign * math.ceil(sign * at_start * (1 + sign * rule.value / 100)))
    return max(allowed) if (rules.select == "Max") == (sign > 0) else min(allowed)
