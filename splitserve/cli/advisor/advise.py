"""`splitserve advise`: which split of the workers a traffic asks for, and later whether that held."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splitserve.cli import options
from splitserve.cli.advisor.advice_table import achieved_text, advice_text
from splitserve.cli.advisor.record import RecordingAccess, record_to
from splitserve.cli.client.explain import Targets
from splitserve.cli.output import shown_progress, write
from splitserve.errors import InvalidArgumentError

if TYPE_CHECKING:
    from autoscaler.advisor.achieved import SavedAdvice
    from autoscaler.advisor.candidates import ClusterShape
    from autoscaler.advisor.recorded_traffic import RecordedTraffic
    from autoscaler.advisor.reported_engine import ReportedEngine
    from autoscaler.simulation.outcome import Slo
    from autoscaler.simulation.scenario import Scenario

TraceFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A recording of `splitserve record`, or an Azure or Mooncake trace."),
]
Live = Annotated[bool, typer.Option("--live", help="Record the running cluster first, for --seconds.")]
Seconds = Annotated[
    float, typer.Option(min=0.1, max=86_400, metavar="SECONDS", help="How long --live records.")
]
Budget = Annotated[int, typer.Option(min=2, max=64, help="Workers of both pools together, at most.")]
TtftMs = Annotated[float, typer.Option(min=0.001, max=3_600_000, help="Target of the first token.")]
TpotMs = Annotated[float, typer.Option(min=0.001, max=3_600_000, help="Target of each further token.")]
Goal = Annotated[float, typer.Option(help="Share of requests that shall keep to both targets.")]
AllWorkers = Annotated[
    bool, typer.Option("--all-workers", help="Use the whole budget; do not try smaller clusters.")
]
EngineModelFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Engine model: JSON, or a recording to fit it from. Default: fitted from the trace's own reports.",
    ),
]
EnginePreset = Annotated[str | None, typer.Option(help="Engine model by name, as for `splitserve simulate`.")]
ColdStart = Annotated[
    float,
    typer.Option(min=0, max=86_400, metavar="SECONDS", help="Of a worker that the adaptive policy starts."),
]
Limit = Annotated[
    float, typer.Option(min=1, max=86_400, metavar="SECONDS", help="For all replays together, about.")
]
Save = Annotated[Path | None, typer.Option(metavar="FILE", help="Keep the prediction, for --check.")]
Check = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Compare the prediction that --save kept with what came of it."),
]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("advise")(advise)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is advised on. Targets in milliseconds."""

    ttft_ms: float
    tpot_ms: float
    cold_start_s: float
    engine: ReportedEngine | None
    """None: as the traffic tells."""


def advise(
    trace: TraceFile = None,
    columns: options.Columns = None,
    live: Live = False,
    seconds: Seconds = 60.0,
    budget: Budget = 2,
    ttft_ms: TtftMs = 2000.0,
    tpot_ms: TpotMs = 100.0,
    goal: Goal = 0.95,
    all_workers: AllWorkers = False,
    engine_model: EngineModelFile = None,
    engine_preset: EnginePreset = None,
    cold_start: ColdStart = 60.0,
    limit: Limit = 300.0,
    save: Save = None,
    check: Check = None,
    as_json: options.AsJson = False,
    target: Targets = None,
    api_key: options.ApiKey = None,
    tls: options.TlsClient = None,
    cluster_token_file: options.ClusterTokenFile = None,
) -> None:
    """Say which split of the workers a recorded traffic asks for, and why."""
    from autoscaler.advisor.achieved import load_advice
    from autoscaler.advisor.advice import AdviceTerms
    from autoscaler.advisor.recorded_traffic import load_traffic

    if (trace is None) == (not live):
        raise InvalidArgumentError("give either --trace FILE or --live", field="trace")
    if engine_model is not None and engine_preset is not None:
        message = "engine_model and engine_preset exclude each other"
        raise InvalidArgumentError(message, field="engine_model")
    if live and columns is not None:
        raise InvalidArgumentError("columns: there is no --trace to read", field="columns")
    terms = AdviceTerms(budget, goal, not all_workers, limit)
    # What may be wrong with other files is said before traffic is recorded, which may take a day.
    saved = None if check is None else load_advice(check)
    wanted = _Wanted(ttft_ms, tpot_ms, cold_start, _given_engine(engine_model, engine_preset))
    with tempfile.TemporaryDirectory() as scratch:
        if trace is None:
            trace = Path(scratch) / "live.jsonl"
            record_to(trace, RecordingAccess.of(target, api_key, tls, cluster_token_file), seconds)
        traffic = load_traffic(trace, options.column_map(columns))
    if saved is not None:
        _check(saved, traffic, as_json=as_json)
        return
    _advise(traffic, terms, wanted, save, as_json=as_json)


def _advise(
    traffic: RecordedTraffic, terms: Any, wanted: _Wanted, save: Path | None, *, as_json: bool
) -> None:
    from autoscaler.advisor.achieved import save_advice, traffic_figures
    from autoscaler.advisor.advice import advise as find
    from autoscaler.advisor.candidates import policy_values
    from autoscaler.advisor.reported_engine import reported_engine
    from autoscaler.simulation.outcome import Slo

    engine = reported_engine(traffic) if wanted.engine is None else wanted.engine
    slo = Slo(wanted.ttft_ms / 1e3, wanted.tpot_ms / 1e3)
    scenario = _scenario(traffic, engine.model, slo, wanted.cold_start_s)
    with shown_progress("advise", lines=False) as progress:

        def tell(candidate: ClusterShape, done: int, total: int) -> None:
            progress(f"replayed {candidate.name}", done / total)

        advice = find(scenario, terms, tell)
    if save is not None:
        save_advice(save, advice, scenario)
    policy = policy_values(terms.budget, slo)
    notes = [*engine.notes]
    if traffic.unfinished:
        notes.append(
            f"{traffic.unfinished} of {len(traffic.requests)} recorded requests did not complete: "
            "they count with the answer that they had"
        )
    if advice.left_out:
        notes.append(f"{advice.left_out} candidates were left out for want of time (--limit)")
    found = {
        **advice.to_json(),
        "notes": notes,
        "engine": asdict(engine.model),
        "slo": asdict(slo),
        "traffic": traffic_figures(traffic.trace),
        "policy": policy,
    }
    write(f"{json.dumps(found)}\n" if as_json else advice_text(advice, scenario, notes, policy))


def _given_engine(file: Path | None, name: str | None) -> ReportedEngine | None:
    from autoscaler.advisor.reported_engine import ReportedEngine, measured_engine
    from autoscaler.sizing.engine_model import preset

    if file is not None:
        return measured_engine(file)
    return None if name is None else ReportedEngine(preset(name))


def _scenario(traffic: RecordedTraffic, engine: Any, slo: Slo, cold_start_s: float) -> Scenario:
    from autoscaler.simulation.scenario import Scenario
    from splitserve.config.coordinator import AdmissionConfig

    return Scenario(traffic.trace, engine, slo, cold_start_s, admission=AdmissionConfig())


def _check(saved: SavedAdvice, traffic: RecordedTraffic, *, as_json: bool) -> None:
    from autoscaler.advisor.achieved import achieved

    found = achieved(saved, traffic, _scenario(traffic, saved.engine, saved.slo, 60.0))
    write(f"{json.dumps(found.to_json())}\n" if as_json else achieved_text(found))
