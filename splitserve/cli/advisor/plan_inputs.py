"""What `splitserve plan` is told: the traffic, the replica, and the price. Raises SplitserveError for what is wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splitserve.errors import FailedPreconditionError, InvalidArgumentError

if TYPE_CHECKING:
    from autoscaler.advisor.advice import Prediction
    from autoscaler.advisor.reported_engine import ReportedEngine
    from autoscaler.policies.policy_file import ScalingPolicy
    from autoscaler.simulation.outcome import Slo
    from autoscaler.simulation.traces.lengths import LengthDistribution
    from autoscaler.simulation.traces.trace import Trace
    from autoscaler.sizing.bill import GpuPrice
    from autoscaler.sizing.model_shape import GivenShape, ModelShape
    from autoscaler.sizing.roofline import ReplicaDesign

MOST_REQUESTS = 20_000
"""Longer traces are cut to their busiest stretch: a replay takes up to 0.7 ms of CPU a request."""
_STEADY_REQUESTS = 2000
_LONGEST_STEADY_S = 3600.0
_MOST_COPIES = 1_000_000
"""Requests of a scaled trace, before it is cut."""
_LONGEST_DAYS = 31
_ANSWERS = 10
"""A steady trace lasts for at least so many answers, so that batches fill."""


@dataclass(frozen=True, slots=True)
class GivenTraffic:
    """The options that say what arrives. Exactly one of `trace` and `rate` is given."""

    trace: Path | None
    columns: str | None
    rate: float | None
    prompt_tokens: str
    output_tokens: str
    scale: float
    time_scale: float
    seed: int


@dataclass(frozen=True, slots=True)
class GivenReplica:
    """The options that say what a replica is."""

    model: str | None
    shape: GivenShape
    gpu: str | None
    engine_model: Path | None
    gpus: int | None
    efficiency: str
    lane_gb_per_s: float


def read_traffic(given: GivenTraffic, slo: Slo) -> tuple[Trace, ReportedEngine | None]:
    """The trace, and the engine that it reports itself, if it is a recording of a cluster with workers."""
    from autoscaler.advisor.recorded_traffic import load_traffic
    from autoscaler.advisor.reported_engine import reported_engine
    from autoscaler.simulation.traces.lengths import LengthDistribution, steady
    from autoscaler.simulation.traces.scaling import hastened, scaled
    from splitserve.cli.options import column_map

    if (given.trace is None) == (given.rate is None):
        raise InvalidArgumentError("give either --trace FILE or --rate R", field="trace")
    for name, value in (("rate", given.rate), ("scale", given.scale), ("time_scale", given.time_scale)):
        if value is not None and not (math.isfinite(value) and 0 < value <= 1e6):
            raise InvalidArgumentError(
                f"{name} must be above 0 and at most 1000000, not {value:g}", field=name
            )
    if given.trace is None and given.columns is not None:
        raise InvalidArgumentError("columns: there is no --trace to read", field="columns")
    engine = None
    if given.trace is not None:
        traffic = load_traffic(given.trace, column_map(given.columns))
        engine = reported_engine(traffic) if traffic.workers else None
        trace = traffic.trace
    else:
        prompts = LengthDistribution.parse("prompt_tokens", given.prompt_tokens)
        outputs = LengthDistribution.parse("output_tokens", given.output_tokens)
        rate = given.rate or 0.0
        trace = steady(rate, _steady_s(rate, outputs, slo), prompts, outputs, given.seed)
    if given.time_scale != 1:
        trace = hastened(trace, given.time_scale)
    _check_size(trace, given.scale)
    if given.scale != 1:
        trace = scaled(trace, given.scale, given.seed)
    if len(trace.requests) < 2:
        raise InvalidArgumentError("trace: fewer than two requests say nothing of a rate", field="trace")
    return trace, engine


def _check_size(trace: Trace, scale: float) -> None:
    """A replay takes time for each request and for each second, so neither may be without bounds."""
    if (requests := len(trace.requests) * scale) > _MOST_COPIES:
        message = f"scale: {requests:.3g} requests are more than {_MOST_COPIES}: cut the trace"
        raise InvalidArgumentError(message, field="scale")
    if (days := trace.duration_s / 86_400) > _LONGEST_DAYS:
        message = (
            f"trace: it lasts for {days:.3g} days, at most {_LONGEST_DAYS} can be replayed: "
            "cut it, or look at the unit of its times"
        )
        raise InvalidArgumentError(message, reason="TRACE_TOO_LONG", field="trace")


def _steady_s(rate: float, outputs: LengthDistribution, slo: Slo) -> float:
    median = math.exp(outputs.points[len(outputs.points) // 2][1])
    wanted = max(60.0, _STEADY_REQUESTS / rate, _ANSWERS * (slo.ttft_s + median * slo.tpot_s))
    most = min(10 * MOST_REQUESTS / rate, _LONGEST_DAYS * 86_400)
    return min(wanted, max(_LONGEST_STEADY_S, 20 / rate), max(60.0, MOST_REQUESTS / rate), most)


def read_model(given: GivenReplica) -> ModelShape | None:
    """The model; None if nothing was said of one. May ask the hub for a config.json, as every command does."""
    from autoscaler.sizing.model_shape import read_config, shape_of

    if given.model is None:
        return shape_of("model", {}, given.shape) if given.shape.params is not None else None
    path = Path(given.model).expanduser()
    if path.suffix == ".json":
        return shape_of(path.resolve().parent.name, read_config(path), given.shape)
    from splitserve.models.sources import localize_model, resolve_model

    if given.shape.params is not None and given.shape.layers is not None:
        return shape_of(given.model, {}, given.shape)
    source = resolve_model(given.model)
    if source.gguf_file is not None or source.short_name == "simulated":
        message = (
            f"model: {given.model} has no config.json: give --params, --layers, --kv-heads and --head-dim"
        )
        raise InvalidArgumentError(message, field="model")
    source = localize_model(source, weights=False)
    return shape_of(source.short_name, read_config(Path(source.path) / "config.json"), given.shape)


def read_replicas(
    given: GivenReplica, reported: ReportedEngine | None, longest: int
) -> tuple[list[ReplicaDesign], ModelShape | None, list[str]]:
    """The replicas to choose from, the model if it is known, and notes. `longest`: tokens of the longest request."""
    from autoscaler.advisor.reported_engine import measured_engine
    from autoscaler.sizing.gpu_catalog import gpu_class
    from autoscaler.sizing.replica_choice import designs_of
    from autoscaler.sizing.roofline import Efficiency, ReplicaDesign, design

    efficiency = Efficiency.parse(given.efficiency)
    gpu = None if given.gpu is None else gpu_class(given.gpu)
    model = read_model(given)
    measured = measured_engine(given.engine_model) if given.engine_model is not None else None
    if measured is None and model is None:
        measured = reported
    if gpu is not None and model is not None:
        if given.gpus is not None:
            designs = [design(model, gpu, given.gpus, efficiency, given.lane_gb_per_s)]
        else:
            designs = designs_of(model, gpu, efficiency, given.lane_gb_per_s, longest)
        if measured is not None:
            # Measured on a replica that somebody has: the smallest one, if nobody says more.
            designs = [replace(designs[0], engine=measured.model)]
    elif measured is not None:
        designs = [ReplicaDesign(given.gpus or 1, measured.model)]
    else:
        message = "give --model and --gpu, or --engine-model with a measured one"
        raise InvalidArgumentError(message, field="gpu" if given.gpu is None else "model")
    most = max(min(one.engine.context_tokens, one.engine.kv_capacity_tokens) for one in designs)
    if longest > most:
        message = f"trace: its longest request has {longest} tokens, a replica holds {most}"
        raise FailedPreconditionError(message, reason="REQUEST_DOES_NOT_FIT", field="trace")
    return designs, model, list(measured.notes) if measured else []


def read_price(price: float | None, currency: str, prices: Path | None, gpu: str | None) -> GpuPrice | None:
    """The price of a GPU for an hour, or None."""
    from autoscaler.sizing.bill import GpuPrice
    from coordinator.records.tenant_costs import load_prices

    if price is not None and prices is not None:
        raise InvalidArgumentError("price and prices exclude each other", field="price")
    if price is not None:
        if not (math.isfinite(price) and 0 <= price <= 1e9):
            raise InvalidArgumentError(f"price must be 0..1e9, not {price:g}", field="price")
        return GpuPrice(price, currency)
    if prices is None:
        return None
    file = load_prices(prices)
    known = {name.lower(): amount for name, amount in file.gpu_hour.items()}
    if gpu is None or gpu.lower() not in known:
        names = ", ".join(file.gpu_hour) or "none"
        message = f"prices: {prices} has no gpu_hour for {gpu or 'a GPU without --gpu'} ({names})"
        raise InvalidArgumentError(message, field="prices")
    return GpuPrice(known[gpu.lower()], file.currency)


def read_policy(path: Path | None) -> ScalingPolicy | None:
    """The policy whose classes are to be mixed. Raises InvalidArgumentError for a pool without classes."""
    from autoscaler.policies.policy_file import load_policy

    if path is None:
        return None
    policy = load_policy(path)
    for name, pool in policy.pools.items():
        if not pool.classes:
            raise InvalidArgumentError(f"policy: {name} has no classes with prices in {path}", field="policy")
    return policy


def mixed(policy: ScalingPolicy | None, split: Prediction | None, trace: Trace) -> dict[str, Any] | None:
    """The bill of two pools of the policy's classes; None without a policy, and where two pools miss the goal."""
    from autoscaler.sizing.mix_bill import mix_bill

    return None if policy is None or split is None else mix_bill(policy, split, trace).to_json()
