"""The default policy against its baselines and the clairvoyant bound: `python -m bench.autoscaling --traces DIR`.

Six cases (three traces, cold starts of 60 and 180 s), a constant load on a scaling boundary, and a burst. What must
hold, and whether it does, is printed last; the exit code is 1 when something does not.

* attained: share of requests within both targets.
* x bound: replica-hours over those of the clairvoyant schedule
  (`autoscaler.simulation.evaluation.clairvoyant`) that attains 97% in the same simulator with the same cold start.
* better on both: more attained, and in fewer replica-hours.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from autoscaler.simulation.engine_model import preset
from autoscaler.simulation.evaluation.baselines import BASELINES
from autoscaler.simulation.evaluation.comparison import Comparison, compare
from autoscaler.simulation.outcome import Outcome, Slo
from autoscaler.simulation.simulator import Scenario
from autoscaler.simulation.traces.synthetic import TraceShape, synthetic
from bench.autoscaling.cases import CASES, COLD_STARTS_S, default_policy, scenario_of
from bench.machine import this_machine
from splitserve.errors import SplitserveError

ATTAINMENT = 0.97
OVER_BOUND = 1.3
BEATEN_IN = 4
ACTIONS_AT_CONSTANT_LOAD = 1
RECOVERY_S = 30.0
CPU_MS = 1.0
CONSTANT_S = 1800.0
SETTLE_S = 900.0


@dataclass(frozen=True, slots=True)
class Bar:
    """A condition that must hold."""

    what: str
    value: str
    holds: bool


def beats(one: Outcome, other: Outcome) -> bool:
    """Whether `one` has higher attainment in fewer replica-hours."""
    return one.attainment > other.attainment and one.total_replica_hours < other.total_replica_hours


def constant_at_a_boundary(cold_start_s: float) -> Outcome:
    """Half an hour of constant load on a scaling boundary (two prefill, one decode replicas), after a quarter of an
    hour for the policy to settle."""
    engine, slo = preset("h100-8b"), Slo(2.0, 0.1)
    rate = 2.0 / engine.prompt_s(2000)
    shape = TraceShape(
        "constant", rate, rate, SETTLE_S + CONSTANT_S, prompt_tokens=2000, output_tokens=100, seed=1
    )
    scenario = Scenario(synthetic(shape), engine, slo, cold_start_s)
    return compare(scenario, default_policy(slo, cold_start_s)).policy


def burst(cold_start_s: float) -> tuple[Outcome, float]:
    """Load that triples at once and stays; the run, and seconds from the step until targets are met for good
    (`recovery_s`)."""
    engine, slo = preset("h100-8b"), Slo(2.0, 0.1)
    rate = 3.0 / engine.prompt_s(2000) * 0.7
    shape = TraceShape(
        "burst", rate, 3 * rate, 2400.0, burst_s=1200.0, prompt_tokens=2000, output_tokens=100, seed=1
    )
    scenario = Scenario(synthetic(shape), engine, slo, cold_start_s)
    outcome = compare(scenario, default_policy(slo, cold_start_s)).policy
    return outcome, recovery_s(outcome, shape.duration_s / 2)


def recovery_s(outcome: Outcome, since_s: float) -> float:
    """Seconds from `since_s` until 95% of the arrivals of every later 10 s window meet both targets."""
    windows: dict[int, list[bool]] = {}
    for request in outcome.requests:
        if request.arrival_s >= since_s:
            met = outcome.ttft_met(request) and outcome.tpot_met(request)
            windows.setdefault(int((request.arrival_s - since_s) // 10), []).append(met)
    late = [index for index, met in windows.items() if sum(met) < 0.95 * len(met)]
    return (max(late) + 1) * 10.0 if late else 0.0


def actions_after(outcome: Outcome, since_s: float) -> int:
    """Number of actions from `since_s` on."""
    return sum(at >= since_s for at, _ in outcome.action_times)


def bars_of(found: Sequence[tuple[Scenario, Comparison]]) -> list[Bar]:
    """Conditions on the six cases."""
    bars = []
    beaten: dict[str, int] = {"hpa-p95-latency": 0, "dynamo-thresholds": 0}
    for scenario, comparison in found:
        policy, name = comparison.policy, _title(scenario)
        if scenario.cold_start_s == COLD_STARTS_S[0] and comparison.bound is not None:
            over = policy.total_replica_hours / comparison.bound.replica_hours
            bars.append(Bar(f"{name}: attained", f"{policy.attainment:.4f}", policy.attainment >= ATTAINMENT))
            bars.append(Bar(f"{name}: x bound", f"{over:.3f}", over <= OVER_BOUND))
        better = [other.name for other in comparison.others if beats(other, policy)]
        bars.append(Bar(f"{name}: baselines better on both", ", ".join(better) or "none", not better))
        for other in comparison.others:
            if other.name in beaten:
                beaten[other.name] += beats(policy, other)
    for name, times in beaten.items():
        bars.append(Bar(f"better on both than {name}", f"{times} of {len(found)}", times >= BEATEN_IN))
    worst = max(c.policy.cpu_s / len(c.policy.requests) * 1e3 for _, c in found)
    bars.append(Bar("CPU ms a request", f"{worst:.3f}", worst <= CPU_MS))
    return bars


def synthetic_bars() -> list[Bar]:
    """Conditions at constant load and after a burst."""
    bars = []
    for cold_s in COLD_STARTS_S:
        constant = constant_at_a_boundary(cold_s)
        actions = actions_after(constant, SETTLE_S)
        what = f"constant load at a boundary, cold start {cold_s:g} s: actions in 30 min"
        bars.append(Bar(what, str(actions), actions <= ACTIONS_AT_CONSTANT_LOAD))
        _, took_s = burst(cold_s)
        what = f"burst, cold start {cold_s:g} s: recovered after s"
        bars.append(Bar(what, f"{took_s:g}", took_s <= cold_s + RECOVERY_S))
    return bars


def _title(scenario: Scenario) -> str:
    return f"{scenario.trace.name}, {scenario.cold_start_s:g} s"


def _table(found: Sequence[tuple[Scenario, Comparison]]) -> Table:
    table = Table(title="attained / replica-hours / x bound / actions")
    table.add_column("case")
    for name in ("policy", *BASELINES, "clairvoyant"):
        table.add_column(name, justify="right")
    for scenario, comparison in found:
        hours = comparison.bound.replica_hours if comparison.bound else math.nan
        rows = [
            comparison.policy,
            *comparison.others,
            *([comparison.bound.outcome] if comparison.bound else []),
        ]
        cells = [
            f"{o.attainment:.1%}\n{o.total_replica_hours:.1f} h\n{o.total_replica_hours / hours:.2f}\n"
            f"{sum(o.actions.values())}"
            for o in rows
        ]
        table.add_row(_title(scenario), *cells, end_section=True)
    return table


def _json(found: Sequence[tuple[Scenario, Comparison]], bars: Sequence[Bar]) -> dict[str, Any]:
    cases = [
        {
            "trace": s.trace.name,
            "cold_start_s": s.cold_start_s,
            "requests": len(s.trace.requests),
            **c.to_json(),
        }
        for s, c in found
    ]
    return {
        "machine": asdict(this_machine()),
        "cases": cases,
        "bars": [{"what": bar.what, "value": bar.value, "holds": bar.holds} for bar in bars],
    }


def run(arguments: argparse.Namespace) -> int:
    """Runs the selected cases and prints the results."""
    found = []
    for case in CASES:
        if arguments.only and arguments.only not in case.trace:
            continue
        for cold_s in COLD_STARTS_S if arguments.cold_start is None else (arguments.cold_start,):
            scenario = scenario_of(case, arguments.traces, cold_s)
            names = [] if arguments.no_baselines else list(BASELINES)
            share = None if arguments.no_bound else ATTAINMENT
            comparison = compare(scenario, default_policy(case.slo, cold_s), names, share)
            found.append((scenario, comparison))
            print(f"{_title(scenario)}: done", file=sys.stderr, flush=True)
    bars = [*bars_of(found), *synthetic_bars()]
    if arguments.json:
        print(json.dumps(_json(found, bars)))
    else:
        console = Console(width=None if sys.stdout.isatty() else 170)
        console.print(_table(found))
        for bar in bars:
            console.print(
                f"[{'green' if bar.holds else 'red'}]{'ok ' if bar.holds else 'NOT'}[/] {bar.what}: {bar.value}"
            )
    return 0 if all(bar.holds for bar in bars) else 1


def main() -> int:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.autoscaling", description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True, help="folder of the published traces")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", help="only traces whose name contains this")
    parser.add_argument("--cold-start", type=float, help="only this cold start, seconds")
    parser.add_argument("--no-bound", action="store_true", help="without the clairvoyant bound")
    parser.add_argument("--no-baselines", "--no-opponents", action="store_true")
    arguments = parser.parse_args()
    try:
        return run(arguments)
    except SplitserveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
