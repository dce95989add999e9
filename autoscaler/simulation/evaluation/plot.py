"""Plots a run over time. Needs `pip install 'splitserve[plot]'`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autoscaler.simulation.outcome import Moment, Outcome
from autoscaler.snapshot import POOLS, PoolName, ReplicaState
from splitserve.errors import FailedPreconditionError, InvalidArgumentError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from autoscaler.simulation.evaluation.clairvoyant import Bound

FORMATS = (".png", ".svg")
COLORS = {"prefill": "#1f77b4", "decode": "#d95f02"}
_ALIVE = (ReplicaState.READY, ReplicaState.STARTING, ReplicaState.STANDBY, ReplicaState.DRAINING)
_LIMIT = "#b2182b"
_MINUTE_S = 60.0


def check_plot_path(path: Path) -> None:
    """Raises InvalidArgumentError for an unsupported suffix or missing folder, FailedPreconditionError without
    matplotlib."""
    if path.suffix.lower() not in FORMATS:
        raise InvalidArgumentError(f"plot: {path} must end in {' or '.join(FORMATS)}", field="plot")
    if not path.parent.is_dir():
        raise InvalidArgumentError(f"plot: no such folder: {path.parent}", field="plot")
    try:
        import matplotlib  # noqa: F401 - only whether it is there
    except ImportError:
        raise FailedPreconditionError(
            "plot: needs matplotlib: pip install 'splitserve[plot]'", reason="NO_MATPLOTLIB"
        ) from None


def draw(path: Path, outcome: Outcome, title: str, bound: Bound | None = None) -> None:
    """Draws demand, replicas, TTFT, TPOT and queue under one time axis into a PNG or SVG file."""
    check_plot_path(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 12.5), layout="constrained")
    axes = figure.subplots(6, 1, sharex=True, height_ratios=[1.1, 1.3, 1.3, 1.1, 1.1, 0.9])
    minutes = [moment.at_s / _MINUTE_S for moment in outcome.moments]
    _demand(axes[0], minutes, outcome.moments)
    for axis, pool in zip(axes[1:3], POOLS, strict=True):
        _replicas(axis, minutes, outcome.moments, pool, bound)
    _latency(
        axes[3], outcome, "TTFT, s", outcome.slo.ttft_s, 1.0, [request.ttft_s for request in outcome.requests]
    )
    _latency(
        axes[4],
        outcome,
        "TPOT, ms",
        outcome.slo.tpot_s,
        1e3,
        [request.tpot_s for request in outcome.requests],
    )
    _queue(axes[5], minutes, outcome.moments)
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.margins(x=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("minutes")
    figure.align_ylabels(list(axes))
    figure.suptitle(f"{title}\n{_summary(outcome, bound)}", fontsize=11)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise InvalidArgumentError(f"plot: cannot write {path}: {error.strerror}", field="plot") from None


def _summary(outcome: Outcome, bound: Bound | None) -> str:
    hours = f"{outcome.total_replica_hours:.2f} replica-hours"
    if bound is not None and bound.replica_hours > 0:
        hours += f" ({outcome.total_replica_hours / bound.replica_hours:.2f} x clairvoyant)"
    actions = sum(outcome.actions.values())
    return f"{outcome.name}: {outcome.attainment:.1%} within the SLO, {hours}, {actions} actions"


def _demand(axis: Axes, minutes: Sequence[float], moments: Sequence[Moment]) -> None:
    axis.plot(
        minutes,
        [m.demand_tokens_per_s / 1e3 for m in moments],
        color=COLORS["prefill"],
        lw=1.2,
        label="prompt",
    )
    axis.set_ylabel("prompt,\nk tokens/s", color=COLORS["prefill"])
    axis.set_ylim(bottom=0)
    other = axis.twinx()
    other.plot(
        minutes,
        [m.output_tokens_per_s / 1e3 for m in moments],
        color=COLORS["decode"],
        lw=1.2,
        label="output",
    )
    other.set_ylabel("expected output,\nk tokens/s", color=COLORS["decode"])
    other.set_ylim(bottom=0)
    other.spines[["top"]].set_visible(False)
    axis.set_title("demand", loc="left", fontsize=10)


def _replicas(
    axis: Axes, minutes: Sequence[float], moments: Sequence[Moment], pool: PoolName, bound: Bound | None
) -> None:
    layers = {state: [m.replicas[pool][state.value] for m in moments] for state in _ALIVE}
    shown = {state: counts for state, counts in layers.items() if any(counts)}
    shades = {
        ReplicaState.READY: COLORS[pool],
        ReplicaState.STARTING: "#f0c05a",
        ReplicaState.STANDBY: "#8c8c8c",
        ReplicaState.DRAINING: "#c7b8d8",
    }
    axis.stackplot(
        minutes,
        list(shown.values()),
        labels=[state.value for state in shown],
        colors=[shades[state] for state in shown],
        step="post",
        alpha=0.75,
        lw=0,
    )
    if bound is not None:
        counts = bound.prefill if pool == "prefill" else bound.decode
        grid = np.linspace(0, minutes[-1] if minutes else 1, len(counts))
        axis.step(grid, counts, where="post", color="black", lw=1, ls="--", label="clairvoyant")
    axis.set_ylabel("replicas")
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_locator(_whole())
    axis.legend(loc="upper left", fontsize=8, ncols=len(shown) + 1, frameon=False, bbox_to_anchor=(0.1, 1.19))
    axis.set_title(f"{pool} pool", loc="left", fontsize=10)


def _latency(
    axis: Axes, outcome: Outcome, label: str, target_s: float, unit: float, values: Sequence[float | None]
) -> None:
    """p50 and p95 of the requests that arrived in each half minute, on a log scale, and the target."""
    width = 30.0
    groups: dict[int, list[float]] = {}
    for request, value in zip(outcome.requests, values, strict=True):
        if value is not None:
            groups.setdefault(int(request.arrival_s // width), []).append(value * unit)
    at = sorted(groups)
    times = [(index + 0.5) * width / _MINUTE_S for index in at]
    color = COLORS["prefill"] if unit == 1.0 else COLORS["decode"]
    for percent, style in ((95, "-"), (50, ":")):
        line = [float(np.percentile(groups[index], percent)) for index in at]
        axis.plot(times, line, color=color, ls=style, lw=1.2, label=f"p{percent}")
    axis.axhline(target_s * unit, color=_LIMIT, lw=1, ls="--", label=f"target {target_s * unit:g}")
    axis.set_yscale("log")
    _plain_log_scale(axis)
    axis.set_ylabel(label)
    axis.set_title(label.split(",")[0], loc="left", fontsize=10)
    axis.legend(loc="upper left", fontsize=8, ncols=3, frameon=False, bbox_to_anchor=(0.1, 1.22))


def _whole() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(integer=True, nbins=6)


def _plain_log_scale(axis: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _queue(axis: Axes, minutes: Sequence[float], moments: Sequence[Moment]) -> None:
    axis.fill_between(
        minutes, [m.backlog_tokens / 1e3 for m in moments], color=COLORS["prefill"], alpha=0.5, lw=0
    )
    axis.set_ylabel("prompt backlog,\nk tokens", color=COLORS["prefill"])
    axis.set_ylim(bottom=0)
    other = axis.twinx()
    other.plot(minutes, [m.waiting_reservations for m in moments], color=COLORS["decode"], lw=1.2)
    other.set_ylabel("waiting for\ndecode KV", color=COLORS["decode"])
    other.set_ylim(bottom=0, top=max(1.0, other.get_ylim()[1]))
    other.spines[["top"]].set_visible(False)
    axis.set_title("queue", loc="left", fontsize=10)
