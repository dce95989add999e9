"""What fetches are predicted to take: from calls before the first, from fetches and handoffs later."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from coordinator.peer_fetch.fetch_times import FIRST_CALL_S, ONE_PIECE_S, FetchTimes, weighted_median

A, B, C = ("a", 1), ("b", 1), ("c", 1)
PAIR, OTHER = (A, B), (C, B)


def taught_by_handoffs() -> FetchTimes:
    """A pace of 1.6."""
    times = FetchTimes()
    for lane_s in (0.002, 0.004, 0.008, 0.016):
        times.record_handoff(PAIR, lane_s, 0.001 + 1.6 * lane_s, 0.0)
    return times


def test_the_first_fetch_is_what_it_is_made_of() -> None:
    times = FetchTimes()
    assert times.predicted_s(PAIR, 0.004, 0.0) == pytest.approx(2 * FIRST_CALL_S + 0.004)
    for call_s in (0.002, 0.0022, 0.5):
        times.prefills.record(A, call_s)
    assert times.predicted_s(PAIR, 0.0, 0.0) == pytest.approx(2 * 0.002), (
        "no Reserve yet: as long as a Prefill"
    )
    times.reserves.record(C, 0.001)
    assert times.predicted_s(PAIR, 0.0, 0.0) == pytest.approx(0.003), "of another worker"
    times.reserves.record(B, 0.003)
    assert times.predicted_s(PAIR, 0.0, 0.0) == pytest.approx(0.005)


def test_requests_handoffs_say_how_slow_a_lane_is_beside_its_probe() -> None:
    times = taught_by_handoffs()
    assert times.pace(PAIR, 0.0) == pytest.approx(1.6)
    assert times.predicted_s(PAIR, 0.01, 0.0) == pytest.approx(2 * FIRST_CALL_S + 0.001 + 0.016), (
        "two calls and a handoff"
    )
    assert times.pace(PAIR, 3600.0) == 1.0, "an hour later it says nothing any more"


def test_a_fetch_s_own_write_says_it_better_from_the_first_on() -> None:
    times = taught_by_handoffs()
    times.record(PAIR, 0.001, 0.012, 0.0)
    times.record_write(PAIR, 0.001, 0.001 + 4 * 0.001, 0.0)
    assert times.pace(PAIR, 0.0) == pytest.approx(4.0), "of memory that is not in a cache"
    for number in range(3):
        times.record(PAIR, 0.01, 0.008 + 5 * 0.01, float(number))
    assert times.pace(PAIR, 3.0) == pytest.approx((0.058 - 0.012) / 0.009), "then fetches of other sizes"


def test_one_slow_write_does_not_end_all_fetches() -> None:
    """Its process stood still for 0.2 s; no other fetch is tried after it."""
    times = taught_by_handoffs()
    times.record_write(PAIR, 0.004, 0.2, 0.0)
    assert times.pace(PAIR, 1.0) == pytest.approx(3 * 1.6), "it counts as three times as long as predicted"
    assert times.pace(OTHER, 60.0) == pytest.approx(1.6), "and not for long"
    for at_s in (61.0, 62.0):
        times.record_write(PAIR, 0.004, 0.001 + 2 * 0.004, at_s)
    assert times.pace(PAIR, 63.0) == pytest.approx(2.0)


def test_a_pair_s_own_writes_count_for_it_alone() -> None:
    times = taught_by_handoffs()
    for _ in range(3):
        times.record_write(PAIR, 0.004, 0.001 + 2 * 0.004, 0.0)
    for _ in range(5):
        times.record_write(OTHER, 0.004, 60.0, 0.0)
    assert times.pace(PAIR, 1.0) == pytest.approx(2.0)
    assert times.pace(OTHER, 1.0) > 4


@pytest.mark.parametrize("told_s", [float("nan"), float("inf"), 1e305, 60.1, -1.0])
def test_what_no_write_can_take_says_nothing(told_s: float) -> None:
    times = FetchTimes()
    times.record_write(PAIR, 0.001, told_s, 0.0)
    times.record_handoff(PAIR, 0.001, told_s, 0.0)
    assert times.predicted_s(PAIR, 0.001, 0.0) == pytest.approx(2 * FIRST_CALL_S + 0.001)


@pytest.mark.parametrize("told_s", [float("nan"), float("inf"), float("-inf")])
def test_nor_does_what_no_call_can_take(told_s: float) -> None:
    times = FetchTimes()
    times.reserves.record(B, told_s)
    assert times.predicted_s(PAIR, 0.001, 0.0) == pytest.approx(2 * FIRST_CALL_S + 0.001)


def test_what_is_written_in_pieces_says_nothing_of_the_lane() -> None:
    times = FetchTimes()
    times.record_write(PAIR, ONE_PIECE_S + 0.001, 0.001, 0.0)
    assert times.pace(PAIR, 0.0) == 1.0


@pytest.mark.parametrize(("calls_s", "pace"), [(0.002, 1.0), (0.05, 1.4), (0.02, 5.0), (0.005, 0.6)])
def test_predictions_follow_what_is_measured(calls_s: float, pace: float) -> None:
    """After a dozen fetches of all sizes within 25%, also where one in ten is stopped half way."""
    pick, times = random.Random(5), FetchTimes()
    for number in range(12):
        lane_s = pick.uniform(0.001, 0.2)
        took_s = calls_s + pace * lane_s * pick.uniform(0.95, 1.05)
        times.record(PAIR, lane_s, took_s + (1.0 if number % 10 == 9 else 0.0), float(number))
    for lane_s in (0.01, 0.05, 0.2):
        assert times.predicted_s(PAIR, lane_s, 12.0) == pytest.approx(calls_s + pace * lane_s, rel=0.25)


def test_one_stopped_fetch_does_not_end_all_others() -> None:
    times = FetchTimes()
    for _ in range(20):
        times.record(PAIR, 0.02, 0.03, 0.0)
    times.record(PAIR, 0.02, 60.0, 0.0)
    assert times.predicted_s(PAIR, 0.02, 0.0) == pytest.approx(0.03)


def test_a_first_fetch_that_was_stopped_is_forgotten_in_time() -> None:
    times = FetchTimes()
    before_s = times.predicted_s(PAIR, 0.02, 0.0)
    times.record(PAIR, 0.02, 60.0, 0.0)
    assert before_s < times.predicted_s(PAIR, 0.02, 0.0) < 4 * before_s
    assert times.predicted_s(PAIR, 0.02, 600.0) == pytest.approx(before_s)


def test_a_pair_s_own_fetches_weigh_more_than_those_of_others() -> None:
    times = FetchTimes()
    for _ in range(8):
        times.record(OTHER, 0.001, 0.011, 0.0)
    assert times.predicted_s(PAIR, 0.001, 0.0) == pytest.approx(0.011)
    for _ in range(2):
        times.record(PAIR, 0.001, 0.006, 0.0)
    assert times.predicted_s(PAIR, 0.001, 0.0) == pytest.approx(0.006)


def test_the_weighted_median() -> None:
    assert weighted_median([(3.0, 1.0), (1.0, 1.0)]) == 2.0
    assert weighted_median([(3.0, 1.0), (1.0, 0.9), (9.0, 0.2)]) == 3.0


def played(
    seed: int, *, noise: float = 0.12, cold: float = 1.0, first: float = 1.0, starting_s: float = 0.0
) -> int:
    """How many of 24 are within a quarter. Six requests before, then eight fetches each of 128, 512 and 1,024 tokens
    between three workers, calls and lanes as measured, each some more or less at random; the real lane carries 0.7 of
    what its probe says. `cold`: what a fetch's bytes take of that, which are in no cache; `first`: how many times as
    long the first fetch and its write take as they would; `starting_s`: what six in ten of the calls before wait
    longer, on average.
    """
    pick, times, within = random.Random(seed), FetchTimes(), 0

    def noisy(seconds: float) -> float:
        return seconds * pick.lognormvariate(0.0, noise)

    def starting() -> float:
        return pick.expovariate(1 / starting_s) if starting_s and pick.random() < 0.6 else 0.0

    for lane_s in (0.0005, 0.002, 0.004) * 2:
        times.reserves.record(B, noisy(0.0025) + starting())
        times.prefills.record(A, noisy(0.004) + starting())
        times.record_handoff(PAIR, lane_s, noisy(0.001 + lane_s / 0.7) + starting(), 0.0)
    for number in range(24):
        lane_s, now = (0.0005, 0.002, 0.004)[number // 8], 3.0 * number
        pair = (PAIR, OTHER, (B, C))[pick.randrange(3)]
        took_s = noisy(0.0075 + cold * lane_s / 0.7) * (first if number == 0 else 1.0)
        within += 0.75 <= took_s / times.predicted_s(pair, lane_s, now) <= 1.25
        times.record(pair, lane_s, took_s, now)
        write_s = noisy(0.001 + cold * lane_s / 0.7) * (first if number == 0 else 1.0)
        times.record_write(pair, lane_s, write_s, now)
    return within


@pytest.mark.parametrize(
    ("noise", "cold", "first", "starting_s", "least"),
    [
        (0.12, 1.0, 1.0, 0.0, 21.4),
        (0.08, 1.0, 1.0, 0.0, 23.4),
        (0.12, 2.4, 1.0, 0.0, 21.3),
        (0.12, 2.4, 2.0, 0.0, 20.5),
        (0.08, 2.4, 2.0, 0.0, 22.4),
        (0.08, 2.4, 2.0, 0.01, 21.3),
    ],
)
def test_fetches_as_the_bench_makes_them_are_within_a_quarter_from_the_first_on(
    noise: float, cold: float, first: float, starting_s: float, least: float
) -> None:
    """Means of 100 of 24."""
    found = [played(n, noise=noise, cold=cold, first=first, starting_s=starting_s) for n in range(100)]
    assert mean(found) >= least
