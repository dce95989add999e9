"""Which part of a fetch is said to have missed its prediction."""

from __future__ import annotations

from typing import Any

import pytest

from bench.kv_tiers.fetch_parts import FetchTimesRow, misses, spreads, times_of


def fetched(**changes: float) -> dict[str, Any]:
    values = {"took_ms": 10.0, "predicted_ms": 10.0, "wait_ms": 0.5, "lane_ms": 1.0, "pace": 2.5}
    return values | {"reserve_ms": 3.0, "waited_ms": 0.4} | changes


def test_a_fetch_is_divided_into_what_both_sides_say() -> None:
    row = times_of(fetched(), {"written_s": 7.004, "computed_s": 7.0})
    assert (row.wait, row.calls, row.lane) == (0.5, 7.0, 2.5)
    assert (row.reserve, row.write, row.rest) == (3.0, 4.0, 3.0)
    assert times_of(fetched(), None).rest == 7.0, "the holder has not said it"


def rows(*changes: dict[str, float]) -> list[FetchTimesRow]:
    normal = [times_of(fetched(), {"written_s": 0.004, "computed_s": 0.0})] * 4
    return [
        *normal,
        *(
            times_of(
                fetched(**{name: value for name, value in each.items() if name != "write"}),
                {"written_s": each.get("write", 4.0) / 1e3, "computed_s": 0.0},
            )
            for each in changes
        ),
    ]


def test_spreads_are_medians() -> None:
    found = spreads(rows({"took_ms": 20.0, "write": 14.0}))
    assert found["took"] == (10.0, 0.0)
    assert found["write"] == (4.0, 0.0)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"took_ms": 20.0, "write": 14.0}, "5: 2.00, write +10.0 ms"),
        ({"took_ms": 20.0, "reserve_ms": 12.0}, "5: 2.00, reserve +9.0 ms"),
        ({"took_ms": 20.0}, "5: 2.00, rest +10.0 ms"),
        ({"predicted_ms": 5.0}, "5: 2.00, prediction +5.0 ms"),
        ({"predicted_ms": 20.0}, "5: 0.50, prediction -10.0 ms"),
        ({"took_ms": 6.0, "write": 1.0}, "5: 0.60, write -3.0 ms"),
    ],
)
def test_the_part_that_is_furthest_off_is_told(change: dict[str, float], told: str) -> None:
    assert misses(rows(change)) == [told]


def test_nothing_is_told_of_what_is_near() -> None:
    assert misses(rows({"took_ms": 12.0, "write": 6.0})) == []
    assert misses([]) == []
