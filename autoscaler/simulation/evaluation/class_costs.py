"""What a run under a policy with replica classes costs: replica-hours of each class, from order to end, at its
price."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from autoscaler.policies.policy_file import ScalingPolicy
from autoscaler.simulation.outcome import Outcome
from autoscaler.snapshot import PoolName


@dataclass(frozen=True, slots=True)
class ClassCost:
    """One class of one pool over a run."""

    pool: PoolName
    name: str
    replica_hours: float
    price_per_hour: float
    gpus: int = 0
    """Of one replica."""

    @property
    def money(self) -> float:
        """In the currency of the policy file."""
        return self.replica_hours * self.price_per_hour


@dataclass(frozen=True, slots=True)
class RunCost:
    """All classes; pools without any are not in it."""

    classes: tuple[ClassCost, ...]
    hours: float
    """Length of the run."""

    @property
    def money(self) -> float:
        """Of the whole run."""
        return sum(one.money for one in self.classes)

    @property
    def gpu_hours(self) -> float:
        """Of the whole run."""
        return sum(one.replica_hours * one.gpus for one in self.classes)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "money": round(self.money, 4),
            "money_per_hour": round(self.money / self.hours, 4) if self.hours else None,
            "gpu_hours": round(self.gpu_hours, 4),
            "classes": [
                {
                    "pool": one.pool,
                    "class": one.name,
                    "replica_hours": round(one.replica_hours, 4),
                    "price_per_hour": one.price_per_hour,
                    "money": round(one.money, 4),
                }
                for one in self.classes
            ],
        }

    def lines(self) -> list[str]:
        """For people."""
        parts = [
            f"{one.pool}: {one.replica_hours:.2f} h of {one.name} at {one.price_per_hour:g} = {one.money:.2f}"
            for one in self.classes
        ]
        hour = max(self.hours, 1e-9)
        gpus = f"GPU-hours: {self.gpu_hours:.2f}, {self.gpu_hours / hour:.2f} GPUs on average"
        return [f"bill: {self.money:.2f}, {self.money / hour:.2f} an hour", *parts, gpus]


def speeds_of(policy: ScalingPolicy) -> Mapping[PoolName, Mapping[str, float]]:
    """Speeds by pool and class, the default class first."""
    return {name: pool.speeds for name, pool in policy.pools.items() if pool.classes}


def spot_of(policy: ScalingPolicy) -> Mapping[PoolName, Collection[str]]:
    """Classes on spot machines, by pool."""
    return {name: [one.name for one in pool.classes if one.spot] for name, pool in policy.pools.items()}


def cost_of(outcome: Outcome, policy: ScalingPolicy) -> RunCost | None:
    """The cost of a run of this policy; None where it has no classes."""
    classes = tuple(
        ClassCost(
            name,
            one.name,
            outcome.class_hours[name].get(one.name, 0.0),
            one.price_per_hour,
            one.gpus_or(pool.gpus_per_replica),
        )
        for name, pool in policy.pools.items()
        for one in pool.classes
    )
    return RunCost(classes, outcome.duration_s / 3600) if classes else None
