"""The policy file: one YAML that says how each pool scales. Validated, frozen, documented field by field."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from reprlib import Repr
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError, model_validator

from autoscaler.policies.behavior import (
    HPA_DOWN,
    HPA_UP,
    Behavior,
    Limits,
    PolicyModel,
    Rules,
    ScalingRule,
    broken_rule,
)
from autoscaler.policies.schedule import ScheduleWindow
from splitserve.config.yaml_file import YamlFile, read_yaml_file, what_is_wrong
from splitserve.errors import ConfigError
from splitserve.gpus.inventory import is_slices
from splitserve.roles import POOLS, PoolName

MOST_BYTES = 1 << 20
"""Largest policy file: parsing YAML takes about ten seconds a MiB."""
MOST_REPLICAS = 10_000
"""The largest bound of a pool."""


def _percent(value: Any) -> Any:
    if isinstance(value, float) and 0 < value < 1:
        raise ValueError(f"is in percent: {100 * value:g} is the {100 * value:g}th percentile, not {value:g}")
    return value


Percentile = Annotated[float, Field(ge=1, lt=100), BeforeValidator(_percent)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


class PoolPolicy(PolicyModel):
    """Settings of every kind of policy."""

    min_replicas: Annotated[int, Field(ge=0, le=MOST_REPLICAS)] = 1
    """Fewest replicas in rotation. 0: the pool goes to zero after `idle_s` without requests; the next request starts it
    again and waits for it. See "From and to zero" in docs/guides/autoscaling.md."""
    max_replicas: Annotated[int, Field(ge=1, le=MOST_REPLICAS)] = 8
    """Most replicas in rotation."""
    gpus_per_replica: Annotated[int, Field(ge=0, le=64)] = 1
    """GPUs that one replica takes from `gpu_budget`. Docker and `splitserve up` assign them, preferably GPUs that share
    NVLink (docs/guides/gpus.md); 0: none, as on a machine without GPUs. On Kubernetes the pod's limits must say the
    same. vLLM's tensor parallel size, where it is given, must be equal to it; the torch engine takes one."""
    gpu: Annotated[str, Field(max_length=64, pattern=r"^([A-Za-z0-9][A-Za-z0-9 .,+()/_-]*)?$")] = ""
    """The kind of the GPUs: a part of the driver's name for them, such as "H100", "A100 80GB" or, for slices,
    "MIG 3g.40gb" (docs/guides/gpus.md). Docker and `splitserve up` assign only GPUs of this kind. Default: any. On
    Kubernetes, and where no GPUs are assigned, it has no effect."""
    warm_standby: Annotated[int, Field(ge=0, le=MOST_REPLICAS)] = 0
    """Replicas that are loaded and connected, but out of rotation. They join at once and occupy GPUs."""
    drain_s: Annotated[float, Field(ge=0, le=86_400)] = 120.0
    """How long a draining replica may take to finish its requests; then they resume elsewhere and it is stopped."""
    cold_start_s: Seconds = 60.0
    """Time from the order of a replica until it is ready; used until one is measured."""
    start_deadline_cold_starts: Annotated[float, Field(ge=1, le=1000)] = 5.0
    """A replica that is not ready after this many cold starts (measured or given, whichever is longer) is overdue: it
    is no capacity, is logged and counted in `splitserve_autoscaler_replicas`, and is replaced with growing pauses."""
    schedule: tuple[ScheduleWindow, ...] = ()
    """Windows with their own minimum, for every kind; the only input of `kind: schedule`."""
    behavior: Behavior = Behavior()
    """How fast the count may change, as in an HPA. The kinds `slo` and `predictive` have defaults of their own:
    growing is not slowed down, shrinking waits for half a cold start."""

    @model_validator(mode="after")
    def _ordered(self) -> PoolPolicy:
        if self.max_replicas < self.min_replicas:
            raise broken_rule(
                f"max_replicas ({self.max_replicas}) must be at least min_replicas ({self.min_replicas})"
            )
        if self.gpus_per_replica > 1 and is_slices(self.gpu):
            raise broken_rule(
                f"gpus_per_replica ({self.gpus_per_replica}) must be 1 with gpu {self.gpu!r}: CUDA shows a process one "
                "slice"
            )
        return self

    def limits(self, cold_start_s: float) -> Limits:
        """`behavior` with its defaults filled in."""
        return Limits.of(self.behavior)


SCALE_DOWN_COLD_STARTS = 0.5
"""Replicas are removed when not wanted for this many cold starts. If one is wanted again sooner, keeping it is cheaper
than a new start."""


