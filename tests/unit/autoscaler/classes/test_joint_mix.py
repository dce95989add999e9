"""The cheapest mix of neutral workers on both sides, compared with trying everything."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.classes.neutral.joint_mix import JOIN_S, MixBudget, _seeds, joint_mix
from autoscaler.classes.search.mix_search import MixSearch
from autoscaler.classes.search.offer import ChangeCost, ClassMix, ClassOffer, MixSide, money_of

SPEEDS = st.sampled_from([1.0, 1.5, 2.0, 4.0])
CHANGE = ChangeCost(1800.0, 120.0)


@st.composite
def sides(draw: st.DrawFn) -> tuple[MixSide, MixSide]:
    """Up to three classes, some of them too slow for one side, and what leans where."""
    found: tuple[list[ClassOffer], list[ClassOffer]] = [], []
    leaning: tuple[list[int], list[int]] = [], []
    for number in range(draw(st.integers(1, 3))):
        here = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        worker = ClassOffer(
            f"class-{number}",
            1.0,
            draw(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.9])),
            draw(st.integers(0, 3)),
            sum(here),
            draw(st.booleans()),
            draw(st.integers(0, 3)),
            draw(st.sampled_from([(), ("k",)])),
        )
        for side in (0, 1):
            slow = {"most": 0} if draw(st.integers(0, 5)) == 0 else {}
            found[side].append(replace(worker, speed=draw(SPEEDS), **slow))
            leaning[side].append(here[side])
    units = st.floats(0, 8).map(lambda value: round(value, 2))
    # `worth` takes floors that differ by less than it rounds to for equal; the search does not.
    floors = st.floats(0, 1).map(lambda value: round(value, 3))
    prefill, decode = (
        MixSide(tuple(found[side]), wanted := draw(units), wanted * draw(floors), tuple(leaning[side]))
        for side in (0, 1)
    )
    return prefill, decode


def worth(
    found: tuple[MixSide, MixSide], counts: tuple[tuple[int, ...], tuple[int, ...]]
) -> tuple[float, ...]:
    floor = short = money = 0.0
    for side, chosen in zip(found, counts, strict=True):
        pairs = list(zip(side.offers, chosen, strict=True))
        floor += max(0.0, side.floor - sum(one.speed * count for one, count in pairs if not one.spot))
        short += max(0.0, side.units - sum(one.speed * count for one, count in pairs))
    for offer, *both in zip(found[0].offers, *counts, strict=True):
        money += money_of(offer, sum(both), CHANGE)
    return round(floor, 6), round(short, 6), round(money, 2)


def may_be(
    found: tuple[MixSide, MixSide], counts: tuple[tuple[int, ...], tuple[int, ...]], budget: MixBudget
) -> bool:
    money = gpus = 0.0
    for prefill, decode, *both in zip(found[0].offers, found[1].offers, *counts, strict=True):
        money, gpus = money + prefill.price_per_hour * sum(both), gpus + prefill.gpus * sum(both)
        if both[0] > prefill.most or both[1] > decode.most or sum(both) > max(prefill.most, decode.most):
            return False
    of_kind = sum(
        one.gpus * sum(both) for one, *both in zip(found[0].offers, *counts, strict=True) if one.kinds
    )
    return (
        money <= budget.room.money + 1e-6
        and gpus <= budget.room.gpus
        and of_kind <= budget.kinds.get("k", 1e9)
    )


@settings(max_examples=60, deadline=None)
@given(sides(), st.none() | st.floats(0, 12), st.none() | st.integers(0, 8), st.none() | st.integers(0, 8))
def test_no_mix_of_both_sides_is_better(
    found: tuple[MixSide, MixSide], per_hour: float | None, gpus: int | None, of_kind: int | None
) -> None:
    budget = MixBudget(per_hour, gpus, {} if of_kind is None else {"k": float(of_kind)})
    prefill, decode = joint_mix(*found, budget, CHANGE)
    chosen = prefill.counts, decode.counts
    assert may_be(found, chosen, budget)
    each = [range(offer.most + 1) for side in found for offer in side.offers]
    size = len(found[0].offers)
    all_of_them = [(counts[:size], counts[size:]) for counts in product(*each)]
    best = min(worth(found, counts) for counts in all_of_them if may_be(found, counts, budget))
    mine = worth(found, chosen)
    # What a change of sides costs decides between equals; it may be a cent.
    assert mine[:2] == pytest.approx(best[:2], abs=1e-5)
    assert mine[2] <= best[2] + 0.02


def offer(name: str, price: float, running: int = 0, **more: float) -> ClassOffer:
    return ClassOffer(name, price_per_hour=price, running=running, **({"speed": 1.0, "most": 9} | more))  # type: ignore[arg-type]


def counts_of(*mixes: ClassMix) -> list[tuple[int, ...]]:
    return [mix.counts for mix in mixes]


def test_what_runs_on_one_side_is_no_start_on_the_other() -> None:
    """A dearer worker that is there already is nearer than a cheap one that must start."""
    offers = (offer("cheap", 1.0), offer("dear", 1.05, running=2))
    change = ChangeCost(1800.0, 600.0)
    prefill = MixSide(offers, 2.0, leaning=(0, 0))
    decode = MixSide(offers, 0.0, leaning=(0, 2))
    assert counts_of(*joint_mix(prefill, decode, change=change)) == [(0, 2), (0, 0)]


def test_of_mixes_that_cost_the_same_the_nearest_is_wanted() -> None:
    """Nobody changes sides for nothing: also of classes without a price."""
    for price in (0.0, 1.0):
        offers = (offer("a", price, running=1), offer("b", price, running=1))
        for leaning in ((1, 0), (0, 1)):
            other = (leaning[1], leaning[0])
            found = joint_mix(MixSide(offers, 1.0, leaning=leaning), MixSide(offers, 1.0, leaning=other))
            assert counts_of(*found) == [leaning, other]


def test_each_class_serves_where_it_is_better() -> None:
    prefill = MixSide((offer("a", 1.0, speed=1.0), offer("b", 1.0, speed=4.0)), 4.0)
    decode = MixSide((offer("a", 1.0, speed=4.0), offer("b", 1.0, speed=1.0)), 4.0)
    assert counts_of(*joint_mix(prefill, decode)) == [(0, 1), (1, 0)]


def test_a_class_is_had_on_both_sides_together_no_more_often_than_there_is_of_it() -> None:
    offers = (offer("few", 1.0, most=3), offer("many", 2.0))
    found = joint_mix(MixSide(offers, 2.0), MixSide(offers, 2.0))
    assert sum(mix.counts[0] for mix in found) == 3
    assert sum(mix.counts[1] for mix in found) == 1


def test_six_classes_and_many_units_take_no_longer_than_a_decision_may() -> None:
    offers = tuple(
        offer(f"c{n}", 1.0 + 0.37 * n, speed=1.0 + 0.9 * n, most=40, spot=n % 2 == 0) for n in range(6)
    )
    began = time.process_time()
    prefill, decode = joint_mix(
        MixSide(offers, 77.3, 20.0), MixSide(offers, 91.7, 30.0), MixBudget(120.0, None)
    )
    assert prefill.units >= 77.3 - 1e-9
    assert decode.units >= 91.7 - 1e-9
    assert time.process_time() - began < 10, "a bound on work, not a figure"


@pytest.mark.parametrize(
    ("units", "budget", "cold_start_s"),
    [
        ((77.3, 91.7), MixBudget(120.0), 120.0),
        ((77.3, 91.7), MixBudget(40.0), 120.0),
        ((24.0, 18.0), MixBudget(30.0, 20), 0.0),
    ],
)
def test_a_search_under_tight_budgets_ends_by_itself(
    units: tuple[float, float], budget: MixBudget, cold_start_s: float
) -> None:
    """Counted: each ended early, at 50,000, when bounds knew neither starts nor that both sides share a budget."""
    offers = tuple(
        offer(f"c{n}", 1.0 + 0.37 * n, n % 3, speed=1.0 + 0.9 * n, most=40, spot=n % 2 == 0, gpus=1 + n // 2)
        for n in range(6)
    )
    sides = MixSide(offers, units[0], 20.0), MixSide(offers, units[1], 18.0)
    change, order = ChangeCost(1800.0, cold_start_s), sorted(range(6), key=lambda n: offers[n].per_unit)
    search = MixSearch(sides, order, change, JOIN_S)
    search.run(budget.room, list(_seeds(sides, budget, change)))
    assert search.looks < 10_000
