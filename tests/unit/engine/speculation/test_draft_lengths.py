"""The policy drafts as much as pays, and nothing where nothing does."""

from __future__ import annotations

import itertools

import pytest

from engine.speculation.draft_lengths import (
    FORGET_AFTER,
    LEAST_SHARE,
    Acceptance,
    RowCosts,
    SequenceAcceptance,
    choose_lengths,
)

MEMORY_BOUND = {1: 1.0, 2: 1.05, 4: 1.15, 8: 1.4, 16: 2.4}
COMPUTE_BOUND = {rows: float(rows) for rows in range(1, 17)}


def costs_of(times: dict[int, float]) -> RowCosts:
    costs = RowCosts()
    for _ in range(40):
        for rows, seconds in times.items():
            costs.record(rows, seconds)
    return costs


def test_sure_drafts_are_checked_whole_where_weights_bound_the_step() -> None:
    assert choose_lengths([7], [0.95], costs_of(MEMORY_BOUND), 16) == [7]


def test_unsure_ones_in_part() -> None:
    (length,) = choose_lengths([7], [0.5], costs_of(MEMORY_BOUND), 16)
    assert 1 <= length <= 3


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_nothing_where_arithmetic_bounds_the_step(batch: int) -> None:
    assert choose_lengths([7] * batch, [0.9] * batch, costs_of(COMPUTE_BOUND), 16) == [0] * batch


def test_nothing_where_drafts_are_wrong() -> None:
    assert choose_lengths([7], [0.05], costs_of(MEMORY_BOUND), 16) == [0]


def test_a_stream_without_a_draft_is_not_slowed_by_the_others() -> None:
    times = {2: 1.0, 3: 1.1, 4: 1.2, 8: 1.6}
    assert choose_lengths([7, 0], [0.95, 0.0], costs_of(times), 16) == [0, 0]
    assert choose_lengths([7, 7], [0.95, 0.95], costs_of(times), 16) != [0, 0]


def test_rows_that_cost_nothing_are_used_beside_a_stream_without_a_draft() -> None:
    free = {3: 1.0, 4: 1.0, 5: 1.5, 8: 2.0}
    assert sum(choose_lengths([3, 0, 0], [0.9, 0, 0], costs_of(free), 16)) == 1


def test_bounds_hold_whatever_is_measured() -> None:
    tables = (MEMORY_BOUND, COMPUTE_BOUND, {}, {4: 1.0}, {1: 1.0, 9: 0.5})
    for times, most, rate in itertools.product(tables, ([7, 0, 2], [1], [7] * 8), (0.0, 0.4, 1.0)):
        costs, rates = costs_of(times), [rate] * len(most)
        chosen = choose_lengths(most, rates, costs, 12)
        assert all(0 <= length <= limit for length, limit in zip(chosen, most, strict=True))
        assert len(most) + sum(chosen) <= 12
        if any(chosen):
            ratio = costs.ratio(len(most), sum(chosen))
            gains = [1 + sum(rate**place for place in range(1, length + 1)) for length in chosen]
            assert min(gains) >= LEAST_SHARE * ratio


def test_acceptance_is_learned_and_unlearned() -> None:
    rates = SequenceAcceptance(Acceptance())
    for _ in range(30):
        rates.record(3, 4, 0)
    assert rates.rate(3) < 0.1
    assert SequenceAcceptance(rates.everywhere).rate(3) < 0.3, "a new sequence begins where the others are"
    for _ in range(30):
        rates.record(3, 4, 4)
    assert rates.rate(3) > 0.9


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
