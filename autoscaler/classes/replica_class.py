"""Replica classes in the policy file: their fields and rules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from autoscaler.classes.on_demand_floor import NO_FLOOR, OnDemandFloor, checked_floor
from autoscaler.policies.behavior import PolicyModel, broken_rule
from autoscaler.sizing.class_speeds import DEFAULT_TOKENS, MAX_CLASSES, MOST_TOKENS
from splitserve.config.autoscaler import ReplicaClassName

_KIND = r"[A-Za-z0-9][A-Za-z0-9 .,+()/_-]*"
GpuLimits = Annotated[
    Mapping[
        Annotated[str, Field(max_length=64, pattern=f"^{_KIND}$")], Annotated[int, Field(ge=1, le=100_000)]
    ],
    Field(max_length=16),
]
"""GPUs by kind."""


class ReplicaClass(PolicyModel):
    """One class of replicas of a pool."""

    name: ReplicaClassName
    """Its name: 1 to 32 of a-z, 0-9 and inner dashes. Workers report it (`replica_class`); Docker finds the container
    to copy by its label `splitserve.class`, Kubernetes the workload by its name."""
    gpu: Annotated[str, Field(max_length=64, pattern=f"^({_KIND})?$")] = ""
    """The kind of its GPUs: words of what the driver calls them, such as "H100", "A100 80GB" or, for slices,
    "MIG 3g.40gb" (docs/gpus.md). On Docker and under `splitserve up` it gets only such. Default: any. On Kubernetes,
    and where no GPUs are given out, it is for people."""
    gpus_per_replica: Annotated[int, Field(ge=0, le=64)] | None = None
    """GPUs of one replica. Default: the pool's `gpus_per_replica`."""
    price_per_hour: Annotated[float, Field(ge=0, le=1e6)]
    """Money that one replica costs for an hour, with all its GPUs, in the currency of `budget_per_hour`."""
    speed: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """How many replicas of the slowest class, which has 1, do its work: by prompt tokens a second in prefill, in
    decode by output tokens a second with which each stream keeps `target_ms`."""
    engine_model: Path | None = None
    """In place of `speed`: a JSON file with the engine model of its replicas, as `--engine-model` takes it
    (docs/plan.md), from the folder of the policy file on. All classes of the pool have one then, or none."""
    max_replicas: Annotated[int, Field(ge=1, le=1000)] = 8
    """Never more of this class, but for those that drain; of neutral workers on both sides together."""
    spot: bool = False
    """Whether its machines may be taken away at short notice. See `on_demand_floor`."""
    worker_options: tuple[Annotated[str, Field(max_length=256)], ...] = ()
    """Under `splitserve up`: options that its workers are started with beside those of the cluster, such as
    `[--engine.threads, "2"]`."""

    @model_validator(mode="after")
    def _has_its_speed(self) -> ReplicaClass:
        if self.engine_model is not None and "speed" not in self.model_fields_set:
            raise broken_rule("engine_model is for policies that are read from files")
        return self

    def gpus_or(self, of_pool: int) -> int:
        """GPUs of one replica, where those of the pool have so many."""
        return of_pool if self.gpus_per_replica is None else self.gpus_per_replica


class ClassedPool(PolicyModel):
    """The part of a pool's settings that is about classes."""

    classes: Annotated[tuple[ReplicaClass, ...], Field(max_length=MAX_CLASSES)] = ()
    """Classes of replicas, the default one first: workers that report no class, or one that is not listed, count as
    that. The cheapest mix of them is started. Counts of the pool (`min_replicas`, `max_replicas`, `schedule`) are
    then replicas of speed 1. Neutral workers have the same classes in both pools, each with a `speed` in each. Default:
    all replicas are alike, and have no price."""
    on_demand_floor: Annotated[int | str, BeforeValidator(checked_floor)] = 0
    """Of the units that are wanted so many are always of classes without `spot`: a number, or a share such as `25%`,
    rounded up."""
    payback_s: Annotated[float, Field(gt=0, le=31 * 86_400)] = 1800.0
    """A replica is replaced by one of another class only where that saves more in this time than the start costs."""
    longest_prompt_tokens: Annotated[int, Field(ge=1, le=2**24)] | None = None
    """Prefill: a class that computes a prompt of this length, uncached, for longer than `target_ms` is not used.
    Default: the longest mean prompt of the recorded arrivals."""
    speed_at_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] = DEFAULT_TOKENS
    """Tokens of a prompt (prefill), or of the context of each stream (decode), at which the `engine_model`s of classes
    are compared."""

    @model_validator(mode="after")
    def _classes_fit(self) -> ClassedPool:
        names = [one.name for one in self.classes]
        if twice := [name for name in names if names.count(name) > 1]:
            raise broken_rule(f"classes must have different names: {twice[0]} is there twice")
        if names and min(one.speed for one in self.classes) != 1:
            raise broken_rule(
                "classes must have one of speed 1, the slowest: the pool's counts are replicas of it"
            )
        self._check_floor()
        return self

    def _check_floor(self) -> None:
        floor, plain = self.floor, [one for one in self.classes if not one.spot]
        if floor == NO_FLOOR:
            return
        if not plain:
            raise broken_rule(f"on_demand_floor ({floor}) needs classes, and one of them without spot")
        most = sum(one.speed * one.max_replicas for one in plain)
        if floor.units > most:
            raise broken_rule(
                f"on_demand_floor ({floor}) must be at most what the classes without spot give: {most:g}"
            )

    @property
    def floor(self) -> OnDemandFloor:
        """`on_demand_floor`."""
        return OnDemandFloor.of(self.on_demand_floor)

    @property
    def speeds(self) -> Mapping[str, float]:
        """By name of the class."""
        return {one.name: one.speed for one in self.classes}

    def class_named(self, name: str) -> ReplicaClass:
        """The class that a worker is of which reports this name; the pool must have classes."""
        return next((one for one in self.classes if one.name == name), self.classes[0])


class BudgetedPolicy(PolicyModel):
    """The part of a policy that is about what its classes may take together."""

    gpu_limits: GpuLimits = Field(default_factory=dict)
    """GPUs of a kind that both pools may take together, by words of the driver's name for it as in `gpu` of a class:
    all classes count whose `gpu` has these words, whatever number each of their replicas takes. It needs `classes` in
    both. Default: no bound."""

    budget_per_hour: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Money for an hour that both pools may cost together, replicas that start or drain included. It needs `classes` in
    both. Default: no bound."""
