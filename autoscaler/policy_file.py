"""The policy file: one YAML that says how each pool scales. Validated, frozen, documented field by field."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from autoscaler.behavior import HPA_DOWN, HPA_UP, Behavior, Limits, PolicyModel, Rules, ScalingRule
from autoscaler.schedule import ScheduleWindow
from autoscaler.slo_tuning import SloTuning
from splitserve.config import read_settings_file
from splitserve.errors import ConfigError


def broken_rule(message: str) -> PydanticCustomError:
    """The error of a rule over several fields. Its message begins with the name of the field to change."""
    return PydanticCustomError("rule", "{message}", {"message": message})


Percentile = Annotated[float, Field(gt=0, lt=100)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


class Pool(PolicyModel):
    """What every kind of policy has."""

    min_replicas: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Never fewer in rotation."""
    max_replicas: Annotated[int, Field(ge=1, le=10_000)] = 8
    """Never more in rotation."""
    gpus_per_replica: Annotated[int, Field(ge=0, le=64)] = 1
    """GPUs that one replica takes from `gpu_budget`; 0: none, as on a machine without GPUs."""
    warm_standby: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Replicas beside those in rotation that are loaded and connected already. They join at once and take GPUs."""
    drain_s: Annotated[float, Field(ge=0, le=86_400)] = 120.0
    """How long a replica that leaves may take to end its requests; then they resume elsewhere and it is stopped."""
    cold_start_s: Seconds = 60.0
    """From the order to start a replica until it is ready, while none was measured."""
    schedule: tuple[ScheduleWindow, ...] = ()
    """Windows with a floor of their own, whatever the kind; all that `kind: schedule` follows."""
    behavior: Behavior = Behavior()
    """How fast the count may change, as in an HPA. The kinds `slo` and `predictive` have defaults of their own for
    what is not given here: growing is not slowed down, shrinking waits for `slo.scale_down_cold_starts`."""

    @model_validator(mode="after")
    def _ordered(self) -> Pool:
        if self.max_replicas < self.min_replicas:
            raise broken_rule(
                f"max_replicas ({self.max_replicas}) must be at least min_replicas ({self.min_replicas})"
            )
        return self

    def limits(self, cold_start_s: float) -> Limits:
        """`behavior` with its defaults filled in."""
        return Limits.of(self.behavior)


class SloPool(Pool):
    """Sized by the demand that arrives, trimmed by the latency that is measured. The default."""

    kind: Literal["slo"] = "slo"
    """Which policy."""
    signal: Literal["ttft", "tpot"] | None = None
    """The latency that the pool answers for: `ttft` for prefill, `tpot` for decode, which are also the defaults."""
    target_ms: Annotated[float, Field(gt=0, le=3_600_000)]
    """What the percentile of that latency shall not exceed."""
    percentile: Percentile = 95.0
    """Percentile of requests that shall meet the target."""
    slo: SloTuning = SloTuning()
    """Section `slo`: how the policy judges demand. The defaults are meant to do."""

    def limits(self, cold_start_s: float) -> Limits:
        """`behavior`, where it is silent: up in one go, down after `slo.scale_down_cold_starts`."""
        at_once = Rules(
            0.0, "Max", (ScalingRule(type="Pods", value=10_000, periodSeconds=1),), HPA_UP.tolerance
        )
        window_s = min(3600.0, self.slo.scale_down_cold_starts * cold_start_s)
        down = Rules(window_s, "Max", HPA_DOWN.policies, HPA_DOWN.tolerance)
        return Limits.of(self.behavior, Limits(at_once, down))


class TargetPool(Pool):
    """The HPA formula: ceil(ready replicas * value / target), on any metric."""

    kind: Literal["target"]
    """Which policy."""
    metric: str
    """`ttft` or `tpot` (that percentile, in ms), `backlog_tokens`, `utilization` (share of the pool's capacity in
    use, 0 to 1), or the name of another exported metric."""
    target: Annotated[float, Field(gt=0)]
    """Value of the metric that the pool is kept at."""
    target_type: Literal["Value", "AverageValue"] = "Value"
    """`AverageValue` divides the metric by the number of replicas first, as an HPA does."""
    percentile: Percentile = 95.0
    """Percentile of `ttft` and `tpot`."""


class SchedulePool(Pool):
    """`min_replicas`, and more in the windows of `schedule`."""

    kind: Literal["schedule"]
    """Which policy."""


class PredictivePool(SloPool):
    """As `slo`, and never below what a seasonal forecast of the demand needs one cold start from now.

    Needs `pip install 'splitserve[predictive]'`.
    """

    kind: Literal["predictive"]  # type: ignore[assignment]
    """Which policy."""
    season_s: Annotated[float, Field(ge=60, le=31 * 86_400)] = 86_400.0
    """Length of the season that repeats: a day."""
    interval_s: Annotated[float, Field(ge=1, le=86_400)] = 900.0
    """Demand is averaged over so long before it is forecast. At least four times in a season."""
    forecast_percentile: Annotated[float, Field(ge=50, lt=100)] = 80.0
    """Percentile of the forecast's own error that is covered."""

    @model_validator(mode="after")
    def _enough_intervals(self) -> PredictivePool:
        if self.season_s < 4 * self.interval_s:
            raise broken_rule(
                f"interval_s ({self.interval_s:g}) must be at most season_s / 4 ({self.season_s / 4:g})"
            )
        return self


