"""What `splitserve plan` is told: the traffic, the replica, and the price. Raises SplitserveError for what is wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from splitserve.errors import FailedPreconditionError, InvalidArgumentError

if TYPE_CHECKING:
    from autoscaler.advisor.reported_engine import ReportedEngine
    from autoscaler.simulation.engine_model import EngineModel
    from autoscaler.simulation.outcome import Slo
    from autoscaler.simulation.traces.lengths import LengthDistribution
    from autoscaler.simulation.traces.trace import Trace
    from autoscaler.sizing.bill import GpuPrice
    from autoscaler.sizing.gpu_catalog import GpuClass
    from autoscaler.sizing.model_shape import GivenShape, ModelShape
    from autoscaler.sizing.roofline import Efficiency, ReplicaDesign

MOST_REQUESTS = 20_000
"""Longer traces are cut to their busiest stretch: a replay takes up to 0.7 ms of CPU a request."""
_STEADY_REQUESTS = 2000
_LONGEST_STEADY_S = 3600.0
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
    if given.scale != 1:
        trace = scaled(trace, given.scale, given.seed)
    if len(trace.requests) < 2:
        raise InvalidArgumentError("trace: fewer than two requests say nothing of a rate", field="trace")
    return trace, engine


def _steady_s(rate: float, outputs: LengthDistribution, slo: Slo) -> float:
    median = math.exp(outputs.points[len(outputs.points) // 2][1])
    wanted = max(60.0, _STEADY_REQUESTS / rate, _ANSWERS * (slo.ttft_s + median * slo.tpot_s))
    return min(wanted, max(_LONGEST_STEADY_S, 20 / rate), max(60.0, MOST_REQUESTS / rate))


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


def read_replica(
    given: GivenReplica, reported: ReportedEngine | None, trace: Trace, slo: Slo, goal: float
) -> tuple[ReplicaDesign, ModelShape | None, list[str]]:
    """The replica with its engine model, the model if it is known, and notes."""
    from autoscaler.advisor.reported_engine import measured_engine
    from autoscaler.sizing.gpu_catalog import gpu_class
    from autoscaler.sizing.roofline import Efficiency, ReplicaDesign

    efficiency = Efficiency.parse(given.efficiency)
    gpu = None if given.gpu is None else gpu_class(given.gpu)
    model = read_model(given)
    measured = measured_engine(given.engine_model) if given.engine_model is not None else None
    if measured is None and model is None:
        measured = reported
    longest = max(one.prompt_tokens + one.output_tokens for one in trace.requests)
    if gpu is not None and model is not None:
        wanted = _Wanted(model, gpu, efficiency, given.lane_gb_per_s, longest)
        found = _designed(wanted, given.gpus, trace, slo, goal, measured.model if measured else None)
    elif measured is not None:
        found = ReplicaDesign(given.gpus or 1, measured.model)
    else:
        message = "give --model and --gpu, or --engine-model with a measured one"
        raise InvalidArgumentError(message, field="gpu" if given.gpu is None else "model")
    _check_longest(found.engine, longest)
    return found, model, list(measured.notes) if measured else []


@dataclass(frozen=True, slots=True)
class _Wanted:
    model: ModelShape
    gpu: GpuClass
    efficiency: Efficiency
    lane_gb_per_s: float
    longest: int

    def design(self, gpus: int) -> ReplicaDesign:
        from autoscaler.sizing.roofline import design

        return design(self.model, self.gpu, gpus, self.efficiency, self.lane_gb_per_s)


def _designed(
    wanted: _Wanted, gpus: int | None, trace: Trace, slo: Slo, goal: float, measured: EngineModel | None
) -> ReplicaDesign:
    """With so many GPUs, or the fewest that hold the model and its longest request and are fast enough when idle."""
    from autoscaler.simulation.simulator import Scenario
    from autoscaler.sizing.roofline import GPU_COUNTS
    from autoscaler.sizing.sizing import idle_share

    if gpus is not None:
        found = wanted.design(gpus)
        return found if measured is None else replace(found, engine=measured)
    fitting: list[ReplicaDesign] = []
    last: FailedPreconditionError | None = None
    for count in GPU_COUNTS:
        try:
            found = wanted.design(count)
        except FailedPreconditionError as error:
            last = error
            continue
        except InvalidArgumentError:
            continue  # the heads do not divide: this count is not a choice
        if measured is not None:
            return replace(found, engine=measured)
        if found.engine.kv_capacity_tokens < wanted.longest:
            continue
        fitting.append(found)
        if idle_share(Scenario(trace, found.engine, slo)) >= goal:
            return found
    if fitting:
        return fitting[-1]
    if last is not None:
        raise last
    message = f"gpu: no {wanted.gpu.name} replica of up to {GPU_COUNTS[-1]} GPUs holds {wanted.longest} tokens of KV"
    raise FailedPreconditionError(message, reason="MODEL_DOES_NOT_FIT", field="gpu")


def _check_longest(engine: EngineModel, longest: int) -> None:
    most = min(engine.context_tokens, engine.kv_capacity_tokens)
    if longest > most:
        message = f"trace: its longest request has {longest} tokens, a replica holds {most}"
        raise FailedPreconditionError(message, reason="REQUEST_DOES_NOT_FIT", field="trace")


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
