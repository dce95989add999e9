"""`splitserve plan`: whether a traffic wants split or colocated workers, how many of each, and why.

It replays the traffic on the production router in simulated time. A simulated worker is as fast as those of a running
cluster, as a preset, or as the figures of a GPU and a model say.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launcher.cli import options
from launcher.cli.output import drawn, shown_progress, write, write_json
from splitserve.errors import FailedPreconditionError, InvalidArgumentError

if TYPE_CHECKING:
    from autoscaler.simulation.engine_model import EngineModel
    from autoscaler.simulation.scenario import Scenario, Slo
    from autoscaler.simulation.traces.synthetic import LengthDistribution
    from autoscaler.simulation.traces.trace import Trace
    from autoscaler.sizing.model_shape import ModelShape
    from autoscaler.sizing.roofline import ReplicaDesign
    from autoscaler.sizing.sizing import Prediction, SizingTerms
    from splitserve.v1 import scaling_pb2

MOST_REQUESTS = 20_000
"""Longer traces are cut to their busiest stretch: a replay takes up to 0.7 ms of CPU a request."""
_KINDS = ("split", "colocated")
_SIGNALS_S = 10.0
_STEADY_REQUESTS = 2000
_LONGEST_STEADY_S = 3600.0
_ANSWERS = 10
"""A steady trace lasts for at least so many answers, so that batches fill."""

TraceFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A request log, an Azure or Mooncake trace, any log.")
]
Rate = Annotated[float | None, typer.Option(help="Or: requests a second, at random.")]
Lengths = Annotated[str, typer.Option(metavar="N|p50=N,p95=N", help="Tokens, with --rate.")]
Scale = Annotated[float, typer.Option(help="Multiply the arrival rate: more users alike.")]
Seed = Annotated[int, typer.Option(help="Of everything random.")]
Target = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Running cluster whose workers have measured how fast they are; --model names one of several.",
    ),
]
EnginePreset = Annotated[str | None, typer.Option(help="Or: simulated, h100-8b, h100x4-70b or h100x8-70b.")]
Gpu = Annotated[
    str | None,
    typer.Option(help="Or: H100, H100-NVL, H200, B200, A100-80GB, A100-40GB, L40S, L4 or A10, with --model."),
]
ModelName = Annotated[
    str | None, typer.Option(metavar="NAME|DIR|FILE", help="Model name, folder, or a config.json.")
]
WeightDtype = Annotated[str | None, typer.Option(help="bf16, fp16, fp32, fp8, int8 or int4.")]
GpusPerReplica = Annotated[
    int | None, typer.Option(min=1, max=64, help="Default: 1, 2, 4 or 8, with the fewest GPUs in all.")
]
Lane = Annotated[
    float, typer.Option(min=0.001, max=10_000, help="GB/s of each GPU to other workers, for KV.")
]
TtftMs = Annotated[
    float, typer.Option("--ttft-ms", "--slo-ttft", min=0.001, max=3_600_000, help="Target, milliseconds.")
]
TpotMs = Annotated[
    float, typer.Option("--tpot-ms", "--slo-tpot", min=0.001, max=3_600_000, help="Target, milliseconds.")
]
Goal = Annotated[float, typer.Option(help="Share of requests that shall keep to both targets.")]
MaxReplicas = Annotated[int, typer.Option(help="Of both pools together, at most.")]
Limit = Annotated[
    float, typer.Option(min=1, max=86_400, metavar="SECONDS", help="For all replays together, about.")
]


def plan(
    trace: TraceFile = None,
    columns: options.Columns = None,
    rate: Rate = None,
    prompt_tokens: Lengths = "1000",
    output_tokens: Lengths = "200",
    scale: Scale = 1.0,
    seed: Seed = 0,
    ttft_ms: TtftMs = 2000.0,
    tpot_ms: TpotMs = 100.0,
    goal: Goal = 0.95,
    target: Target = None,
    engine_preset: EnginePreset = None,
    gpu: Gpu = None,
    model: ModelName = None,
    gpus_per_replica: GpusPerReplica = None,
    weight_dtype: WeightDtype = None,
    lane_gb_per_s: Lane = 25.0,
    max_replicas: MaxReplicas = 256,
    limit: Limit = 120.0,
    as_json: options.AsJson = False,
    api_key: options.ApiKey = None,
    tls: options.TlsClient = None,
    cluster_token_file: options.ClusterTokenFile = None,
) -> None:
    """Say whether a traffic wants split or colocated workers, and how many of each."""
    from autoscaler.simulation.engine_model import preset
    from autoscaler.simulation.scenario import Slo
    from autoscaler.simulation.traces.scaling import scaled
    from autoscaler.sizing.roofline import ReplicaDesign, gpu_class, replica_design
    from autoscaler.sizing.sizing import SizingTerms, designs_of

    if sum(given is not None for given in (target, engine_preset, gpu)) != 1:
        message = "give one of --target (a running cluster), --engine-preset, or --gpu with --model"
        raise InvalidArgumentError(message, field="gpu")
    options.check_above_zero(1e6, rate=rate, scale=scale)
    slo, terms = Slo(ttft_ms / 1e3, tpot_ms / 1e3), SizingTerms(goal, max_replicas, rate is not None, limit)
    traffic = _traffic(trace, columns, rate, prompt_tokens, output_tokens, slo, seed)
    if scale != 1:
        traffic = scaled(traffic, scale, seed)
    if len(traffic.requests) < 2:
        raise InvalidArgumentError("trace: fewer than two requests say nothing of a rate", field="trace")
    shape: ModelShape | None = None
    if target is not None:
        signals = asyncio.run(_signals(target, api_key, tls, cluster_token_file, model or ""))
        designs = [ReplicaDesign(gpus_per_replica or 1, _measured(signals))]
    elif engine_preset is not None:
        designs = [ReplicaDesign(gpus_per_replica or 1, preset(engine_preset))]
    else:
        gpu_kind, shape = gpu_class(gpu or ""), _model(model, weight_dtype)
        if gpus_per_replica is None:
            designs = designs_of(shape, gpu_kind, lane_gb_per_s, _longest(traffic))
        else:
            designs = [replica_design(shape, gpu_kind, gpus_per_replica, lane_gb_per_s)]
    result = _planned(traffic, designs, terms, slo)
    result["replica"]["gpu"], result["model"] = gpu, None if shape is None else asdict(shape)
    if as_json:
        write_json(result)
    else:
        write(plan_text(result))


async def _signals(
    target: str, api_key: str | None, tls: Path | None, token_file: Path | None, model: str
) -> scaling_pb2.GetSignalsResponse:
    from splitserve.client.scaling_client import ScalingClient
    from splitserve.rpc.credentials import ClusterCredentials, read_token
    from splitserve.security.tls import client_files

    security = ClusterCredentials(client_files(tls) if tls else None, read_token(token_file))
    async with ScalingClient(target, _SIGNALS_S, security=security, api_key=api_key) as client:
        return await client.signals(model)


def _measured(signals: scaling_pb2.GetSignalsResponse) -> EngineModel:
    from autoscaler.simulation.engine_model import measured_engine

    served = [model for model in signals.models if model.workers]
    if len(served) > 1:
        names = ", ".join(model.model for model in served)
        raise InvalidArgumentError(f"model: name one of those that are served: {names}", field="model")
    return measured_engine(served[0].workers if served else [])


def _longest(traffic: Trace) -> int:
    """Tokens of the longest request."""
    return max(request.prompt_tokens + request.output_tokens for request in traffic.requests)


def _planned(
    traffic: Trace, designs: Sequence[ReplicaDesign], terms: SizingTerms, slo: Slo
) -> dict[str, Any]:
    """The plan, as `--json` prints it, for the best of these workers."""
    from autoscaler.simulation.scenario import Scenario
    from autoscaler.simulation.traces.scaling import busiest
    from autoscaler.sizing.sizing import cheapest
    from splitserve.config.coordinator import AdmissionConfig

    longest = _longest(traffic)
    held = max(min(design.engine.context_tokens, design.engine.kv_capacity_tokens) for design in designs)
    if longest > held:
        message = f"trace: its longest request has {longest} tokens, a replica holds {held}"
        raise FailedPreconditionError(message, reason="REQUEST_DOES_NOT_FIT", field="trace")
    cut, notes = busiest(traffic, MOST_REQUESTS, designs[0].engine, slo.tpot_s), []
    if len(cut.requests) < len(traffic.requests):
        notes.append(f"of {len(traffic.requests)} requests the busiest {MOST_REQUESTS} in a row are replayed")
    scenario = Scenario(cut, designs[0].engine, slo, admission=AdmissionConfig())
    with shown_progress("plan", lines=False) as progress:
        sized = cheapest(designs, scenario, terms, lambda shape: progress(f"replayed {shape.name}", 0.5))
    design, sizing = sized[0].design, sized[0].sizing
    if sizing.out_of_time:
        notes.append("the time was over before the search was (--limit): fewer replicas may do")
    for kind, reached in (("split", sizing.split), ("colocated", sizing.colocated)):
        closest = sizing.closest(kind)
        if reached is None and closest is not None:
            notes.append(f"{closest.candidate.name} comes closest of its kind, with {closest.attainment:.1%}")
    scenario = dataclasses.replace(scenario, engine=design.engine)
    return {
        "best": "colocated" if sizing.best is sizing.colocated else "split",
        "split": _cluster(sizing.split, scenario, design.gpus),
        "colocated": _cluster(sizing.colocated, scenario, design.gpus),
        "replica": asdict(design),
        "other_replicas": [
            {
                "gpus_per_replica": other.design.gpus,
                "name": other.sizing.best.candidate.name,
                "gpus": other.gpus,
            }
            for other in sized[1:]
        ],
        "goal": terms.goal,
        "slo": asdict(slo),
        "traffic": _figures(cut),
        "replays": len(sizing.replays),
        "out_of_time": sizing.out_of_time,
        "notes": notes,
    }


def _cluster(prediction: Prediction | None, scenario: Scenario, gpus: int) -> dict[str, Any] | None:
    """A cluster of workers of `gpus` GPUs each, and the share of its time that each pool computes, 0..1."""
    from autoscaler.simulation.traces.scaling import pool_work_s

    if prediction is None:
        return None
    shape, length_s = prediction.candidate, max(scenario.trace.duration_s, 1e-3)
    prefill_s, decode_s = pool_work_s(scenario.trace.requests, scenario.engine, scenario.slo.tpot_s)
    if shape.both:
        prefill_busy = decode_busy = (prefill_s + decode_s) / shape.both / length_s
    else:
        prefill_busy, decode_busy = prefill_s / shape.prefill / length_s, decode_s / shape.decode / length_s
    return {
        **prediction.to_json(),
        "gpus": shape.workers * gpus,
        "prefill_gpus": shape.prefill * gpus,
        "decode_gpus": shape.decode * gpus,
        "prefill_busy": prefill_busy,
        "decode_busy": decode_busy,
    }


def _figures(trace: Trace) -> dict[str, float]:
    count, length_s = len(trace.requests), max(trace.duration_s, 1e-3)
    return {
        "requests": count,
        "requests_per_second": round(count / length_s, 4),
        "mean_prompt_tokens": round(sum(request.prompt_tokens for request in trace.requests) / count, 1),
        "mean_output_tokens": round(sum(request.output_tokens for request in trace.requests) / count, 1),
    }


def _traffic(
    file: Path | None,
    columns: str | None,
    rate: float | None,
    prompt_tokens: str,
    output_tokens: str,
    slo: Slo,
    seed: int,
) -> Trace:
    """The trace of the file, or one at this rate. Raises InvalidArgumentError naming the option."""
    from autoscaler.simulation.traces.synthetic import LengthDistribution, steady
    from autoscaler.simulation.traces.trace import load_trace

    if file is not None and rate is None:
        return load_trace(file, seed, options.column_map(columns))
    if file is not None or rate is None:
        raise InvalidArgumentError("give either --trace FILE or --rate R", field="trace")
    if columns is not None:
        raise InvalidArgumentError("columns: there is no --trace to read", field="columns")
    prompts = LengthDistribution.parse("prompt_tokens", prompt_tokens)
    outputs = LengthDistribution.parse("output_tokens", output_tokens)
    return steady(rate, _steady_s(rate, outputs, slo), prompts, outputs, seed)


def _steady_s(rate: float, outputs: LengthDistribution, slo: Slo) -> float:
    """Seconds of a steady trace at `rate` requests a second: long enough for many answers, short enough to replay."""
    from autoscaler.simulation.traces.trace import LONGEST_DAYS

    least_s = max(60.0, _STEADY_REQUESTS / rate, _ANSWERS * (slo.ttft_s + outputs.p50 * slo.tpot_s))
    most_s = min(10 * MOST_REQUESTS / rate, LONGEST_DAYS * 86_400)
    return min(least_s, max(_LONGEST_STEADY_S, 20 / rate), max(60.0, MOST_REQUESTS / rate), most_s)


def _model(model: str | None, weight_dtype: str | None) -> ModelShape:
    """The model's figures. May fetch its config.json from the hub."""
    from autoscaler.sizing.model_shape import shape_of
    from splitserve.models.model_files import read_object
    from splitserve.models.sources import localize_model, resolve_model

    if model is None:
        raise InvalidArgumentError("give --model with --gpu", field="model")
    path = Path(model).expanduser()
    if path.suffix == ".json":
        return shape_of(path.resolve().parent.name, read_object(path), weight_dtype)
    source = resolve_model(model)
    if source.gguf_file is not None or source.short_name == "simulated":
        message = f"model: {model} has no config.json: give the folder or config.json of one that has"
        raise InvalidArgumentError(message, field="model")
    source = localize_model(source, weights=False)
    config = read_object(Path(source.path) / "config.json")
    return shape_of(source.short_name, config, weight_dtype)


