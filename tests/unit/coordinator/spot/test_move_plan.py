"""Which requests leave a preempted worker, and when."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from coordinator.spot.move_plan import CAUTION, MoveLimits, RemainingWork, moves_now

LIMITS = MoveLimits(at_once=2, move_s=1.0)


def test_what_ends_for_certain_stays() -> None:
    works = [RemainingWork("a", 1.0, 2.0), RemainingWork("b", 3.0, 7.9)]
    assert moves_now(works, 10.0, 0, LIMITS) == []


def test_the_last_to_end_move_first_and_only_so_many_at_once() -> None:
    works = [
        RemainingWork("a", 20.0, 30.0),
        RemainingWork("b", 40.0, 50.0),
        RemainingWork("c", 30.0, 90.0),
        RemainingWork("d", 1.0, 2.0),
    ]
    assert moves_now(works, 10.0, 0, LIMITS) == ["b", "c"]
    assert moves_now(works, 10.0, 1, LIMITS) == ["b"]
    assert moves_now(works, 10.0, 2, LIMITS) == []


def test_what_may_end_in_time_waits_until_the_moves_just_fit() -> None:
    works = [RemainingWork(name, 1.0, 60.0) for name in "abcd"]
    assert moves_now(works, 10.0, 0, LIMITS) == []
    assert moves_now(works, 2.1, 0, LIMITS) == []
    assert moves_now(works, 2.0, 0, LIMITS) == ["a", "b"]


def test_once_the_time_is_over_all_move() -> None:
    works = [
        RemainingWork("a", 0.1, 0.1),
        RemainingWork("b", 1.0, 60.0),
        RemainingWork("c", math.inf, math.inf),
    ]
    assert moves_now(works, 0.0, 2, LIMITS) == ["a", "b", "c"]


def test_what_is_not_known_moves_first() -> None:
    works = [RemainingWork("a", 90.0, 90.0), RemainingWork("b", math.inf, math.inf)]
    assert moves_now(works, 10.0, 1, LIMITS) == ["b"]


durations = st.one_of(st.floats(0, 1000), st.just(math.inf))


@given(
    st.lists(st.tuples(durations, durations), max_size=20),
    st.floats(-5, 200),
    st.integers(0, 6),
    st.integers(1, 5),
    st.floats(0, 20),
)
def test_bounds(
    drawn: list[tuple[float, float]], left_s: float, under_way: int, at_once: int, move_s: float
) -> None:
    works = [RemainingWork(str(number), min(pair), max(pair)) for number, pair in enumerate(drawn)]
    moved = moves_now(works, left_s, under_way, MoveLimits(at_once, move_s))
    assert len(set(moved)) == len(moved)
    if left_s <= 0:
        assert len(moved) == len(works)
        return
    assert len(moved) <= max(0, at_once - under_way)
    by_id = {work.attempt_id: work for work in works}
    assert all(by_id[name].most_s * CAUTION > left_s for name in moved)
