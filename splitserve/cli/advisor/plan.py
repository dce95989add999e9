"""`splitserve plan`: how many GPUs a traffic needs, before there are any."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splitserve.cli import options
from splitserve.cli.advisor.plan_inputs import (
    MOST_REQUESTS,
    GivenReplica,
    GivenTraffic,
    mixed,
    read_policy,
    read_price,
    read_replicas,
    read_traffic,
)
from splitserve.cli.advisor.plan_table import plan_text
from splitserve.cli.output import shown_progress, write

if TYPE_CHECKING:
    from autoscaler.advisor.candidates import ClusterShape
    from autoscaler.policies.policy_file import ScalingPolicy
    from autoscaler.sizing.bill import GpuPrice
    from autoscaler.sizing.sizing import SizingTerms

TRAFFIC, MODEL, MONEY = "Traffic", "Model and replica", "Money"
TraceFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="A recording, an Azure or Mooncake trace, any log.", rich_help_panel=TRAFFIC
    ),
]
Rate = Annotated[
    float | None, typer.Option(help="Or: requests a second, at random.", rich_help_panel=TRAFFIC)
]
Lengths = Annotated[
    str, typer.Option(metavar="N|p50=N,p95=N", help="Tokens, with --rate.", rich_help_panel=TRAFFIC)
]
Scale = Annotated[
    float, typer.Option(help="Multiply the arrival rate: more users alike.", rich_help_panel=TRAFFIC)
]
TimeScale = Annotated[
    float, typer.Option(help="Let the trace pass so many times as fast.", rich_help_panel=TRAFFIC)
]
Seed = Annotated[int, typer.Option(help="Of everything random.", rich_help_panel=TRAFFIC)]
ModelName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|DIR|FILE",
        help="Model name, folder, or a config.json.",
        rich_help_panel=MODEL,
    ),
]
Params = Annotated[
    str | None, typer.Option(metavar="8B", help="Parameters; instead of a file.", rich_help_panel=MODEL)
]
ActiveParams = Annotated[
    str | None, typer.Option(metavar="3B", help="Those of one token, with experts.", rich_help_panel=MODEL)
]
Count = Annotated[int | None, typer.Option(min=1, help="Instead of the file's.", rich_help_panel=MODEL)]
WeightDtype = Annotated[
    str | None, typer.Option(help="bf16, fp16, fp32, fp8, int8 or int4.", rich_help_panel=MODEL)
]
KvDtype = Annotated[str | None, typer.Option(help="bf16, fp16 or fp8.", rich_help_panel=MODEL)]
Gpu = Annotated[
    str | None,
    typer.Option(
        help="H100, H100-NVL, H200, B200, A100-80GB, A100-40GB, L40S, L4 or A10.", rich_help_panel=MODEL
    ),
]
GpusPerReplica = Annotated[
    int | None,
    typer.Option(
        min=1, max=64, help="Default: 1, 2, 4 or 8, with the fewest GPUs in all.", rich_help_panel=MODEL
    ),
]
EngineModelFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Measured engine model: JSON, or a recording to fit it from. Default: from GPU and model.",
        rich_help_panel=MODEL,
    ),
]
EfficiencyText = Annotated[
    str,
    typer.Option(
        metavar="PART=SHARE,...",
        help="What is reached of the peaks: compute, attention, memory, link; see docs/plan.md.",
        rich_help_panel=MODEL,
    ),
]
Lane = Annotated[
    float,
    typer.Option(
        min=0.001, max=10_000, help="GB/s of each GPU to other workers, for KV.", rich_help_panel=MODEL
    ),
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
Price = Annotated[float | None, typer.Option(help="Of a GPU for an hour.", rich_help_panel=MONEY)]
Currency = Annotated[str, typer.Option(help="Of --price.", rich_help_panel=MONEY)]
Prices = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Price file with gpu_hour.", rich_help_panel=MONEY)
]

PolicyFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Policy whose classes, spot ones above its floor, the pools are to be mixed of.",
        rich_help_panel=MONEY,
    ),
]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("plan")(plan)


def plan(
    model: ModelName = None,
    gpu: Gpu = None,
    trace: TraceFile = None,
    columns: options.Columns = None,
    rate: Rate = None,
    prompt_tokens: Lengths = "1000",
    output_tokens: Lengths = "200",
    scale: Scale = 1.0,
    time_scale: TimeScale = 1.0,
    seed: Seed = 0,
    ttft_ms: TtftMs = 2000.0,
    tpot_ms: TpotMs = 100.0,
    goal: Goal = 0.95,
    engine_model: EngineModelFile = None,
    gpus_per_replica: GpusPerReplica = None,
    params: Params = None,
    active_params: ActiveParams = None,
    layers: Count = None,
    heads: Count = None,
    kv_heads: Count = None,
    head_dim: Count = None,
    weight_dtype: WeightDtype = None,
    kv_dtype: KvDtype = None,
    efficiency: EfficiencyText = "",
    lane_gb_per_s: Lane = 25.0,
    price: Price = None,
    currency: Currency = "USD",
    prices: Prices = None,
    policy: PolicyFile = None,
    max_replicas: MaxReplicas = 256,
    limit: Limit = 120.0,
    as_json: options.AsJson = False,
) -> None:
    """Say how many GPUs a traffic needs for each pool, and colocated, before you buy them."""
    from autoscaler.sizing.model_shape import GivenShape
    from autoscaler.sizing.sizing import SizingTerms

    shape = GivenShape(params, active_params, layers, heads, kv_heads, head_dim, weight_dtype, kv_dtype)
    terms = SizingTerms(goal, max_replicas, rate is not None, limit)
    traffic = GivenTraffic(trace, columns, rate, prompt_tokens, output_tokens, scale, time_scale, seed)
    replica = GivenReplica(model, shape, gpu, engine_model, gpus_per_replica, efficiency, lane_gb_per_s)
    money = read_price(price, currency, prices, gpu), read_policy(policy)
    found = _planned(traffic, replica, terms, (ttft_ms, tpot_ms), money)
    write(f"{json.dumps(found)}\n" if as_json else plan_text(found))


def _planned(
    traffic: GivenTraffic,
    replica: GivenReplica,
    terms: SizingTerms,
    targets_ms: tuple[float, float],
    money: tuple[GpuPrice | None, ScalingPolicy | None],
) -> dict[str, Any]:
    """What `--json` prints."""
    from autoscaler.advisor.achieved import traffic_figures
    from autoscaler.simulation.outcome import Slo
    from autoscaler.simulation.scenario import Scenario
    from autoscaler.simulation.traces.scaling import busiest
    from autoscaler.sizing.bill import bill_of, billed_json
    from autoscaler.sizing.replica_choice import cheapest
    from splitserve.config.coordinator import AdmissionConfig

    slo, (price, policy) = Slo(targets_ms[0] / 1e3, targets_ms[1] / 1e3), money
    whole, reported = read_traffic(traffic, slo)
    longest = max(one.prompt_tokens + one.output_tokens for one in whole.requests)
    designs, model, notes = read_replicas(replica, reported, longest)
    cut = busiest(whole, MOST_REQUESTS, designs[0].engine, slo.tpot_s)
    if len(cut.requests) < len(whole.requests):
        notes.append(f"of {len(whole.requests)} requests the busiest {MOST_REQUESTS} in a row are replayed")
    scenario = Scenario(cut, designs[0].engine, slo, admission=AdmissionConfig())
    with shown_progress("plan", lines=False) as progress:

        def tell(shape: ClusterShape) -> None:
            progress(f"replayed {shape.name}", 0.5)

        sized = cheapest(designs, scenario, terms, tell)
    design, found = sized[0].design, sized[0].sizing
    scenario = dataclasses.replace(scenario, engine=design.engine)
    if found.out_of_time:
        notes.append("the time was over before the search was (--limit): fewer replicas may do")
    for kind, reached in (("split", found.split), ("colocated", found.colocated)):
        closest = found.closest(kind)
        if reached is None and closest is not None:
            notes.append(f"{closest.candidate.name} comes closest of its kind, with {closest.attainment:.1%}")
    billed = {
        name: None if one is None else billed_json(one, bill_of(one, scenario, design.gpus, price))
        for name, one in (("split", found.split), ("colocated", found.colocated))
    }
    return {
        "best": "colocated" if found.best is found.colocated else "split",
        **billed,
        "mix": mixed(policy, found.split, cut),
        "currency": None if price is None else price.currency,
        "replica": {**asdict(design), "gpu": replica.gpu},
        "other_replicas": [
            {"gpus_per_replica": one.design.gpus, "name": one.sizing.best.candidate.name, "gpus": one.gpus}
            for one in sized[1:]
        ],
        "model": None if model is None else asdict(model),
        "goal": terms.goal,
        "slo": asdict(slo),
        "traffic": {**traffic_figures(cut), "requests": len(cut.requests)},
        "replays": len(found.replays),
        "out_of_time": found.out_of_time,
        "notes": notes,
    }
