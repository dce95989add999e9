"""The policy drafts as much as pays, and nothing where nothing does."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from engine.speculation.draft_lengths import (
    LEAST_GAIN,
    NOTHING_OWED,
    Share,
    choose_guesses,
    choose_lengths,
    may_pay,
)
from engine.speculation.row_costs import FORGET_AFTER, RowCosts

MEMORY_BOUND = {1: 1.0, 2: 1.05, 4: 1.15, 8: 1.4, 16: 2.4}
COMPUTE_BOUND = {rows: float(rows) for rows in range(1, 17)}


def costs_of(times: dict[int, float]) -> RowCosts:
    costs = RowCosts()
    for _ in range(40):
        for rows, seconds in times.items():
            costs.record(rows, seconds)
    return costs


def chances(rate: float, most: int) -> list[float]:
    return [rate**place for place in range(1, most + 1)]


def chosen(
    most: Sequence[int],
    rates: Sequence[float],
    times: dict[int, float],
    shares: Sequence[Share] | None = None,
    longest: float = math.inf,
) -> list[int]:
    drafts = [chances(rate, length) for rate, length in zip(rates, most, strict=True)]
    return choose_lengths(drafts, shares or [NOTHING_OWED] * len(most), costs_of(times), 16, longest)


def test_sure_drafts_are_checked_whole_where_weights_bound_the_step() -> None:
    assert chosen([7], [0.95], MEMORY_BOUND) == [7]


def test_unsure_ones_in_part() -> None:
    (length,) = chosen([7], [0.5], MEMORY_BOUND)
    assert 1 <= length <= 3


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_nothing_where_arithmetic_bounds_the_step(batch: int) -> None:
    assert chosen([7] * batch, [0.9] * batch, COMPUTE_BOUND) == [0] * batch
    assert not may_pay(batch, costs_of(COMPUTE_BOUND), 16)
    assert may_pay(batch, costs_of(MEMORY_BOUND), 16)


def test_nothing_where_drafts_are_wrong() -> None:
    assert chosen([7], [0.05], MEMORY_BOUND) == [0]


def test_one_stream_without_a_guess_does_not_stop_the_others() -> None:
    times = {4: 1.13, 6: 1.27, 8: 1.4, 12: 2.27}
    lengths = chosen([7, 7, 7, 0], [0.9, 0.9, 0.9, 0.0], times)
    assert sorted(lengths) == [0, 1, 1, 2]
    assert lengths[3] == 0


def test_a_stream_that_is_owed_all_of_a_step_is_not_slowed_by_the_others() -> None:
    times = {2: 1.0, 3: 1.1, 4: 1.2, 8: 1.6}
    owed = [Share(0.97, 0.0)] * 2
    assert chosen([7, 0], [0.95, 0.0], times, owed) == [0, 0]
    assert chosen([7, 7], [0.95, 0.95], times, owed) != [0, 0]
    ahead = [Share(0.97, 0.0), Share(0.97, 0.2)]
    assert chosen([7, 0], [0.95, 0.0], times, ahead) == [2, 0]


def test_who_is_owed_tokens_gets_rows_before_likelier_ones() -> None:
    times = {2: 1.0, 4: 1.0, 5: 3.0}
    assert chosen([7, 7], [0.95, 0.5], times) == [2, 0]
    assert chosen([7, 7], [0.95, 0.5], times, [NOTHING_OWED, Share(1.2, 0.0)]) == [1, 1]


def test_a_step_takes_no_longer_than_it_may() -> None:
    assert sum(chosen([7], [0.95], MEMORY_BOUND, longest=1.2)) <= 4
    assert chosen([7], [0.95], MEMORY_BOUND, longest=1.0) == [0]


def best_gain(
    drafts: Sequence[Sequence[float]],
    shares: Sequence[Share],
    costs: RowCosts,
    max_rows: int,
    longest: float,
) -> float:
    """By trying all lengths."""
    batch, best = len(drafts), LEAST_GAIN
    for lengths in itertools.product(*(range(len(each) + 1) for each in drafts)):
        count = sum(lengths)
        if not count or batch + count > max_rows:
            continue
        ratio = costs.ratio(batch, count)
        gains = [1 + sum(each[:length]) for each, length in zip(drafts, lengths, strict=True)]
        owed = all(gain >= share.least(ratio) for gain, share in zip(gains, shares, strict=True))
        if owed and ratio <= longest:
            best = max(best, sum(gains) / batch / ratio)
    return best


@pytest.mark.parametrize("seed", range(150))
def test_no_choice_gives_more(seed: int) -> None:
    pick = random.Random(seed)
    times, seconds = {}, 1.0
    for rows in range(1, 17):
        times[rows] = seconds = seconds * pick.choice([1.0, 1.02, 1.05, 1.1, 1.3])
    costs = costs_of({rows: times[rows] for rows in pick.sample(range(1, 17), 9)})
    batch, max_rows = pick.randint(1, 4), pick.randint(4, 12)
    drafts = []
    for _ in range(batch):
        first, further = pick.random(), pick.choice([0.3, 0.8, 0.95, 1.0])
        drafts.append([first * further**place for place in range(pick.randint(0, 5))])
    shares = [pick.choice([NOTHING_OWED, Share(pick.random(), pick.random() - 0.2)]) for _ in drafts]
    longest = pick.choice([math.inf, 1.2, 1.6])
    lengths = choose_lengths(drafts, shares, costs, max_rows, longest)
    best = best_gain(drafts, shares, costs, max_rows, longest)
    if not any(lengths):
        assert best == LEAST_GAIN
        return
    ratio = costs.ratio(batch, sum(lengths))
    gains = [1 + sum(each[:length]) for each, length in zip(drafts, lengths, strict=True)]
    assert sum(gains) / batch / ratio == pytest.approx(best)
    assert ratio <= longest
    assert batch + sum(lengths) <= max_rows
    assert all(gain >= share.least(ratio) - 1e-9 for gain, share in zip(gains, shares, strict=True))


@pytest.mark.parametrize("times", [MEMORY_BOUND, COMPUTE_BOUND, {}, {4: 1.0}, {1: 1.0, 9: 0.5}])
def test_bounds_hold_whatever_is_measured(times: dict[int, float]) -> None:
    for most, rate in itertools.product(([7, 0, 2], [1], [7] * 8), (0.0, 0.4, 1.0)):
        drafts = [chances(rate, length) for length in most]
        lengths = choose_lengths(drafts, [NOTHING_OWED] * len(most), costs_of(times), 12)
        assert all(0 <= length <= limit for length, limit in zip(lengths, most, strict=True))
        assert len(most) + sum(lengths) <= 12


def test_a_hiccup_does_not_close_a_number_of_rows_for_good() -> None:
    costs = costs_of({1: 1.0, 2: 1.05, 8: 1.4})
    costs.record(8, 50.0)
    assert costs.ratio(1, 7) < 1.6
    for _ in range(2 * FORGET_AFTER):
        costs.record(1, 1.0)
    assert 8 not in costs._seconds


def test_a_first_time_that_is_out_of_line_counts_little() -> None:
    costs = costs_of({1: 1.0})
    costs.record(8, 100.0)
    assert costs.ratio(1, 7) < 2.5


def test_guesses_that_take_time_are_as_long_as_that_pays() -> None:
    costs, chances = RowCosts(), [[0.8**n for n in range(1, 8)]]
    lengths = [
        choose_guesses(chances, [NOTHING_OWED], costs, 16, math.inf, cost).lengths[0]
        for cost in (0.0, 0.05, 0.2, 0.4, 0.6, 0.9)
    ]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == choose_lengths(chances, [NOTHING_OWED], costs, 16)[0]
    assert lengths[0] > lengths[2] > lengths[-1] == 0


def test_guesses_are_bounded_by_the_time_that_streams_have_with_the_time_they_take() -> None:
    costs, chances = RowCosts(), [[0.9**n for n in range(1, 8)]]
    for longest in (1.0, 1.2, 1.5, 2.0):
        found = choose_guesses(chances, [NOTHING_OWED], costs, 16, longest, 0.1)
        (length,) = found.lengths
        assert not length or costs.ratio(1, length) + 0.1 * length <= longest
    assert not any(choose_guesses(chances, [Share(0.97, -5.0)], costs, 16, math.inf, 0.1).lengths)


def test_nobody_is_asked_where_guessing_takes_too_long() -> None:
    assert may_pay(1, RowCosts(), 16, 0.5)
    assert not may_pay(1, RowCosts(), 16, 1.0)
    assert not may_pay(8, RowCosts(), 16, 1.0)
