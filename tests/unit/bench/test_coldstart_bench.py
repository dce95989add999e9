"""Figures of the cold start benchmark from known phases."""

from __future__ import annotations

from bench.coldstart.starts import TimedStart, medians, start_of


def test_a_start_has_the_phases_of_its_slowest_worker() -> None:
    quick = {"process": 1.0, "weights": 0.5, "warm_up": 0.25}
    slow = {"process": 1.0, "weights": 0.5, "warm_up": 1.0, "weights_from": "disk"}
    assert start_of([quick, slow], 4.0, 6.0) == TimedStart(1.0, 0.5, 1.0, rest=1.5, total=4.0, cpu=6.0)


def test_a_checkout_without_phases_has_only_a_total() -> None:
    assert start_of([], 4.0, 6.0) == TimedStart(0, 0, 0, rest=4.0, total=4.0, cpu=6.0)


def test_medians_are_of_each_figure() -> None:
    starts = [TimedStart(n, 2.0, 0.0, 0.0, 2.0 + n, 9.0 - n) for n in (1.0, 5.0, 3.0)]
    assert medians(starts) == TimedStart(3.0, 2.0, 0.0, 0.0, 5.0, 6.0)