def _kind_of(value: Any) -> str:
    if isinstance(value, Pool):
        return str(value.model_dump()["kind"])
    return str(value.get("kind", "slo")) if isinstance(value, dict) else "slo"


AnyPool = Annotated[
    Annotated[SloPool, Tag("slo")]
    | Annotated[TargetPool, Tag("target")]
    | Annotated[SchedulePool, Tag("schedule")]
    | Annotated[PredictivePool, Tag("predictive")],
    Discriminator(
        _kind_of,
        custom_error_type="kind",
        custom_error_message="kind must be slo, target, schedule or predictive",
    ),
]


class Ratio(PolicyModel):
    """Bounds on prefill replicas for each decode replica. They only ever add replicas, never take needed ones away."""

    min_prefill_per_decode: Annotated[float, Field(ge=0, le=1000)] | None = None
    """At least so many prefill replicas a decode replica. Default: no bound."""
    max_prefill_per_decode: Annotated[float, Field(gt=0, le=1000)] | None = None
    """At most so many prefill replicas a decode replica. Default: no bound."""

    @model_validator(mode="after")
    def _ordered(self) -> Ratio:
        low, high = self.min_prefill_per_decode, self.max_prefill_per_decode
        if low is not None and high is not None and low > high:
            raise broken_rule(
                f"max_prefill_per_decode ({high:g}) must be at least min_prefill_per_decode ({low:g})"
            )
        return self


class ScalingPolicy(PolicyModel):
    """The whole file."""

    gpu_budget: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """GPUs that both pools may take together, standby included. Default: what the actuator's inventory gives."""
    interval_s: Annotated[float, Field(gt=0, le=3600)] = 5.0
    """Time between decisions."""
    prefill: AnyPool
    """Section `prefill`: the pool that answers for queue and compute of prompts."""
    decode: AnyPool
    """Section `decode`: the pool that answers for the time per output token and for room for KV."""
    ratio: Ratio = Ratio()
    """Section `ratio`."""
    link_gb_per_s: Annotated[float, Field(gt=0, le=100_000)] | None = None
    """GB/s (10^9 bytes) of a link that the KV of all prefill replicas shares; more of them than it carries add
    nothing. Default: every prefill replica has a lane of its own, whose speed is measured."""
    lend_decode: bool = True
    """Let decode workers compute prompts themselves while prefill replicas start, when that is sooner."""

    @model_validator(mode="after")
    def _consistent(self) -> ScalingPolicy:
        for name, pool, signal in (("prefill", self.prefill, "ttft"), ("decode", self.decode, "tpot")):
            if isinstance(pool, SloPool) and pool.signal not in (None, signal):
                raise broken_rule(f"{name}.signal must be {signal}: no other pool can improve it")
        if self.gpu_budget is not None and self.least_gpus > self.gpu_budget:
            raise broken_rule(
                f"gpu_budget ({self.gpu_budget}) must hold min_replicas and warm_standby of both pools: "
                f"{self.least_gpus}"
            )
        return self

    @property
    def least_gpus(self) -> int:
        """GPUs of both pools at their smallest."""
        pools = (self.prefill, self.decode)
        return sum((pool.min_replicas + pool.warm_standby) * pool.gpus_per_replica for pool in pools)


def load_policy(path: Path) -> ScalingPolicy:
    """The policy in this YAML file. Raises ConfigError naming the first bad field and its bound."""
    return parse_policy(read_settings_file(path))


def parse_policy(values: dict[str, Any]) -> ScalingPolicy:
    """The policy in this mapping. Raises ConfigError naming the first bad field and its bound."""
    try:
        return ScalingPolicy.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        # A block's tag (its kind) stands in the location beside the block's name; nobody wrote it there.
        where = [
            str(part) for index, part in enumerate(first["loc"]) if not (index == 1 and _is_tag(first["loc"]))
        ]
        field = ".".join(where) or "policy"
        if first["type"] == "rule":
            field, message = _named_in(field, first["msg"])
        elif first["type"] == "value_error":
            message = f"{field}: {first['msg'].removeprefix('Value error, ')}"
        else:
            given = "" if first["type"] == "missing" else f" (given: {first.get('input')!r})"
            message = f"{field}: {first['msg']}{given}"
        raise ConfigError(message, field=field) from None


def _is_tag(location: tuple[int | str, ...]) -> bool:
    return location[0] in ("prefill", "decode") and location[1] in ("slo", "target", "schedule", "predictive")


def _named_in(block: str, message: str) -> tuple[str, str]:
    """Field and text of a rule over several fields; its message begins with the field's name."""
    field = message.split(maxsplit=1)[0]
    full = field if block == "policy" else f"{block}.{field}"
    return full, f"{full}{message.removeprefix(field)}"
