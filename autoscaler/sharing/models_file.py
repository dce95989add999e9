"""The file of models that share one inventory: their policies, and what all of them may have together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from autoscaler.classes.class_rules import least_price_of_neutral, least_price_per_hour
from autoscaler.classes.replica_class import GpuLimits
from autoscaler.policies.policy_file import ScalingPolicy
from autoscaler.shadows.shadow import MAX_SHADOWS
from autoscaler.sharing.claims.shares import GPUS, MONEY, counted_in, of_class, of_kind
from splitserve.config.autoscaler import ReplicaClassName, Workload
from splitserve.config.base import Settings
from splitserve.config.yaml_file import read_yaml_file
from splitserve.errors import ConfigError, InvalidArgumentError

MAX_MODELS = 16


class ScaledModel(Settings):
    """One model."""

    name: Annotated[str, Field(pattern=r"^\S{1,128}$")]
    """The model as its workers serve it (`--served-model-name`)."""
    policy: Path
    """Its policy file; a relative path begins at the folder of this file."""
    history_file: Path | None = None
    """As the autoscaler's setting of this name, for this model; relative likewise."""
    shadow: Annotated[tuple[Path, ...], Field(max_length=MAX_SHADOWS)] = ()
    """Policy files that decide beside `policy` on what the model may have, and are never acted on; relative likewise.
    Each is named after its file."""
    prefill_workload: Workload | None = None
    """On Kubernetes: workload of its prefill pool, kind and name."""
    decode_workload: Workload | None = None
    """On Kubernetes: workload of its decode pool."""