def plan_text(plan: Mapping[str, Any]) -> str:
    """A plan for people: the two clusters, which to take, and why. Plain when piped."""
    from rich.table import Table

    traffic, slo = plan["traffic"], plan["slo"]
    table = Table(
        title=f"{traffic['requests_per_second']:g} requests/s of {traffic['mean_prompt_tokens']:.0f} + "
        f"{traffic['mean_output_tokens']:.0f} tokens, targets {slo['ttft_s'] * 1e3:g} ms TTFT, "
        f"{slo['tpot_s'] * 1e3:g} ms TPOT"
    )
    table.add_column("cluster")
    for heading in ("workers", "GPUs", "attained", "TTFT p95 ms", "TPOT p95 ms", "busy"):
        table.add_column(heading, justify="right")
    for kind in _KINDS:
        if plan[kind] is not None:
            table.add_row(*_row(kind, plan[kind]))
    return drawn(table) + "".join(f"{line}\n" for line in _lines(plan))


def _row(kind: str, cluster: Mapping[str, Any]) -> Sequence[str]:
    gpus, busy = f"{cluster['gpus']}", f"{cluster['prefill_busy']:.0%}"
    if kind == "split":
        gpus = f"{cluster['prefill_gpus']} + {cluster['decode_gpus']}"
        busy += f" / {cluster['decode_busy']:.0%}"
    return [
        kind,
        cluster["name"],
        gpus,
        f"{cluster['attainment']:.1%}",
        "" if cluster["ttft_p95_s"] is None else f"{cluster['ttft_p95_s'] * 1e3:.0f}",
        "" if cluster["tpot_p95_s"] is None else f"{cluster['tpot_p95_s'] * 1e3:.1f}",
        busy,
    ]