class SloTuning(PolicyModel):
    """How the default policy estimates demand."""

    history_s: Annotated[float, Field(ge=2, le=86_400)] = 1800.0
    """How far back forecasts are compared with the arrivals that followed; arrivals half as old count 1/e of current
    ones. Use more when demand is quiet for long and then bursts."""
    window_s: Seconds = 60.0
    """The current demand is the mean over this window, and growth is measured against the window before it. New
    replicas clear a backlog within half of it. Use less when cold starts take seconds."""
    miss_share: Annotated[float, Field(gt=0, le=4)] = 2.0
    """Requests for which the head-room may be too small, as a multiple of those that `percentile` lets miss their
    target. Many of them still meet it. Lower: safer and more expensive."""
    settle_s: Annotated[float, Field(ge=0, le=86_400)] = 300.0
    """No replica is removed before arrivals were observed for this long: burstiness is not known sooner."""
    trim_after_s: Seconds = 120.0
    """How long the percentile must exceed the target, with no replica starting, before latency alone adds one."""
    min_samples: Annotated[int, Field(ge=1, le=10_000)] = 20
    """Fewest requests in the window for measured latency to count. Use less for models with few, long requests."""


class SloPool(PoolPolicy):
    """Sized by arriving demand, corrected by measured latency. The default."""

    kind: Literal["slo"] = "slo"
    """Which policy."""
    target_ms: Annotated[float, Field(gt=0, le=3_600_000)]
    """Latency target of the percentile: TTFT in section `prefill`, TPOT in `decode`. Of the TTFT only the part of the
    prefill pool counts: the wait for prefill, in the coordinator's queue or on a worker, and computing the prompt. The
    wait for the decode worker's KV, tokenization and transfer are left out. Requests that admission refused are in no
    percentile."""
    percentile: Percentile = 95.0
    """Percentile of requests that are to meet the target."""
    slo: SloTuning = SloTuning()
    """Section `slo`: how the policy estimates demand. The defaults suit most workloads."""

    def limits(self, cold_start_s: float) -> Limits:
        """`behavior`; where it gives nothing, up at once and down after SCALE_DOWN_COLD_STARTS."""
        at_once = Rules(
            0.0, "Max", (ScalingRule(type="Pods", value=MOST_REPLICAS, periodSeconds=1),), HPA_UP.tolerance
        )
        window_s = min(3600.0, SCALE_DOWN_COLD_STARTS * cold_start_s)
        down = Rules(window_s, "Max", HPA_DOWN.policies, HPA_DOWN.tolerance)
        return Limits.of(self.behavior, Limits(at_once, down))


class TargetPool(PoolPolicy):
    """The HPA formula: ceil(ready replicas * value / target), on any metric."""

    kind: Literal["target"]
    """Which policy."""
    metric: str
    """`ttft` or `tpot` (at `percentile`, in ms), `backlog_tokens`, `utilization` (share of the pool's capacity in
    use, 0 to 1), or the name of another exported metric."""
    target: Annotated[float, Field(gt=0)]
    """The metric's value at which the pool is kept."""
    target_type: Literal["Value", "AverageValue"] = "Value"
    """`AverageValue` divides the metric by the number of replicas first, as an HPA does."""
    percentile: Percentile = 95.0
    """Percentile of `ttft` and `tpot`."""


class SchedulePool(PoolPolicy):
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
    """Length of the season that repeats. Default: a day."""
    interval_s: Annotated[float, Field(ge=1, le=86_400)] = 900.0
    """Interval over which demand is averaged for the forecast. At least four in a season."""
    forecast_percentile: Annotated[float, Field(ge=50, lt=100), BeforeValidator(_percent)] = 80.0
    """Percentile of the forecast's own error that is covered."""

    @model_validator(mode="after")
    def _enough_intervals(self) -> PredictivePool:
        if self.season_s < 4 * self.interval_s:
            raise broken_rule(
                f"interval_s ({self.interval_s:g}) must be at most season_s / 4 ({self.season_s / 4:g})"
            )
        return self