class SharedModels(Settings):
    """The whole file."""

    models: Annotated[tuple[ScaledModel, ...], Field(min_length=1, max_length=MAX_MODELS)]
    """The models; changing them needs a restart."""
    budget_per_hour: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Money for an hour that all replicas of all models may cost together, those that start or drain included. It needs
    `classes` in both pools of each model. Default: no bound."""
    gpu_budget: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """GPUs that all models may have together, of whatever kind; a replica of a class counts those of its class. A
    policy with `classes` in one pool must have them in both. Default: no bound for models with `classes`; those of
    the actuator for the others."""
    gpu_limits: GpuLimits = Field(default_factory=dict)
    """GPUs of a kind that all models may have together, by words of the driver's name for it as in `gpu` of a class:
    as many as the inventory has. All classes count whose `gpu` has these words. It needs `classes` in both pools of
    each model. Default: no bound."""
    class_limits: Annotated[
        Mapping[ReplicaClassName, Annotated[int, Field(ge=1, le=10_000)]], Field(max_length=16)
    ] = {}
    """Replicas of a class that all models may have together, by its name in their policies: as many as the inventory
    has machines for. Default: no bound but the `max_replicas` of each policy."""
    move_after_s: Annotated[float, Field(ge=0, le=86_400)] = 30.0
    """What a model has and wants is taken for another one only once that was clearly better for all together for so
    long."""

    @model_validator(mode="after")
    def _is_each_once(self) -> Self:
        counts = Counter(model.name for model in self.models)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"model {twice[0]} is there twice")
        histories = Counter(model.history_file for model in self.models if model.history_file is not None)
        if again := [file for file, count in histories.items() if count > 1]:
            raise ValueError(f"history_file {again[0]} is there twice: each model needs its own")
        return self

    @property
    def limits(self) -> dict[str, float]:
        """What the account limits."""
        money = {} if self.budget_per_hour is None else {MONEY: self.budget_per_hour}
        gpus = {} if self.gpu_budget is None else {GPUS: float(self.gpu_budget)}
        gpus |= {of_kind(kind): float(most) for kind, most in self.gpu_limits.items()}
        return money | gpus | {of_class(name): float(most) for name, most in self.class_limits.items()}


@dataclass(slots=True)
class ModelsInForce:
    """The file as it was taken last."""

    value: SharedModels


def load_models(path: Path) -> SharedModels:
    """Reads the file; paths in it become paths from here. Raises ConfigError naming file, line and field."""
    file = read_yaml_file(path, "models")
    with file.naming_lines():
        try:
            found = file.validated(SharedModels, "models")
        except ConfigError:
            raise
        except InvalidArgumentError as error:
            raise ConfigError(f"models: {error.message}", field=error.field or "models") from None
    folder = path.absolute().parent
    return found.model_copy(update={"models": tuple(_from(folder, model) for model in found.models)})


def _from(folder: Path, model: ScaledModel) -> ScaledModel:
    history = None if model.history_file is None else folder / model.history_file
    shadow = tuple(folder / path for path in model.shadow)
    return model.model_copy(
        update={"policy": folder / model.policy, "history_file": history, "shadow": shadow}
    )


def check_shared(shared: SharedModels, policies: Mapping[str, ScalingPolicy]) -> None:
    """Raises ConfigError where the policies do not fit what they share."""
    for model, rules in policies.items():
        check_policy(shared, model, rules)
    least = sum(least_uses(rules).get(MONEY, 0.0) for rules in policies.values())
    if shared.budget_per_hour is not None and least > shared.budget_per_hour:
        raise _broken(
            "budget_per_hour",
            f"({shared.budget_per_hour:g}) must hold min_replicas and warm_standby of all models, with their "
            f"on_demand_floor: {least:g}",
        )
    gpus = sum(rules.least_gpus for rules in policies.values())
    if shared.gpu_budget is not None and gpus > shared.gpu_budget:
        raise _broken(
            "gpu_budget",
            f"({shared.gpu_budget}) must hold min_replicas and warm_standby of all models: {gpus}",
        )
    known = {one.name for rules in policies.values() for pool in rules.pools.values() for one in pool.classes}
    if strange := sorted(set(shared.class_limits) - known):
        raise _broken("class_limits", f"names {strange[0]}, which is a class of no policy")
    named = [one.gpu for rules in policies.values() for pool in rules.pools.values() for one in pool.classes]
    for kind in shared.gpu_limits:
        if not any(counted_in(gpu, (of_kind(kind),)) for gpu in named):
            raise _broken("gpu_limits", f"names {kind}, which is the gpu of no class of a policy")


def check_policy(shared: SharedModels, model: str, rules: ScalingPolicy) -> None:
    """Raises ConfigError where one policy, in force or in the shadow, does not fit what is shared."""
    if rules.budget_per_hour is not None:
        raise _broken("budget_per_hour", f"belongs into the file of models, not into the policy of {model}")
    if rules.gpu_limits:
        raise _broken("gpu_limits", f"belong into the file of models, not into the policy of {model}")
    if shared.gpu_limits and not all(pool.classes for pool in rules.pools.values()):
        raise _broken("gpu_limits", f"need classes in both pools of the policy of {model}")
    if rules.gpu_budget is not None and any(pool.classes for pool in rules.pools.values()):
        raise _broken(
            "gpu_budget",
            f"({rules.gpu_budget}) of the policy of {model} is for one model alone with classes: it belongs into the "
            "file of models",
        )
    classed = [name for name, pool in rules.pools.items() if pool.classes]
    if shared.gpu_budget is not None and len(classed) == 1:
        raise _broken(
            "gpu_budget",
            f"({shared.gpu_budget}) needs classes in both pools or in none: in the policy of {model} {classed[0]} has "
            "some",
        )
    for name, pool in rules.pools.items():
        if shared.budget_per_hour is not None and not pool.classes:
            raise _broken(
                "budget_per_hour",
                f"({shared.budget_per_hour:g}) needs {name}.classes with their prices in the policy of {model}",
            )


def least_uses(rules: ScalingPolicy, limits: Container[str] = ()) -> dict[str, float]:
    """What a model must be able to have: that of its fewest replicas that can serve. GPUs of classes only where they
    are among `limits`."""
    pools = list(rules.pools.values())
    classed = [pool for pool in pools if pool.classes]
    gpus = {GPUS: float(rules.least_gpus)} if GPUS in limits or not classed else {}
    if len(classed) < len(pools):
        return gpus
    price = least_price_of_neutral if rules.workers == "neutral" else least_price_per_hour
    return {MONEY: price(pools, rules.least_awake)} | gpus


def _broken(field: str, text: str) -> ConfigError:
    return ConfigError(f"{field} {text}", field=field)


def check_same_models(before: SharedModels, after: SharedModels) -> None:
    """Raises ConfigError where a file that is read again names other models or files of theirs."""
    if before.models != after.models:
        raise _broken("models", "are others than at the start: that needs a restart")


def check_workloads(workloads: Mapping[str, tuple[str, str]], classes: Sequence[str] = ()) -> None:
    """Raises ConfigError where two models, or two pools, have one workload on Kubernetes: two hands on one count fight.
    `workloads`: of prefill and decode, by model; with `classes` each has one more for each of them."""
    endings = ("", *(f"-{name}" for name in classes))
    names = {model: [one + ending for one in pair for ending in endings] for model, pair in workloads.items()}
    counts = Counter(workload for own in names.values() for workload in own)
    for model, own in names.items():
        if twice := [workload for workload in own if counts[workload] > 1]:
            message = (
                f"must have workloads of their own, and {twice[0]} of {model} is another's too: give each "
                "prefill_workload and decode_workload"
            )
            raise _broken("models", message)