def _lines(plan: Mapping[str, Any]) -> Iterator[str]:
    best = plan[plan["best"]]
    others = [plan[kind] for kind in _KINDS if kind != plan["best"] and plan[kind] is not None]
    if not others:
        does = "was not seen to reach" if plan["out_of_time"] else "does not reach"
        why = f"the other kind {does} {plan['goal']:.0%}"
    elif others[0]["gpus"] > best["gpus"]:
        why = f"{others[0]['name']} takes {others[0]['gpus']}"
    else:
        why = f"{others[0]['name']} takes as many, and is no better"
    yield f"Take {best['name']}: {best['gpus']} GPUs; {why}."
    yield f"Apply: {best['apply']}"
    replica = plan["replica"]
    gpus = f"{replica['gpus']} x {replica['gpu'] or 'GPU'}"
    kv_tokens = replica["engine"]["kv_capacity_tokens"]
    if replica["weights_gb"] is not None:
        yield (
            f"A worker is {gpus}: weights {replica['weights_gb']:.1f} GB, workspace "
            f"{replica['workspace_gb']:.1f} GB, KV {replica['kv_gb']:.1f} GB for {kv_tokens:,} tokens"
        )
    else:
        yield f"A worker is {gpus}, as measured: {kv_tokens:,} tokens of KV"
    for other in plan["other_replicas"]:
        yield f"Workers of {other['gpus_per_replica']} GPUs: {other['name']}, {other['gpus']} GPUs"
    yield from (f"note: {note}" for note in plan["notes"])
