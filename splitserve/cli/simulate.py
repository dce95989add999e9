"""`splitserve simulate`: a scaling policy against a trace, on a virtual clock."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splitserve.cli import options
from splitserve.cli.output import write
from splitserve.errors import InvalidArgumentError

if TYPE_CHECKING:
    from autoscaler.policy_file import ScalingPolicy
    from autoscaler.simulation.comparison import Comparison
    from autoscaler.simulation.engine_model import EngineModel
    from autoscaler.simulation.outcome import Outcome, Slo
    from autoscaler.simulation.simulator import Scenario
    from autoscaler.simulation.trace import Trace

SYNTHETIC_PANEL = "Synthetic traces"
PIPED_WIDTH = 160
DEFAULT_TTFT_MS = 2000.0
DEFAULT_TPOT_MS = 100.0
PREFIX_CACHES = ("worker", "pool", "off")


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("simulate")(simulate)


def simulate(
    trace: Annotated[
        str,
        typer.Option(help="Azure CSV or Mooncake JSONL file; or constant, ramp, burst, diurnal."),
    ],
    policy: Annotated[Path, typer.Option(metavar="FILE", help="The scaling policy, YAML.")],
    as_json: options.AsJson = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the run: .png or .svg.")] = None,
    opponent: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Compare with static-peak, hpa-p95-latency, token-backlog, dynamo-thresholds or all. Repeatable.",
        ),
    ] = None,
    bound: Annotated[
        bool, typer.Option("--bound/--no-bound", help="Search the clairvoyant lower bound (20 runs or so).")
    ] = True,
    attainment_bar: Annotated[
        float, typer.Option(help="Share of requests within the SLO that the bound must reach.")
    ] = 0.97,
    cold_start: Annotated[
        float, typer.Option(metavar="SECONDS", help="From the order of a replica until it is ready.")
    ] = 60.0,
    ttft_ms: Annotated[float | None, typer.Option(help="SLO. Default: the policy's target, or 2000.")] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="SLO. Default: the policy's target, or 100.")] = None,
    peak_replicas: Annotated[
        float | None, typer.Option(help="Scale the trace so that its busiest minute fills so many replicas.")
    ] = None,
    scale: Annotated[
        float | None, typer.Option(help="Multiply the arrival rate instead; 1 is the trace as it is.")
    ] = None,
    jitter: Annotated[
        float, typer.Option(metavar="SECONDS", help="How far copies of a request are moved when scaling.")
    ] = 120.0,
    engine_preset: Annotated[
        str, typer.Option(help="How fast a replica is: simulated, h100-8b, h100x4-70b or h100x8-70b.")
    ] = "simulated",
    prefix_cache: Annotated[
        str, typer.Option(help="worker: one for each prefill replica; pool: one for all; off.")
    ] = "worker",
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    rate: Annotated[float, typer.Option(help="Requests a second.", rich_help_panel=SYNTHETIC_PANEL)] = 2.0,
    peak_rate: Annotated[
        float, typer.Option(help="Requests a second at the top.", rich_help_panel=SYNTHETIC_PANEL)
    ] = 8.0,
    duration: Annotated[
        float, typer.Option(metavar="SECONDS", help="Length.", rich_help_panel=SYNTHETIC_PANEL)
    ] = 3600.0,
    burst: Annotated[
        float, typer.Option(metavar="SECONDS", help="Length of a burst.", rich_help_panel=SYNTHETIC_PANEL)
    ] = 300.0,
    prompt_tokens: Annotated[int, typer.Option(help="Mean.", rich_help_panel=SYNTHETIC_PANEL)] = 1000,
    output_tokens: Annotated[int, typer.Option(help="Mean.", rich_help_panel=SYNTHETIC_PANEL)] = 200,
) -> None:
    """Replay a trace against a scaling policy in simulated time."""
    from autoscaler.policy_file import load_policy
    from autoscaler.simulation.comparison import compare, opponent_names
    from autoscaler.simulation.engine_model import preset
    from autoscaler.simulation.plot import check_plot_path, draw
    from autoscaler.simulation.simulator import Scenario
    from autoscaler.simulation.synthetic import SYNTHETIC, Shape, synthetic
    from autoscaler.simulation.trace_files import load_trace

    _check_above("cold_start", cold_start, least=0.0)
    _check_above("jitter", jitter, least=0.0)
    if not 0 < attainment_bar <= 1:
        raise InvalidArgumentError(
            f"attainment_bar must be above 0 and at most 1, not {attainment_bar:g}", field="attainment_bar"
        )
    if prefix_cache not in PREFIX_CACHES:
        raise InvalidArgumentError(
            f"prefix_cache must be {', '.join(PREFIX_CACHES)}, not {prefix_cache!r}", field="prefix_cache"
        )
    names = opponent_names(opponent or [])
    if plot is not None:
        check_plot_path(plot)
    rules = load_policy(policy)
    engine = preset(engine_preset)
    slo = _slo(rules, ttft_ms, tpot_ms)
    if trace in SYNTHETIC:
        shape = Shape(
            trace, rate, peak_rate, duration, burst, prompt_tokens, output_tokens, equal=False, seed=seed
        )
        played = synthetic(shape)
    else:
        played = load_trace(Path(trace), seed)
    played = _scaled(played, engine, slo, peak_replicas, scale, jitter, seed)
    scenario = Scenario(played, engine, slo, cold_start, prefix_cache=prefix_cache)
    found = compare(scenario, rules, names, attainment_bar if bound else None)
    if plot is not None:
        draw(plot, found.policy, f"{played.name}, cold start {cold_start:g} s", found.bound)
    write(f"{json.dumps(found.to_json())}\n" if as_json else _table(found, scenario))


def _slo(policy: ScalingPolicy, ttft_ms: float | None, tpot_ms: float | None) -> Slo:
    from autoscaler.policy_file import SloPool
    from autoscaler.simulation.outcome import Slo

    prefill, decode = policy.prefill, policy.decode
    own_ttft = prefill.target_ms if isinstance(prefill, SloPool) else DEFAULT_TTFT_MS
    own_tpot = decode.target_ms if isinstance(decode, SloPool) else DEFAULT_TPOT_MS
    ttft = own_ttft if ttft_ms is None else ttft_ms
    tpot = own_tpot if tpot_ms is None else tpot_ms
    _check_above("ttft_ms", ttft)
    _check_above("tpot_ms", tpot)
    return Slo(ttft / 1e3, tpot / 1e3)


def _scaled(
    trace: Trace,
    engine: EngineModel,
    slo: Slo,
    peak: float | None,
    scale: float | None,
    jitter_s: float,
    seed: int,
) -> Trace:
    from autoscaler.simulation.scaling import scaled, scaled_to_peak

    if peak is not None and scale is not None:
        raise InvalidArgumentError("peak_replicas and scale exclude each other", field="scale")
    if peak is not None:
        _check_above("peak_replicas", peak)
        return scaled_to_peak(trace, peak, engine, slo.tpot_s, seed, jitter_s)
    if scale is None:
        return trace
    _check_above("scale", scale)
    return scaled(trace, scale, seed, jitter_s)


def _check_above(name: str, value: float, least: float | None = None) -> None:
    if not math.isfinite(value) or value < 0 or (value == 0 and least is None):
        bound = "above 0" if least is None else f"at least {least:g}"
        raise InvalidArgumentError(f"{name} must be {bound}, not {value:g}", field=name)


def _table(found: Comparison, scenario: Scenario) -> str:
    from rich.console import Console
    from rich.table import Table

    slo = scenario.slo
    trace = scenario.trace
    table = Table(
        title=f"{trace.name}: {len(trace.requests):,} requests in {trace.duration_s / 60:.0f} min, "
        f"cold start {scenario.cold_start_s:g} s, "
        f"SLO {slo.ttft_s * 1e3:g} ms TTFT, {slo.tpot_s * 1e3:g} ms TPOT"
    )
    table.add_column("policy")
    for heading in (
        "attained",
        "TTFT",
        "TPOT",
        "TTFT p50 / p95 s",
        "TPOT p50 / p95 ms",
        "replica-hours",
        "x bound",
        "actions",
        "failed",
    ):
        table.add_column(heading, justify="right")
    least = found.bound.replica_hours if found.bound else None
    rows = [found.policy, *found.others, *([found.bound.outcome] if found.bound else [])]
    for outcome in rows:
        table.add_row(*_row(outcome, least))
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def _row(outcome: Outcome, least: float | None) -> list[str]:
    phases = outcome.phases()
    ttft, tpot = phases["ttft"], phases["tpot"]
    return [
        outcome.name,
        f"{outcome.attainment:.2%}",
        f"{outcome.attainment_ttft:.2%}",
        f"{outcome.attainment_tpot:.2%}",
        f"{ttft['p50']:.2f} / {ttft['p95']:.2f}" if ttft else "",
        f"{tpot['p50'] * 1e3:.1f} / {tpot['p95'] * 1e3:.1f}" if tpot else "",
        f"{outcome.total_replica_hours:.2f}",
        f"{outcome.total_replica_hours / least:.2f}" if least else "",
        str(sum(outcome.actions.values())),
        str(outcome.failed_requests),
    ]
