"""Intervals over seeds, paired differences, and goodput from shares by rate."""

from __future__ import annotations

import random

import pytest

from bench.goodput.statistics import Estimate, GoodputRate, difference, goodput, mean_over_seeds, percentile


def test_one_seed_has_no_interval() -> None:
    assert mean_over_seeds([0.8]) == Estimate(0.8, None, None)


def test_equal_seeds_leave_no_doubt() -> None:
    assert mean_over_seeds([0.5] * 4) == Estimate(0.5, 0.5, 0.5)


def test_an_interval_is_the_same_each_time_and_has_the_mean_inside() -> None:
    shares = [0.9, 0.8, 0.95, 0.7, 0.85]
    found = mean_over_seeds(shares)
    assert found == mean_over_seeds(shares)
    assert found.low is not None
    assert found.high is not None
    assert 0.7 < found.low < found.value < found.high < 0.95


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    chance = random.Random(1)
    covered, trials = 0, 60
    for _ in range(trials):
        found = mean_over_seeds([chance.gauss(0.8, 0.05) for _ in range(20)])
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0.8 <= found.high
    assert covered / trials > 0.85


def test_pairs_see_what_luck_of_seeds_hides() -> None:
    other = [0.5, 0.6, 0.7, 0.8, 0.9]
    found = difference([share + 0.02 for share in other], [other])
    assert found.value == pytest.approx(0.02)
    assert found.low == pytest.approx(0.02)
    assert found.high == pytest.approx(0.02)


def test_the_best_of_others_is_that_by_mean_not_by_seed() -> None:
    # By seed the best of the two would always have 0.9; by mean both have 0.7.
    found = difference([0.8, 0.8], [[0.9, 0.5], [0.5, 0.9]])
    assert found.value == pytest.approx(0.1)


def test_pairs_need_the_same_seeds() -> None:
    with pytest.raises(ValueError, match="same seeds"):
        difference([0.8, 0.8], [[0.9]])


@pytest.mark.parametrize(
    ("attained", "found"),
    [
        ({1.0: 0.98, 2.0: 0.95}, GoodputRate(2.0, 2.0, "at least")),
        ({1.0: 0.89, 2.0: 0.95}, GoodputRate(1.0, 0.0, "below")),
        ({2.0: 0.8, 1.0: 1.0}, GoodputRate(1.5, 1.0, "between")),
        ({1.0: 0.9, 2.0: 0.5}, GoodputRate(1.0, 1.0, "between")),
        # What comes back after it was lost is luck.
        ({1.0: 0.95, 2.0: 0.85, 3.0: 0.92}, GoodputRate(1.5, 1.0, "between")),
    ],
)
def test_goodput_is_where_the_share_first_falls_below(
    attained: dict[float, float], found: GoodputRate
) -> None:
    got = goodput(attained)
    assert (got.tried, got.bound) == (found.tried, found.bound)
    assert got.rate == pytest.approx(found.rate)


def test_goodput_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no rate"):
        goodput({})


def test_percentiles() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, share) for share in (0.01, 0.5, 0.95, 0.99, 1.0)] == [1, 50, 95, 99, 100]
    assert percentile([3.0], 0.5) == 3.0
    assert percentile([], 0.5) is None
