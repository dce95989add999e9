"""An advice, and what came of it, as text."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoscaler.advisor.achieved import AchievedAdvice
    from autoscaler.advisor.advice import Advice, Prediction
    from autoscaler.simulation.scenario import Scenario

PIPED_WIDTH = 120


def advice_text(advice: Advice, scenario: Scenario, notes: Sequence[str], policy: Mapping[str, Any]) -> str:
    """The table, the sentence, the command, and what to know. Plain when piped."""
    from rich.console import Console
    from rich.table import Table

    trace, slo = scenario.trace, scenario.slo
    table = Table(
        title=f"{trace.name}: {len(trace.requests):,} requests in {trace.duration_s:.0f} s, "
        f"targets {slo.ttft_s * 1e3:g} ms TTFT, {slo.tpot_s * 1e3:g} ms TPOT"
    )
    table.add_column("workers")
    for heading in ("attained", "TTFT", "TPOT", "TTFT p95 ms", "TPOT p95 ms", "worker-hours", "margin"):
        table.add_column(heading, justify="right")
    for one in advice.predictions:
        table.add_row(*_row(one, advice.best))
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    lines = [advice.reason, f"Apply: {advice.best.candidate.apply}"]
    if advice.best.candidate.kind == "adaptive":
        lines.append(f"policy.yaml: {json.dumps(policy)}")
    lines += [f"note: {note}" for note in notes]
    with console.capture() as captured:
        console.print(table)
    return captured.get() + "".join(f"{line}\n" for line in lines)


def _row(one: Prediction, best: Prediction) -> list[str]:
    margin = "best" if one is best else f"{(one.attainment - best.attainment) * 100:+.1f} points"
    return [
        one.candidate.name,
        f"{one.attainment:.1%}",
        f"{one.attainment_ttft:.1%}",
        f"{one.attainment_tpot:.1%}",
        "" if one.ttft_p95_s is None else f"{one.ttft_p95_s * 1e3:.0f}",
        "" if one.tpot_p95_s is None else f"{one.tpot_p95_s * 1e3:.1f}",
        f"{one.worker_hours:.3f}",
        margin,
    ]


def achieved_text(found: AchievedAdvice) -> str:
    """Predicted against achieved."""
    lines = [
        f"{found.saved.candidate.name}: {found.saved.attainment:.1%} predicted, "
        f"{found.now.attainment:.1%} for the traffic that came, {found.attainment:.1%} achieved",
        *(
            f"  {name.replace('_', ' ')}: {was:g}, now {found.traffic[name]:g}"
            for name, was in found.saved.traffic.items()
            if name in found.traffic
        ),
        found.verdict,
    ]
    return "".join(f"{line}\n" for line in lines)
