"""`splitserve simulate`: a scaling policy against a trace, on a virtual clock."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splitserve.cli import options
from splitserve.cli.output import shown_progress, write
from splitserve.cli.simulation_table import simulation_table
from splitserve.errors import InvalidArgumentError

if TYPE_CHECKING:
    from autoscaler.policies.policy_file import ScalingPolicy
    from autoscaler.simulation.engine_model import EngineModel
    from autoscaler.simulation.outcome import Slo
    from autoscaler.simulation.traces.synthetic import TraceShape
    from autoscaler.simulation.traces.trace import Trace
    from splitserve.config.coordinator import AdmissionConfig

SYNTHETIC_PANEL = "Synthetic traces"
DEFAULT_TTFT_MS = 2000.0
DEFAULT_TPOT_MS = 100.0
PREFIX_CACHES = ("worker", "pool", "off")
BASELINE_HELP = (
    "Compare with static-peak, hpa-p95-latency, hpa-utilization, keda-rate, token-backlog, llm-d-slo, "
    "dynamo-thresholds, dynamo-sla, all of these, or static-best. Repeatable."
)

TraceName = Annotated[
    str,
    typer.Option(
        help="Azure CSV or Mooncake JSONL file, a log with --columns; or constant, ramp, burst, diurnal."
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


@dataclass(frozen=True, slots=True)
class _TraceScaling:
    """At most one of `peak_replicas` and `factor` is given; `jitter_s` in seconds."""

    peak_replicas: float | None
    factor: float | None
    jitter_s: float
    seed: int


def simulate(
    trace: TraceName,
    columns: options.Columns = None,
    policy: PolicyFile = None,
    as_json: options.AsJson = False,
    plot: PlotFile = None,
    baseline: Baselines = None,
    opponent: OldBaselines = None,
    bound: SearchBound = True,
    attainment_bar: AttainmentBar = 0.97,
    cold_start: ColdStart = 60.0,
    cold_start_p95: ColdStartP95 = None,
    failed_starts: FailedStarts = 0.0,
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
    from autoscaler.policies.policy_file import load_policy
    from autoscaler.simulation.engine_model import preset
    from autoscaler.simulation.evaluation.comparison import baseline_names, compare
    from autoscaler.simulation.evaluation.plot import draw
    from autoscaler.simulation.preemptions import Preemptions
    from autoscaler.simulation.simulator import Scenario
    from autoscaler.simulation.start_times import StartTimes
    from autoscaler.simulation.traces.synthetic import TraceShape

    _check_options(jitter, attainment_bar, prefix_cache, plot)
    starts = StartTimes(cold_start, cold_start_p95, failed_starts, seed)
    names = baseline_names([*(baseline or ()), *(opponent or ())])
    rules = _default_policy(ttft_ms, tpot_ms, peak_replicas) if policy is None else load_policy(policy)
    engine, slo = preset(engine_preset), _slo(rules, ttft_ms, tpot_ms)
    shape = TraceShape(trace, rate, peak_rate, duration, burst, prompt_tokens, output_tokens, seed=seed)
    replayed = _scaled(_load(shape, columns), engine, slo, _TraceScaling(peak_replicas, scale, jitter, seed))
    by_steps = {"steps": steps, "hybrid": _hybrid(hybrid, steps), "lent_cores": lent_cores}
    taken = Preemptions(preemptions, spot_notice, seed)
    serving = {"prefix_cache": prefix_cache, "admission": _admission(admission), "preemptions": taken}
    scenario = Scenario(replayed, engine, slo, cold_start, start_times=starts, **serving, **by_steps)  # type: ignore[arg-type]
    with shown_progress("simulate") as progress:
        found = compare(scenario, rules, names, attainment_bar if bound else None, progress)
    if plot is not None:
        draw(plot, found.policy, f"{replayed.name}, cold start {starts}", found.bound)
    write(f"{json.dumps(found.to_json())}\n" if as_json else simulation_table(found, scenario))


def _check_options(jitter: float, attainment_bar: float, prefix_cache: str, plot: Path | None) -> None:
    from autoscaler.simulation.evaluation.plot import check_plot_path

    _check_above("jitter", jitter, least=0.0)
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


def _load(shape: TraceShape, columns: str | None) -> Trace:
    """The synthetic trace of that kind, or the file of that name."""
    from autoscaler.simulation.traces.synthetic import SYNTHETIC, synthetic
    from autoscaler.simulation.traces.trace import load_trace

    if shape.kind in SYNTHETIC:
        return synthetic(shape)
    return load_trace(Path(shape.kind), shape.seed, options.column_map(columns))


def _default_policy(ttft_ms: float | None, tpot_ms: float | None, peak: float | None) -> ScalingPolicy:
    """The kind `slo` with its defaults in both pools; where a trace is scaled up, twice the replicas that it fills."""
    from autoscaler.policies.policy_file import PoolPolicy, parse_policy

    ttft = DEFAULT_TTFT_MS if ttft_ms is None else ttft_ms
    tpot = DEFAULT_TPOT_MS if tpot_ms is None else tpot_ms
    peak = 0.0 if peak is None else peak
    _check_above("ttft_ms", ttft)
    _check_above("tpot_ms", tpot)
    _check_above("peak_replicas", peak, least=0.0)
    most = max(PoolPolicy.model_fields["max_replicas"].default, math.ceil(2 * peak))
    pools = {"prefill": {"target_ms": ttft}, "decode": {"target_ms": tpot}}
    return parse_policy({name: {"max_replicas": most, **pool} for name, pool in pools.items()})


def _slo(policy: ScalingPolicy, ttft_ms: float | None, tpot_ms: float | None) -> Slo:
    from autoscaler.policies.policy_file import SloPool
    from autoscaler.simulation.outcome import Slo

    prefill, decode = policy.prefill, policy.decode
    own_ttft = prefill.target_ms if isinstance(prefill, SloPool) else DEFAULT_TTFT_MS
    own_tpot = decode.target_ms if isinstance(decode, SloPool) else DEFAULT_TPOT_MS
    ttft = own_ttft if ttft_ms is None else ttft_ms
    tpot = own_tpot if tpot_ms is None else tpot_ms
    _check_above("ttft_ms", ttft)
    _check_above("tpot_ms", tpot)
    return Slo(ttft / 1e3, tpot / 1e3)


def _scaled(trace: Trace, engine: EngineModel, slo: Slo, scaling: _TraceScaling) -> Trace:
    from autoscaler.simulation.traces.scaling import scaled, scaled_to_peak

    peak, factor = scaling.peak_replicas, scaling.factor
    if peak is not None and factor is not None:
        raise InvalidArgumentError("peak_replicas and scale exclude each other", field="scale")
    if peak is not None:
        _check_above("peak_replicas", peak)
        return scaled_to_peak(trace, peak, engine, slo.tpot_s, scaling.seed, scaling.jitter_s)
    if factor is None:
        return trace
    _check_above("scale", factor)
    return scaled(trace, factor, scaling.seed, scaling.jitter_s)


def _check_above(name: str, value: float, least: float | None = None) -> None:
    if not math.isfinite(value) or value < 0 or (value == 0 and least is None):
        bound = "above 0" if least is None else f"at least {least:g}"
        raise InvalidArgumentError(f"{name} must be {bound}, not {value:g}", field=name)
