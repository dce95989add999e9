"""`splitserve simulate`: a scaling policy against a trace, on a virtual clock."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splitserve.cli import options
from splitserve.cli.output import shown_progress, write
from splitserve.cli.simulation.replayed import DEFAULT_TPOT_MS, DEFAULT_TTFT_MS, Replayed, check_above
from splitserve.cli.simulation.simulate_models import simulate_models
from splitserve.cli.simulation.simulation_table import simulation_table
from splitserve.errors import InvalidArgumentError

if TYPE_CHECKING:
    from autoscaler.policies.policy_file import ScalingPolicy
    from splitserve.config.coordinator import AdmissionConfig

SYNTHETIC_PANEL = "Synthetic traces"
PREFIX_CACHES = ("worker", "pool", "off")
BASELINE_HELP = (
    "Compare with static-peak, hpa-p95-latency, hpa-utilization, keda-rate, token-backlog, llm-d-slo, "
    "dynamo-thresholds, dynamo-sla, all of these, static-neutral or static-best. Repeatable."
)

TraceNames = Annotated[
    list[str],
    typer.Option(
        metavar="TRACE",
        help="Azure CSV or Mooncake JSONL file, a log with --columns; or constant, ramp, burst, diurnal. "
        "With --models MODEL=TRACE,KEY=VALUE,... for each model.",
    ),
]
ModelsFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Several models that share a budget, as --models of `splitserve autoscaler`."
    ),
]
PolicyFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The scaling policy, YAML. Default: `slo` in both pools.")
]
PlotFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the run: .png or .svg.")]
Baselines = Annotated[list[str] | None, typer.Option(metavar="NAME", help=BASELINE_HELP)]
OldBaselines = Annotated[list[str] | None, typer.Option("--opponent", hidden=True)]
SearchBound = Annotated[
    bool, typer.Option("--bound/--no-bound", help="Search the clairvoyant lower bound (about 20 runs).")
]
AttainmentBar = Annotated[
    float, typer.Option(help="Share of requests within the SLO that the bound must reach.")
]
ColdStart = Annotated[
    float, typer.Option(metavar="SECONDS", help="From the order of a replica until it is ready.")
]
ColdStartP95 = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Starts take their time by chance: log-normal with --cold-start as median, and this 95th percentile.",
    ),
]
FailedStarts = Annotated[
    float, typer.Option(metavar="SHARE", help="Share of starts that end instead of becoming ready.")
]
WakeTime = Annotated[
    float,
    typer.Option(
        "--wake", metavar="SECONDS", help="Until a sleeping standby serves (`splitserve_wake_seconds`)."
    ),
]
PreemptionRate = Annotated[
    float,
    typer.Option(
        "--preemptions", metavar="RATE", help="Notices an hour to each machine of a class with `spot: true`."
    ),
]
SpotNotice = Annotated[
    float, typer.Option(metavar="SECONDS", help="From a notice until the machine is taken away.")
]
TtftTarget = Annotated[float | None, typer.Option(help="SLO. Default: the policy's target, or 2000.")]
TpotTarget = Annotated[float | None, typer.Option(help="SLO. Default: the policy's target, or 100.")]
PeakReplicas = Annotated[
    float | None,
    typer.Option(help="Scale the trace so that its busiest minute fills this number of replicas."),
]
Scale = Annotated[
    float | None, typer.Option(help="Multiply the arrival rate instead; 1 is the trace as it is.")
]
Jitter = Annotated[
    float, typer.Option(metavar="SECONDS", help="How far copies of a request are moved when scaling.")
]
EnginePreset = Annotated[
    str, typer.Option(help="How fast a replica is: simulated, h100-8b, h100x4-70b or h100x8-70b.")
]
PrefixCacheKind = Annotated[
    str, typer.Option(help="worker: one for each prefill replica; pool: one for all; off.")
]
AdmissionMode = Annotated[
    str,
    typer.Option(help="queue: the coordinator's admission, with its defaults; off: requests go on at once."),
]
Steps = Annotated[
    bool,
    typer.Option(
        "--steps", help="Compute replicas step by step with the engine's own scheduler, for short traces."
    ),
]
Hybrid = Annotated[
    str | None,
    typer.Option(
        metavar="on|off",
        help="With --steps: whether decode replicas may compute prompts, as the coordinator's setting. Default: on.",
        show_default=False,
    ),
]
LendsCores = Annotated[
    bool,
    typer.Option(
        "--lent-cores",
        help="With --steps: replicas lend each other cores while they rest, as workers on one cpu host.",
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Rate = Annotated[float, typer.Option(help="Requests a second.", rich_help_panel=SYNTHETIC_PANEL)]
PeakRate = Annotated[
    float, typer.Option(help="Requests a second at the top.", rich_help_panel=SYNTHETIC_PANEL)
]
Duration = Annotated[float, typer.Option(metavar="SECONDS", help="Length.", rich_help_panel=SYNTHETIC_PANEL)]
Burst = Annotated[
    float, typer.Option(metavar="SECONDS", help="Length of a burst.", rich_help_panel=SYNTHETIC_PANEL)
]
MeanTokens = Annotated[int, typer.Option(help="Mean.", rich_help_panel=SYNTHETIC_PANEL)]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("simulate")(simulate)


def simulate(
    trace: TraceNames,
    columns: options.Columns = None,
    policy: PolicyFile = None,
    models: ModelsFile = None,
    as_json: options.AsJson = False,
    plot: PlotFile = None,
    baseline: Baselines = None,
    opponent: OldBaselines = None,
    bound: SearchBound = True,
    attainment_bar: AttainmentBar = 0.97,
    cold_start: ColdStart = 60.0,
    cold_start_p95: ColdStartP95 = None,
    failed_starts: FailedStarts = 0.0,
    wake: WakeTime = 1.0,
    preemptions: PreemptionRate = 0.0,
    spot_notice: SpotNotice = 30.0,
    ttft_ms: TtftTarget = None,
    tpot_ms: TpotTarget = None,
    peak_replicas: PeakReplicas = None,
    scale: Scale = None,
    jitter: Jitter = 120.0,
    engine_preset: EnginePreset = "simulated",
    prefix_cache: PrefixCacheKind = "worker",
    admission: AdmissionMode = "off",
    steps: Steps = False,
    hybrid: Hybrid = None,
    lent_cores: LendsCores = False,
    seed: Seed = 0,
    rate: Rate = 2.0,
    peak_rate: PeakRate = 8.0,
    duration: Duration = 3600.0,
    burst: Burst = 300.0,
    prompt_tokens: MeanTokens = 1000,
    output_tokens: MeanTokens = 200,
) -> None:
    """Replay a trace against a scaling policy in simulated time."""
    from autoscaler.simulation.preemptions import Preemptions

    _check_options(jitter, attainment_bar, prefix_cache, plot)
    rates = {"rate": rate, "peak_rate": peak_rate, "duration": duration, "burst": burst}
    lengths = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "columns": columns}
    starts = {"cold_start": cold_start, "cold_start_p95": cold_start_p95, "failed_starts": failed_starts}
    targets = {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "seed": seed, "engine_preset": engine_preset}
    scaling = {"scale": scale, "peak_replicas": peak_replicas, "jitter": jitter}
    by_steps = {"steps": steps, "hybrid": _hybrid(hybrid, steps), "lent_cores": lent_cores}
    serving: dict[str, Any] = {"prefix_cache": prefix_cache, "admission": _admission(admission)}
    serving |= {"preemptions": Preemptions(preemptions, spot_notice, seed), "wake_s": wake, **by_steps}
    given: dict[str, Any] = {**rates, **lengths, **starts, **targets, **scaling, "serving": serving}
    names = [*(baseline or ()), *(opponent or ())]
    if models is not None:
        _check_alone({"policy": policy, "baseline": names, "plot": plot})
        simulate_models(models, trace, Replayed(trace[0], **given), as_json)
        return
    bar = attainment_bar if bound else None
    _simulate_one(Replayed(_only(trace), **given), policy, names, bar, plot, as_json)


def _only(traces: list[str]) -> str:
    if len(traces) > 1:
        raise InvalidArgumentError("trace: several need the models' file (--models)", field="trace")
    return traces[0]


def _simulate_one(
    replayed: Replayed,
    policy: Path | None,
    baselines: list[str],
    bar: float | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    from autoscaler.policies.policy_file import load_policy
    from autoscaler.simulation.evaluation.comparison import baseline_names, compare
    from autoscaler.simulation.evaluation.plot import draw

    names = baseline_names(baselines)
    given = replayed.ttft_ms, replayed.tpot_ms, replayed.peak_replicas
    rules = _default_policy(*given) if policy is None else load_policy(policy)
    scenario = replayed.scenario(rules)
    with shown_progress("simulate") as progress:
        found = compare(scenario, rules, names, bar, progress)
    if plot is not None:
        draw(plot, found.policy, f"{scenario.trace.name}, cold start {scenario.starts}", found.bound)
    write(f"{json.dumps(found.to_json())}\n" if as_json else simulation_table(found, scenario))


def _check_alone(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value:
            message = f"{name} is for one model and must not be given with --models"
            raise InvalidArgumentError(message, field=name)


def _check_options(jitter: float, attainment_bar: float, prefix_cache: str, plot: Path | None) -> None:
    from autoscaler.simulation.evaluation.plot import check_plot_path

    check_above("jitter", jitter, least=0.0)
    if not 0 < attainment_bar <= 1:
        raise InvalidArgumentError(
            f"attainment_bar must be above 0 and at most 1, not {attainment_bar:g}", field="attainment_bar"
        )
    if prefix_cache not in PREFIX_CACHES:
        raise InvalidArgumentError(
            f"prefix_cache must be {', '.join(PREFIX_CACHES)}, not {prefix_cache!r}", field="prefix_cache"
        )
    if plot is not None:
        check_plot_path(plot)


def _hybrid(given: str | None, steps: bool) -> bool:
    if given not in (None, "on", "off"):
        raise InvalidArgumentError(f"hybrid must be on or off, not {given!r}", field="hybrid")
    return steps if given is None else given == "on"


def _admission(mode: str) -> AdmissionConfig:
    from pydantic import ValidationError

    from splitserve.config.coordinator import AdmissionConfig

    try:
        return AdmissionConfig(mode=mode)  # type: ignore[arg-type]
    except ValidationError as error:
        raise InvalidArgumentError(
            f"admission must be queue or off, not {mode!r}", field="admission"
        ) from error


def _default_policy(ttft_ms: float | None, tpot_ms: float | None, peak: float | None) -> ScalingPolicy:
    """The kind `slo` with its defaults in both pools; where a trace is scaled up, twice the replicas that it fills."""
    from autoscaler.policies.policy_file import PoolPolicy, parse_policy

    ttft = DEFAULT_TTFT_MS if ttft_ms is None else ttft_ms
    tpot = DEFAULT_TPOT_MS if tpot_ms is None else tpot_ms
    peak = 0.0 if peak is None else peak
    check_above("ttft_ms", ttft)
    check_above("tpot_ms", tpot)
    check_above("peak_replicas", peak, least=0.0)
    most = max(PoolPolicy.model_fields["max_replicas"].default, math.ceil(2 * peak))
    pools = {"prefill": {"target_ms": ttft}, "decode": {"target_ms": tpot}}
    return parse_policy({name: {"max_replicas": most, **pool} for name, pool in pools.items()})