class CustomPool(PoolPolicy):
    """Your own function `(memory, Snapshot, PoolStatus) -> (Recommendation, memory)`; see
    docs/guides/autoscaling.md."""

    kind: Literal["custom"]
    """Which policy."""
    function: Annotated[str, Field(min_length=1)]
    """`module:function`, or `file.py:function` (relative to the policy file). It is tried when the file is read."""
    options: Mapping[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""


def _kind_of(value: Any) -> str:
    if isinstance(value, PoolPolicy):
        return str(value.model_dump()["kind"])
    return str(value.get("kind", "slo")) if isinstance(value, dict) else "slo"


AnyPool = Annotated[
    Annotated[SloPool, Tag("slo")]
    | Annotated[TargetPool, Tag("target")]
    | Annotated[SchedulePool, Tag("schedule")]
    | Annotated[PredictivePool, Tag("predictive")]
    | Annotated[CustomPool, Tag("custom")],
    Discriminator(
        _kind_of,
        custom_error_type="kind",
        custom_error_message="kind must be slo, target, schedule, predictive or custom",
    ),
]


class ScalingPolicy(PolicyModel):
    """The whole file."""

    gpu_budget: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """GPUs that both pools may take together, standby included. Default: the actuator's inventory (`docker.gpus`, or
    the GPUs of `splitserve up`'s machine) and the GPUs of workers that it did not start; no budget without an
    inventory, as on Kubernetes."""
    interval_s: Annotated[float, Field(gt=0, le=3600)] = 5.0
    """Time between decisions."""
    idle_s: Seconds = 300.0
    """Pools with `min_replicas` 0 go to zero after this time without a request in progress, whatever `behavior`
    says."""
    prefill: AnyPool
    """Section `prefill`: the pool that queues and computes prompts."""
    decode: AnyPool
    """Section `decode`: the pool that holds the KV and determines the time per output token."""

    @model_validator(mode="after")
    def _consistent(self) -> ScalingPolicy:
        if self.gpu_budget is not None and self.least_gpus > self.gpu_budget:
            raise broken_rule(
                f"gpu_budget ({self.gpu_budget}) must hold min_replicas and warm_standby of both pools: "
                f"{self.least_gpus}"
            )
        return self

    @property
    def pools(self) -> Mapping[PoolName, AnyPool]:
        """Both pools, by name."""
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def may_be_at_zero(self) -> bool:
        """Whether a pool goes to zero when there are no requests."""
        return 0 in (self.prefill.min_replicas, self.decode.min_replicas)

    @property
    def least_awake(self) -> Mapping[PoolName, int]:
        """The fewest replicas of each pool that can serve."""
        return {name: max(1, pool.min_replicas) for name, pool in self.pools.items()}

    @property
    def least_gpus(self) -> int:
        """GPUs of both pools at the fewest replicas that can serve, with standbys."""
        return sum(
            (self.least_awake[name] + pool.warm_standby) * pool.gpus_per_replica
            for name, pool in self.pools.items()
        )

    @property
    def one_shape(self) -> bool:
        """Whether replicas of both pools have the same GPUs."""
        prefill, decode = self.prefill, self.decode
        return (prefill.gpus_per_replica, prefill.gpu) == (decode.gpus_per_replica, decode.gpu)


def read_policy_file(path: Path) -> YamlFile:
    """A policy file as YAML. Raises ConfigError, also for one above `MOST_BYTES`."""
    return read_yaml_file(path, "policy", most_bytes=MOST_BYTES)


def load_policy(path: Path) -> ScalingPolicy:
    """The policy in this YAML file. Raises ConfigError naming the line, the first bad field and its bound."""
    return policy_in(read_policy_file(path))


def policy_in(file: YamlFile) -> ScalingPolicy:
    """The policy in a file that has been read. Raises ConfigError naming line, first bad field and its bound."""
    values, folder = dict(file.values), file.path.absolute().parent
    for name in POOLS:
        pool: Any = values.get(name)
        function = pool.get("function") if isinstance(pool, dict) else None
        if isinstance(function, str) and function.rpartition(":")[0].endswith(".py"):
            values[name] = {**pool, "function": str(folder / function)}
    with file.naming_lines():
        return parse_policy(values)


def named_files(file: YamlFile) -> list[Path]:
    """The files of code that a policy file names, also when the policy is wrong."""
    folder = file.path.absolute().parent
    pools = [pool for name in POOLS if isinstance(pool := file.values.get(name), dict)]
    functions = [function for pool in pools if isinstance(function := pool.get("function"), str)]
    places = [function.rpartition(":")[0] for function in functions]
    return [folder / place for place in places if place.endswith(".py")]


def parse_policy(values: dict[str, Any]) -> ScalingPolicy:
    """The policy in this mapping. Raises ConfigError naming the first bad field and its bound."""
    try:
        return ScalingPolicy.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = list(first["loc"])
        if len(where) > 1 and where[0] in POOLS and where[1] in _KINDS:
            # Pydantic puts the tag of a discriminated union (`kind`) into the location: leave it out.
            del where[1]
        field = ".".join(map(str, where)) or "policy"
        if first["type"] == "rule":
            # A rule over several fields: its message begins with the name of one of them.
            name, _, rest = first["msg"].partition(" ")
            field = name if field == "policy" else f"{field}.{name}"
            message = f"{field} {rest}"
        elif first["type"] == "value_error":
            message = f"{field}: {first['msg'].removeprefix('Value error, ')}"
        else:
            given = "" if first["type"] == "missing" else f" (given: {_BRIEF.repr(first.get('input'))})"
            message = f"{field}: {what_is_wrong(first)}{given}"
        raise ConfigError(message, field=field) from None


_KINDS = ("slo", "target", "schedule", "predictive", "custom")
_BRIEF = Repr()
"""Shortens values in messages: YAML anchors make large values out of few bytes."""
_BRIEF.maxlevel, _BRIEF.maxstring, _BRIEF.maxother, _BRIEF.maxlong = 2, 200, 200, 40
