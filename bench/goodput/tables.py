"""The report of rows, differences and goodput as tables."""

from __future__ import annotations

from typing import Any

from rich.table import Table

WIDTH = 118
"""Least width: the first table needs it."""


def tables(results: dict[str, Any]) -> list[Table]:
    """Rows, differences (if there are any) and goodput."""
    rows = Table(title="attained, with its 95% interval over seeds")
    for column in ("mix", "rate", "system", "attained"):
        rows.add_column(column, no_wrap=True)
    for column in (
        "short",
        "long",
        "TPOT kept",
        "TTFT p50 / p95 s",
        "TPOT p95 ms",
        "gap p95 ms",
        "not served",
    ):
        rows.add_column(column, justify="right")
    rows.add_column("others", justify="right")
    for row in results["rows"]:
        rows.add_row(
            *(row["mix"], f"{row['rate']:g}", row["system"] + _marks(row)),
            f"{row['attained']:.3f}{_interval(row)}",
            *(_number(row[name]) for name in ("attained_short", "attained_long", "tpot_attained")),
            f"{_number(row['ttft_p50_s'])} / {_number(row['ttft_p95_s'])}",
            *(_number(row[name], 1e3, 0) for name in ("tpot_p95_s", "max_gap_p95_s")),
            str(row["refused"] + row["failed"] + row["timed_out"]),
            f"{row['other_load']:.2f}",
        )
    against = Table(title="default less another, paired by seed", min_width=40)
    for column in ("mix", "rate", "less", "difference"):
        against.add_column(column)
    for row in results["differences"]:
        shown = f"{row['difference']:+.3f}{_interval(row)}"
        against.add_row(row["mix"], f"{row['rate']:g}", row["against"], shown)
    good = Table(title="goodput: requests a second with 90% attained", min_width=40)
    for column in ("mix", "system", "rate"):
        good.add_column(column)
    words = {"between": "", "at least": "at least ", "below": "below "}
    for mix, by_system in results["goodput"].items():
        for system, row in by_system.items():
            good.add_row(mix, system, f"{words[row['bound']]}{row['rate']:.2f}")
    return [table for table in (rows, against, good) if table.row_count]


def _marks(row: dict[str, Any]) -> str:
    return ("*" if row["late_generator"] else "") + ("!" if row["busy_machine"] else "")


def _interval(row: dict[str, Any]) -> str:
    return "" if row["low"] is None else f" ({row['low']:.3f} to {row['high']:.3f})"


def _number(value: float | None, factor: float = 1.0, digits: int = 2) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"
