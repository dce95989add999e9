"""The default policy against opponents at their best and the clairvoyant bound: `python -m bench.autoscaling`.

* attained: share of requests within both targets.
* x bound: replica-hours over those of the clairvoyant schedule (`bench.autoscaling.opponents.clairvoyant`), or of
  the best static counts where those are fewer.
* better on both: more attained, and in fewer replica-hours.

`--tune` runs the grids on the tuning cases and prints what is best; that stands in `tuning.py`, with which the judged
cases are run. What must hold, and whether it does, is printed last; the exit code is 1 when something does not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from autoscaler.simulation.simulator import POLICY_NAME
from bench.autoscaling.attainment import Bar, synthetic_bars
from bench.autoscaling.cases import CASES, QUICK, STARTS
from bench.autoscaling.opponents.baselines import STATIC_BEST
from bench.autoscaling.replays import ATTAINMENT, BOUND, Replay, ReplayRow, all_replayed
from bench.autoscaling.tuning import GRIDS, OPPONENTS, TUNED, best_of, tuning_replays
from bench.machine import this_machine
from bench.option_values import positive_whole
from splitserve.errors import SplitserveError

OVER_BOUND = 1.2
WIDTH = 200

Verdicts = Mapping[tuple[str, str], Sequence[ReplayRow]]
"""Rows by case and kind of starts; the policy's first."""


def judged_replays(arguments: argparse.Namespace) -> list[Replay]:
    """All that is run on the judged cases."""
    names = [
        POLICY_NAME,
        *([] if arguments.no_baselines else OPPONENTS),
        *([] if arguments.no_bound or arguments.quick else [BOUND]),
    ]
    return [
        Replay(case, kind, name, TUNED.get(name, {}), arguments.admission)
        for case in (QUICK if arguments.quick else CASES)
        if case.judged
        and (not arguments.only or {case.name, case.trace.partition(".")[0]} & set(arguments.only))
        for kind in case.starts
        if kind in _kinds(arguments)
        for name in names
    ]


def _kinds(arguments: argparse.Namespace) -> Sequence[str]:
    return [arguments.starts] if arguments.starts else list(STARTS)


def by_case(rows: Iterable[ReplayRow]) -> Verdicts:
    """The rows of each case and kind of starts, in order."""
    rows_by_case: dict[tuple[str, str], list[ReplayRow]] = {}
    for row in rows:
        rows_by_case.setdefault((row.case, row.starts), []).append(row)
    return rows_by_case


def bars_of(rows_by_case: Verdicts, is_quick: bool) -> list[Bar]:
    """Conditions on the judged cases. On quick ones, which are too short to attain, only who is better on both."""
    bars = []
    for (case, kind), rows in rows_by_case.items():
        title = f"{case}, {kind}"
        policy = next(row for row in rows if row.name == POLICY_NAME)
        bound = bound_of(rows)
        better = [row.name for row in rows if row.name not in (POLICY_NAME, BOUND) and row.beats(policy)]
        bars.append(Bar(f"{title}: better on both", ", ".join(better) or "none", not better))
        if not is_quick:
            bars.append(
                Bar(f"{title}: attained", f"{policy.attainment:.4f}", policy.attainment >= ATTAINMENT)
            )
        if bound is not None:
            over = policy.replica_hours / bound.replica_hours
            bars.append(Bar(f"{title}: x bound", f"{over:.3f}", over <= OVER_BOUND))
    return bars


def bound_of(rows: Sequence[ReplayRow]) -> ReplayRow | None:
    """The cheapest that knows all arrivals and attains the bar; None where no bound was sought, or none attains.

    That is the clairvoyant schedule, or constant counts where those are cheaper, as in traces with many prefix hits,
    which the schedule's form does not foresee.
    """
    known = [row for row in rows if row.name in (BOUND, STATIC_BEST) and row.attainment >= ATTAINMENT]
    was_sought = any(row.name == BOUND for row in rows)
    return min(known, key=lambda row: row.replica_hours, default=None) if was_sought else None


def _table(rows_by_case: Verdicts) -> Table:
    table = Table(title="attained / replica-hours / x bound / actions")
    table.add_column("case")
    names = list(dict.fromkeys(row.name for rows in rows_by_case.values() for row in rows))
    for name in names:
        table.add_column(name, justify="right")
    for (case, kind), rows in rows_by_case.items():
        cells = {row.name: row for row in rows}
        bound = bound_of(rows)
        shown = [_cell(cells[name], bound) if name in cells else "" for name in names]
        table.add_row(f"{case}\n{kind}\n{rows[0].requests:,}", *shown, end_section=True)
    return table


def _cell(row: ReplayRow, bound: ReplayRow | None) -> str:
    over = f"{row.replica_hours / bound.replica_hours:.2f}" if bound else "-"
    return f"{row.attainment:.1%}\n{row.replica_hours:.1f} h\n{over}\n{row.actions}"


def _json(rows: Sequence[ReplayRow], bars: Sequence[Bar]) -> dict[str, Any]:
    return {
        "machine": asdict(this_machine()),
        "tuned_on": [case.name for case in CASES if not case.judged],
        "grids": {name: list(grid) for name, grid in GRIDS.items()},
        "tuned": TUNED,
        "runs": [asdict(row) for row in rows],
        "bars": [asdict(bar) for bar in bars],
    }


def _tune(arguments: argparse.Namespace) -> int:
    replays = tuning_replays()
    if arguments.only:
        replays = [replay for replay in replays if replay.name in arguments.only]
    rows = all_replayed(replays, arguments.traces, arguments.processes)
    best = best_of(rows)
    if arguments.json:
        print(json.dumps(_json(rows, [])))
        return 0
    chosen = {name: dict(row.knobs) for name, row in best.items()}
    print(json.dumps(chosen, indent=4))
    return 0


def run(arguments: argparse.Namespace) -> int:
    """Runs the selected cases and prints the results."""
    rows = all_replayed(judged_replays(arguments), arguments.traces, arguments.processes)
    rows_by_case = by_case(rows)
    bars = bars_of(rows_by_case, arguments.quick)
    if not arguments.only and not arguments.quick:
        bars += synthetic_bars()
    if arguments.json:
        print(json.dumps(_json(rows, bars)))
    else:
        console = Console(width=None if sys.stdout.isatty() else WIDTH)
        console.print(_table(rows_by_case))
        for bar in bars:
            mark = "[green]ok " if bar.holds else "[red]NOT"
            console.print(f"{mark}[/] {bar.what}: {bar.value}")
    return 0 if all(bar.holds for bar in bars) else 1


def main(given: Sequence[str] | None = None) -> int:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.autoscaling", description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, default=Path(), help="folder of the published traces")
    parser.add_argument("--json", action="store_true")
    names = "only these cases, or the cases of these traces; with --tune these baselines"
    parser.add_argument("--only", nargs="+", metavar="NAME", help=names)
    parser.add_argument("--starts", choices=list(STARTS), help="only this kind of cold starts")
    parser.add_argument("--no-bound", action="store_true", help="without the clairvoyant bound")
    parser.add_argument("--no-baselines", "--no-opponents", action="store_true")
    parser.add_argument("--tune", action="store_true", help="run the grids on the tuning cases instead")
    parser.add_argument("--quick", action="store_true", help="a short synthetic case, without trace files")
    parser.add_argument("--admission", action="store_true", help="requests pass the coordinator's admission")
    parser.add_argument("--processes", type=positive_whole, default=1)
    arguments = parser.parse_args(given)
    try:
        return _tune(arguments) if arguments.tune else run(arguments)
    except SplitserveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
