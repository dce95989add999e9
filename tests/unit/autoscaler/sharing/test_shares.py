"""A budget in money shared by pools: never exceeded, and spent where it saves most."""

from __future__ import annotations

from itertools import pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.classes.money_budget import Claim, Rung, share_budget


def ladder(steps: list[tuple[float, float]], weight: float) -> Claim:
    """Ever dearer rungs that ever more attain: (price added, attainment added in percent)."""
    rungs = [Rung(1, 1.0, 0.0, 0.0)]
    for number, (price, gain) in enumerate(steps):
        last = rungs[-1]
        rungs.append(
            Rung(number + 2, last.price_per_hour + price, last.attainment + gain / 100, last.served + 0.01)
        )
    return Claim(tuple(rungs), weight)


STEPS = st.lists(st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.integers(0, 20)), max_size=5)
CLAIMS = st.lists(st.builds(ladder, STEPS, st.sampled_from([1.0, 5.0])), min_size=1, max_size=4)


def price(claims: list[Claim], at: tuple[int, ...]) -> float:
    return sum(claim.rungs[rung].price_per_hour for claim, rung in zip(claims, at, strict=True))


def attained(claims: list[Claim], at: tuple[int, ...]) -> float:
    return sum(claim.weight * claim.rungs[rung].attainment for claim, rung in zip(claims, at, strict=True))


@settings(max_examples=200, deadline=None)
@given(CLAIMS, st.floats(0, 30))
def test_the_budget_is_kept_and_what_fits_is_given(claims: list[Claim], budget: float) -> None:
    at = share_budget(claims, budget)
    least = sum(claim.rungs[0].price_per_hour for claim in claims)
    assert price(claims, at) <= max(budget, least) + 1e-6
    for number, claim in enumerate(claims):
        if at[number] + 1 < len(claim.rungs):
            more = tuple(rung + (place == number) for place, rung in enumerate(at))
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
    rungs = [Rung(n, float(n), share, n / 3) for n, share in ((1, 0.0), (2, 0.0), (3, 0.9))]
    steady = [Rung(n, float(n), share) for n, share in ((1, 0.8), (2, 0.85), (3, 0.86))]
    assert share_budget([Claim(tuple(rungs)), Claim(tuple(steady))], 4.0) == (2, 0)
    assert share_budget([Claim(tuple(rungs)), Claim(tuple(steady), weight=20)], 3.0) == (0, 1)


def test_more_traffic_weighs_more() -> None:
    rungs = (Rung(1, 1.0, 0.5), Rung(2, 2.0, 0.9))
    assert share_budget([Claim(rungs, 1.0), Claim(rungs, 3.0)], 3.0) == (0, 1)
    assert all(a <= b for a, b in pairwise(share_budget([Claim(rungs)], money)[0] for money in (1, 2, 3)))
