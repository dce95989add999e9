"""What is limited, shared by pools: never exceeded, spent where it saves most, and not moved to and fro."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.sharing.claims.giving_way import settled_share
from autoscaler.sharing.claims.shares import GPUS, MONEY, Claim, Rung, of_class, share


def rung(units: float, price: float, attainment: float, served: float = 1.0) -> Rung:
    return Rung(units, {MONEY: price}, attainment, served)


def share_budget(claims: list[Claim], budget: float) -> tuple[int, ...]:
    return share(claims, {MONEY: budget})


def ladder(steps: list[tuple[float, float]], weight: float) -> Claim:
    """Ever dearer rungs that ever more attain: (price added, attainment added in percent)."""
    rungs = [rung(1, 1.0, 0.0, 0.0)]
    for number, (price, gain) in enumerate(steps):
        last = rungs[-1]
        rungs.append(
            rung(number + 2, last.price_per_hour + price, last.attainment + gain / 100, last.served + 0.01)
        )
    return Claim(tuple(rungs), weight)


STEPS = st.lists(st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.integers(0, 20)), max_size=5)
CLAIMS = st.lists(st.builds(ladder, STEPS, st.sampled_from([1.0, 5.0])), min_size=1, max_size=4)


def price(claims: list[Claim], at: tuple[int, ...]) -> float:
    return sum(claim.rungs[number].price_per_hour for claim, number in zip(claims, at, strict=True))


def attained(claims: list[Claim], at: tuple[int, ...]) -> float:
    return sum(
        claim.weight * claim.rungs[number].attainment for claim, number in zip(claims, at, strict=True)
    )


@settings(max_examples=200, deadline=None)
@given(CLAIMS, st.floats(0, 30))
def test_the_budget_is_kept_and_what_fits_is_given(claims: list[Claim], budget: float) -> None:
    at = share_budget(claims, budget)
    least = sum(claim.rungs[0].price_per_hour for claim in claims)
    assert price(claims, at) <= max(budget, least) + 1e-6
    for number, claim in enumerate(claims):
        if at[number] + 1 < len(claim.rungs):
            more = tuple(each + (place == number) for place, each in enumerate(at))
            assert price(claims, more) > budget, "one more would have fitted"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 20), max_size=4), min_size=1, max_size=3), st.integers(0, 12))
def test_it_is_the_best_where_steps_cost_the_same_and_save_ever_less(
    gains: list[list[int]], budget: int
) -> None:
    claims = [ladder([(1.0, gain) for gain in sorted(one, reverse=True)], 1.0) for one in gains]
    at = share_budget(claims, budget)
    able = [
        others
        for others in product(*(range(len(claim.rungs)) for claim in claims))
        if price(claims, others) <= budget + 1e-9
    ]
    if able:
        assert attained(claims, at) >= max(attained(claims, one) for one in able) - 1e-9


def test_one_more_that_saves_nothing_is_not_the_end() -> None:
    """Two models: the first is overloaded, and in time from the third replica on; the second gains a little each."""
    rungs = [rung(n, float(n), kept, n / 3) for n, kept in ((1, 0.0), (2, 0.0), (3, 0.9))]
    steady = [rung(n, float(n), kept) for n, kept in ((1, 0.8), (2, 0.85), (3, 0.86))]
    assert share_budget([Claim(tuple(rungs)), Claim(tuple(steady))], 4.0) == (2, 0)
    assert share_budget([Claim(tuple(rungs)), Claim(tuple(steady), weight=20)], 3.0) == (0, 1)


def test_of_equals_each_gets_its_part() -> None:
    rungs = tuple(rung(n, float(n), 1.0) for n in range(1, 4))
    assert share_budget([Claim(rungs)] * 4, 9.0) == (2, 1, 1, 1)


def test_more_traffic_weighs_more() -> None:
    rungs = (rung(1, 1.0, 0.5), rung(2, 2.0, 0.9))
    assert share_budget([Claim(rungs, 1.0), Claim(rungs, 3.0)], 3.0) == (0, 1)
    assert all(a <= b for a, b in pairwise(share_budget([Claim(rungs)], money)[0] for money in (1, 2, 3)))


def by_count(needed: int, weight: float = 1.0, most: int = 6, least: int = 1) -> Claim:
    """One GPU and one unit of money a replica; all is well with `needed` of them."""
    counts = range(least, most + 1)
    rungs = [
        Rung(n, {MONEY: float(n), GPUS: float(n)}, float(n >= needed), min(1.0, n / needed)) for n in counts
    ]
    return Claim(tuple(rungs), weight)


def test_the_scarcest_thing_decides() -> None:
    """Money is plenty; of two claims on four GPUs the one that saves more for each gets them."""
    claims = [by_count(3, weight=1.0, most=3), by_count(3, weight=2.0, most=3)]
    assert share(claims, {MONEY: 100.0, GPUS: 4.0}) == (0, 2)
    assert share(claims, {MONEY: 100.0, GPUS: 6.0}) == (2, 2)
    assert share(claims, {MONEY: 3.0, GPUS: 100.0}) in [(0, 1), (1, 0)]
    assert share(claims, {}) == (2, 2)


def test_a_class_of_which_there_are_few_goes_where_no_other_does() -> None:
    """Both want the fast class, of which there is one; the second can do with two slow ones."""
    fast, slow = of_class("fast"), of_class("slow")
    only = Claim((Rung(0, {}, 0.0, 0.0), Rung(2, {fast: 1.0, MONEY: 2.0}, 1.0)))
    either = Claim(
        (
            Rung(0, {}, 0.0, 0.0),
            Rung(2, {fast: 1.0, MONEY: 2.0}, 1.0),
            Rung(2, {slow: 2.0, MONEY: 3.0}, 1.0),
        )
    )
    assert share([only, either], {fast: 1.0, MONEY: 10.0}) == (1, 2)


def test_the_least_of_both_takes_other_classes_where_it_must() -> None:
    fast, slow = of_class("fast"), of_class("slow")
    rungs = (Rung(1, {fast: 1.0, MONEY: 1.0}, 1.0), Rung(1, {slow: 1.0, MONEY: 2.0}, 1.0))
    assert sorted(share([Claim(rungs), Claim(rungs)], {fast: 1.0, MONEY: 10.0})) == [0, 1]
    assert share([Claim(rungs), Claim(rungs)], {fast: 2.0, MONEY: 10.0}) == (0, 0)


class Counted(dict[str, float]):
    """What it takes, and how often that was asked."""

    asked = 0

    def get(self, key: str, default: Any = None) -> Any:
        Counted.asked += 1
        return super().get(key, default)


def test_what_cannot_fit_is_seen_at_the_first_limit() -> None:
    """It runs on the event loop of all models: rungs that climb nothing, and what has no room, cost little."""
    names = [of_class(str(number)) for number in range(8)]
    first = Rung(1.0, Counted(dict.fromkeys(names, 1.0)), 0.5)
    same = [Rung(1.0, Counted(dict.fromkeys(names, 1.0)), 0.5) for _ in range(50)]
    more = [Rung(2.0, Counted(dict.fromkeys(names, 2.0)), 1.0) for _ in range(50)]
    Counted.asked = 0
    assert share([Claim((first, *same, *more))], dict.fromkeys(names, 1.0), [0]) == (0,)
    to_weigh_them = 2 * 100 * len(names)
    assert Counted.asked < 1.25 * to_weigh_them


def uses(count: float) -> dict[str, float]:
    return {MONEY: float(count), GPUS: float(count)}


LIMITS = {MONEY: 6.0}


def test_what_a_model_has_stays_while_another_gains_little_by_it() -> None:
    one, other = by_count(4), by_count(4, weight=1.05)
    assert share([one, other], LIMITS) == (1, 3), "by themselves"
    kept = settled_share([one, other], LIMITS, [uses(4), uses(2)])
    assert (kept.rungs, kept.worth_moving) == ((3, 1), False)
    again = settled_share([one, other], LIMITS, [uses(2), uses(4)])
    assert (again.rungs, again.worth_moving) == ((1, 3), False)


def test_what_is_worth_it_moves_once_it_may() -> None:
    one, other = by_count(4), by_count(4, weight=3.0)
    waits = settled_share([one, other], LIMITS, [uses(4), uses(2)], may_move=False)
    assert (waits.rungs, waits.worth_moving) == ((3, 1), True)
    moves = settled_share([one, other], LIMITS, [uses(4), uses(2)])
    assert (moves.rungs, moves.worth_moving) == ((1, 3), True)


def test_what_nobody_has_needs_no_waiting() -> None:
    one, other = by_count(2, most=2), by_count(4)
    assert settled_share([one, other], LIMITS, [uses(2), uses(1)], may_move=False).rungs == (1, 3)


def test_the_least_of_a_new_model_has_room_at_once() -> None:
    """Nobody is starved: the least of each is given whatever others have, and however little it weighs."""
    one, other = by_count(5, weight=1000.0), by_count(2, weight=0.001, most=2)
    found = settled_share([one, other], LIMITS, [uses(6), uses(0)], may_move=False)
    assert found.rungs == (4, 0)
    assert price([one, other], found.rungs) <= 6


@settings(max_examples=60, deadline=None)
@given(st.data(), st.floats(1, 20))
def test_shares_are_kept_within_the_limits_and_come_to_rest(data: st.DataObject, budget: float) -> None:
    claims = data.draw(CLAIMS)
    held = [{MONEY: float(n)} for n in data.draw(st.lists(st.integers(0, 8), min_size=4))]
    limits = {MONEY: budget}
    first = settled_share(claims, limits, held[: len(claims)])
    least = sum(claim.rungs[0].price_per_hour for claim in claims)
    assert price(claims, first.rungs) <= max(budget, least) + 1e-6
    there = [claim.rungs[at].uses for claim, at in zip(claims, first.rungs, strict=True)]
    if least <= budget:
        again = settled_share(claims, limits, there)
        assert again.rungs == first.rungs, "once all have what they may have nothing moves"
