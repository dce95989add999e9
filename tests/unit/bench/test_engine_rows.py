"""Result rows of the engine benchmark from measurements."""

from __future__ import annotations

import pytest

from bench.engine.rows import medians

LIMITS = [{"read_gb_per_s": rate, "device": "a GPU"} for rate in (40.0, 10.0, 30.0, 20.0)]


@pytest.mark.parametrize(("count", "rate"), [(1, 40.0), (3, 30.0), (4, 25.0)])
def test_limits_are_medians_and_a_name_stays(count: int, rate: float) -> None:
    assert medians(LIMITS[:count]) == {"read_gb_per_s": rate, "device": "a GPU"}


def test_of_nothing() -> None:
    assert medians([]) == {}
