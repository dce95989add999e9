"""What of a fetch took how long, and which part makes it miss its prediction. Times in milliseconds. Pure.

reserve    the Reserve call at the taker; of it `waited` for the end of a step there
write      the holder's engine: from when it takes the prefix up until the last byte is acknowledged
rest       the call to the holder, what the taker does with the blocks, and its word to the coordinator
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

NEAR = (0.75, 1.25)
"""What a fetch may take, over what was predicted."""
PARTS = ("reserve", "write", "rest")


@dataclass(frozen=True)
class FetchTimesRow:
    """One fetch. `wait`, `lane` (by its probe, times `pace`) and `calls` are the parts of what was predicted."""

    took: float
    predicted: float
    wait: float
    calls: float
    lane: float
    pace: float
    reserve: float
    waited: float
    write: float
    rest: float

    @property
    def ratio(self) -> float:
        """What it took over what was predicted."""
        return self.took / self.predicted

    @property
    def is_near(self) -> bool:
        """Whether that is within a quarter."""
        return NEAR[0] <= self.ratio <= NEAR[1]


def times_of(fetched: Mapping[str, Any], written: Mapping[str, Any] | None) -> FetchTimesRow:
    """Of a coordinator's event `prefix.fetched` and its holder's `handoff.written`, if there is one."""
    lane_ms = fetched["pace"] * fetched["lane_ms"]
    write_ms = 1e3 * (written["written_s"] - written["computed_s"]) if written is not None else 0.0
    values = {
        "took": fetched["took_ms"],
        "predicted": fetched["predicted_ms"],
        "wait": fetched["wait_ms"],
        "calls": fetched["predicted_ms"] - fetched["wait_ms"] - lane_ms,
        "lane": lane_ms,
        "reserve": fetched["reserve_ms"],
        "waited": fetched["waited_ms"],
        "write": write_ms,
        "rest": max(0.0, fetched["took_ms"] - fetched["reserve_ms"] - write_ms),
    }
    return FetchTimesRow(
        pace=round(fetched["pace"], 2), **{name: round(value, 3) for name, value in values.items()}
    )


def spreads(rows: Sequence[FetchTimesRow]) -> dict[str, tuple[float, float]]:
    """Median of each part, and the median distance from it. Of at least one row."""
    found = {}
    for name in ("took", *PARTS):
        values = [getattr(row, name) for row in rows]
        middle = median(values)
        found[name] = (round(middle, 2), round(median(abs(value - middle) for value in values), 2))
    return found


def misses(rows: Sequence[FetchTimesRow]) -> list[str]:
    """Of each fetch that is not near: its number, its ratio, and the part that is furthest from its median, in the
    direction of the miss; `prediction` where none is as far off as the prediction is from the median."""
    told = []
    middles = {name: middle for name, (middle, _) in spreads(rows).items()} if rows else {}
    for number, row in enumerate(rows, 1):
        if row.is_near:
            continue
        sign = 1.0 if row.took > row.predicted else -1.0
        off = {name: sign * (getattr(row, name) - middles[name]) for name in PARTS}
        off["prediction"] = sign * (middles["took"] - row.predicted)
        worst = max(off, key=lambda name: off[name])
        told.append(f"{number}: {row.ratio:.2f}, {worst} {sign * off[worst]:+.1f} ms")
    return told
