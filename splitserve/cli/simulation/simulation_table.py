"""The table of `splitserve simulate`: the policy, the baselines and the bound, one line each."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoscaler.simulation.evaluation.comparison import Comparison
    from autoscaler.simulation.outcome import Outcome
    from autoscaler.simulation.scenario import Scenario

PIPED_WIDTH = 160


def simulation_table(found: Comparison, scenario: Scenario) -> str:
    """As text, as wide as the terminal or `PIPED_WIDTH`."""
    from rich.console import Console
    from rich.table import Table

    slo = scenario.slo
    trace = scenario.trace
    table = Table(
        title=f"{trace.name}: {len(trace.requests):,} requests in {trace.duration_s / 60:.0f} min, "
        f"cold start {scenario.starts}, "
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
    bill = "".join(f"{line}\n" for line in found.cost.lines()) if found.cost else ""
    return captured.get() + bill + _preempted(found.policy) + _moved(found.policy)


def _preempted(outcome: Outcome) -> str:
    if not outcome.preempted_replicas:
        return ""
    return f"{outcome.preempted_replicas} replicas preempted, {outcome.resumed_requests} requests resumed elsewhere\n"


def _moved(outcome: Outcome) -> str:
    if (changes := outcome.leaning_changes) is None:
        return ""
    to = ", ".join(f"{count} to {pool}" for pool, count in changes.items())
    return f"changes of sides: {sum(changes.values())} ({to})\n"


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
