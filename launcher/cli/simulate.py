"""`splitserve simulate`: scaling policies against a trace, on a virtual clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from launcher.cli import options
from launcher.cli.output import drawn, shown_progress, write, write_json
from splitserve.errors import InvalidArgumentError

if TYPE_CHECKING:
    from autoscaler.policies.policy_file import AnyPool, ScalingPolicy
    from autoscaler.simulation.engine_model import EngineModel
    from autoscaler.simulation.outcome import Outcome
    from autoscaler.simulation.scenario import Scenario, Slo
    from autoscaler.simulation.traces.trace import Trace

DEFAULT_TTFT_MS = 2000.0
DEFAULT_TPOT_MS = 100.0

TraceName = Annotated[
    str,
    typer.Option(
        metavar="TRACE",
        help="Request log, Azure CSV or Mooncake JSONL file, a log with --columns; or constant, ramp, burst, diurnal.",
    ),
]
PolicyFiles = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE", help="A scaling policy, YAML; several are compared. Default: `slo` in both pools."
    ),
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
TtftTarget = Annotated[float | None, typer.Option(help="Target. Default: the first policy's, or 2000.")]
TpotTarget = Annotated[float | None, typer.Option(help="Target. Default: the first policy's, or 100.")]
PeakReplicas = Annotated[
    float | None,
    typer.Option(help="Scale the trace so that its busiest minute fills this number of replicas."),
]
Scale = Annotated[
    float | None, typer.Option(help="Multiply the arrival rate instead; 1 is the trace as it is.")
]
EnginePreset = Annotated[
    str, typer.Option(help="How fast a replica is: simulated, h100-8b, h100x4-70b or h100x8-70b.")
]
AdmissionMode = Annotated[
    Literal["queue", "off"],
    typer.Option(help="queue: the coordinator's admission, with its defaults; off: requests go on at once."),
]
RoleMoves = Annotated[
    bool,
    typer.Option(
        "--role-moves", help="Workers can take the other pool's role, as those of engine torch can."
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Rate = Annotated[float, typer.Option(help="Requests a second.")]
PeakRate = Annotated[float, typer.Option(help="Requests a second at the top.")]
Duration = Annotated[float, typer.Option(metavar="SECONDS", help="Length.")]
Burst = Annotated[float, typer.Option(metavar="SECONDS", help="Length of a burst.")]
MeanTokens = Annotated[int, typer.Option(help="Mean.")]


def simulate(
    trace: TraceName,
    columns: options.Columns = None,
    policy: PolicyFiles = None,
    as_json: options.AsJson = False,
    cold_start: ColdStart = 60.0,
    cold_start_p95: ColdStartP95 = None,
    failed_starts: FailedStarts = 0.0,
    ttft_ms: TtftTarget = None,
    tpot_ms: TpotTarget = None,
    peak_replicas: PeakReplicas = None,
    scale: Scale = None,
    engine_preset: EnginePreset = "simulated",
    admission: AdmissionMode = "off",
    role_moves: RoleMoves = False,
    seed: Seed = 0,
    rate: Rate = 2.0,
    peak_rate: PeakRate = 8.0,
    duration: Duration = 3600.0,
    burst: Burst = 300.0,
    prompt_tokens: MeanTokens = 1000,
    output_tokens: MeanTokens = 200,
) -> None:
    """Replay a trace against scaling policies in simulated time."""
    from autoscaler.simulation.engine_model import preset
    from autoscaler.simulation.scenario import Scenario, Slo, StartTimes
    from autoscaler.simulation.simulator import run_policy
    from autoscaler.simulation.traces.synthetic import SYNTHETIC, TraceShape, synthetic
    from autoscaler.simulation.traces.trace import load_trace
    from splitserve.config.coordinator import AdmissionConfig

    options.check_above_zero(ttft_ms=ttft_ms, tpot_ms=tpot_ms, peak_replicas=peak_replicas, scale=scale)
    policies = _policies(policy, ttft_ms, tpot_ms, peak_replicas)
    first = next(iter(policies.values()))
    slo = Slo(
        _target_s(ttft_ms, first.prefill, DEFAULT_TTFT_MS), _target_s(tpot_ms, first.decode, DEFAULT_TPOT_MS)
    )
    engine = preset(engine_preset)
    if trace in SYNTHETIC:
        if columns is not None:
            message = f"columns: trace {trace} is made, and there is no file to read"
            raise InvalidArgumentError(message, field="columns")
        means = (prompt_tokens, output_tokens)
        loaded = synthetic(TraceShape(trace, rate, peak_rate, duration, burst, *means, seed=seed))
    else:
        loaded = load_trace(Path(trace), seed, options.column_map(columns))
    replayed = _scaled(loaded, scale, peak_replicas, engine, slo, seed)
    scenario = Scenario(
        replayed,
        engine,
        slo,
        StartTimes(cold_start, cold_start_p95, failed_starts, seed),
        admission=AdmissionConfig(mode=admission),
        changes_role=role_moves,
    )
    with shown_progress("simulate") as progress:
        outcomes = [
            run_policy(scenario, rules, partial(progress, name), name) for name, rules in policies.items()
        ]
    if as_json:
        write_json({"trace": replayed.name, "policies": [outcome.to_json() for outcome in outcomes]})
    else:
        write(_table(outcomes, scenario))


def _policies(
    paths: Sequence[Path] | None, ttft_ms: float | None, tpot_ms: float | None, peak: float | None
) -> dict[str, ScalingPolicy]:
    """The policies by name: a file's name without its suffix, or its whole path where two files have the same name.

    Without files kind `slo` with its defaults in both pools. Where the trace is scaled up to fill `peak` replicas, a
    pool may then have twice as many."""
    from autoscaler.policies.policy_file import PoolPolicy, load_policy, parse_policy

    if not paths:
        targets = {"prefill": ttft_ms or DEFAULT_TTFT_MS, "decode": tpot_ms or DEFAULT_TPOT_MS}
        most = max(PoolPolicy.model_fields["max_replicas"].default, math.ceil(2 * (peak or 0.0)))
        pools = {name: {"max_replicas": most, "target_ms": target} for name, target in targets.items()}
        return {"policy": parse_policy(pools)}
    stems = [path.stem for path in paths]
    names = [path.stem if stems.count(path.stem) == 1 else str(path) for path in paths]
    if len(set(names)) < len(names):
        raise InvalidArgumentError("policy: the same file is given twice", field="policy")
    return {name: load_policy(path) for name, path in zip(names, paths, strict=True)}


def _target_s(given_ms: float | None, pool: AnyPool, default_ms: float) -> float:
    """The target of the option, else that of the policy, else the default."""
    from autoscaler.policies.policy_file import SloPool

    return (given_ms or (pool.target_ms if isinstance(pool, SloPool) else default_ms)) / 1e3


def _scaled(
    trace: Trace, scale: float | None, peak_replicas: float | None, engine: EngineModel, slo: Slo, seed: int
) -> Trace:
    """The trace, with its arrival rate scaled as the options say. Raises InvalidArgumentError naming the option."""
    from autoscaler.simulation.traces.scaling import scaled, scaled_to_peak

    if peak_replicas is not None and scale is not None:
        raise InvalidArgumentError("peak_replicas and scale exclude each other", field="scale")
    if peak_replicas is not None:
        return scaled_to_peak(trace, peak_replicas, engine, slo.tpot_s, seed)
    return trace if scale is None else scaled(trace, scale, seed)


def _table(outcomes: Sequence[Outcome], scenario: Scenario) -> str:
    """The table of the outcomes, with one line for each policy."""
    from rich.table import Table

    slo, trace = scenario.slo, scenario.trace
    table = Table(
        title=f"{trace.name}: {len(trace.requests):,} requests in {trace.duration_s / 60:.0f} min, "
        f"cold start {scenario.starts}, "
        f"targets {slo.ttft_s * 1e3:g} ms TTFT, {slo.tpot_s * 1e3:g} ms TPOT"
    )
    table.add_column("policy")
    for heading in (
        "attained",
        "TTFT",
        "TPOT",
        "TTFT p50 / p95 s",
        "TPOT p50 / p95 ms",
        "replica-hours",
        "most replicas",
        "actions",
        "failed",
    ):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        table.add_row(*_row(outcome, outcome.phases()))
    return drawn(table)


def _row(outcome: Outcome, phases: Mapping[str, Mapping[str, float]]) -> list[str]:
    ttft, tpot = phases["ttft"], phases["tpot"]
    return [
        outcome.name,
        f"{outcome.attainment:.2%}",
        f"{outcome.attainment_ttft:.2%}",
        f"{outcome.attainment_tpot:.2%}",
        f"{ttft['p50']:.2f} / {ttft['p95']:.2f}" if ttft else "",
        f"{tpot['p50'] * 1e3:.1f} / {tpot['p95'] * 1e3:.1f}" if tpot else "",
        f"{outcome.total_replica_hours:.2f}",
        str(outcome.peak_replicas),
        str(sum(outcome.actions.values())),
        str(outcome.failed_requests),
    ]
