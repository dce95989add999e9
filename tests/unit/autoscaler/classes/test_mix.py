"""The cheapest mix of replica classes, compared with trying everything."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.classes.mix import cheapest_mix, leanest_mix
from autoscaler.classes.search.offer import ChangeCost, ClassMix, ClassOffer, mix_of, money_of

OFFERS = st.lists(
    st.builds(
        ClassOffer,
        name=st.just("one"),
        speed=st.sampled_from([1.0, 1.5, 2.0, 2.7, 4.0]),
        price_per_hour=st.sampled_from([0.0, 0.5, 1.0, 1.3, 2.0, 3.9]),
        most=st.integers(0, 5),
        running=st.integers(0, 4),
        spot=st.booleans(),
        gpus=st.integers(0, 4),
        kinds=st.sampled_from([(), ("k",), ("j", "k")]),
    ),
    min_size=1,
    max_size=4,
)
CHANGES = st.builds(
    ChangeCost, payback_s=st.sampled_from([60.0, 1800.0]), cold_start_s=st.sampled_from([0.0, 60.0, 600.0])
)


def worth(
    offers: list[ClassOffer], mix: ClassMix, units: float, floor: float, change: ChangeCost
) -> tuple[float, ...]:
    pairs = list(zip(offers, mix.counts, strict=True))
    plain = sum(one.speed * count for one, count in pairs if not one.spot)
    money = sum(money_of(one, count, change) for one, count in pairs)
    return (
        round(max(0.0, floor - plain), 6),
        round(max(0.0, units - mix.units), 6),
        round(money, 6),
    )


def of_kind(offers: Sequence[ClassOffer], counts: tuple[int, ...], kind: str) -> int:
    return sum(one.gpus * count for one, count in zip(offers, counts, strict=True) if kind in one.kinds)


@settings(max_examples=150, deadline=None)
@given(
    OFFERS,
    st.floats(0, 20).map(lambda units: round(units, 3)),
    st.floats(0, 1),
    st.none() | st.floats(0, 12),
    CHANGES,
    st.none() | st.integers(0, 12),
    st.dictionaries(st.sampled_from("jk"), st.integers(0, 12).map(float)),
)
def test_it_is_as_good_as_the_best_of_all(
    offers: list[ClassOffer],
    units: float,
    share: float,
    budget: float | None,
    change: ChangeCost,
    gpus: int | None,
    kinds: dict[str, float],
) -> None:
    floor = round(share * units)
    all_mixes = (mix_of(offers, counts) for counts in product(*(range(one.most + 1) for one in offers)))
    within = [
        mix
        for mix in all_mixes
        if (budget is None or mix.price_per_hour <= budget + 1e-9)
        and (gpus is None or mix.gpus <= gpus)
        and all(of_kind(offers, mix.counts, kind) <= most for kind, most in kinds.items())
    ]
    found = cheapest_mix(offers, units, budget, change, floor, gpus, kinds)
    assert found in within or any(found.counts == mix.counts for mix in within)
    best = min(worth(offers, mix, units, floor, change) for mix in within)
    assert worth(offers, found, units, floor, change) == best


@settings(max_examples=100, deadline=None)
@given(OFFERS, st.integers(0, 12))
def test_the_leanest_has_the_fewest_gpus(offers: list[ClassOffer], units: int) -> None:
    mixes = [mix_of(offers, counts) for counts in product(*(range(one.most + 1) for one in offers))]
    found = leanest_mix(offers, units)
    short = min(max(0.0, units - mix.units) for mix in mixes)
    enough = [mix for mix in mixes if max(0.0, units - mix.units) <= short + 1e-9]
    fewest = min(mix.gpus for mix in enough)
    assert found.gpus == fewest
    assert found.price_per_hour == pytest.approx(
        min(mix.price_per_hour for mix in enough if mix.gpus == fewest)
    )


def offers(slow: int = 0, fast: int = 0, fast_price: float = 3.0) -> list[ClassOffer]:
    return [ClassOffer("slow", 1.0, 1.0, 8, slow), ClassOffer("fast", 4.0, fast_price, 8, fast)]


def test_a_fast_class_is_cheaper_by_the_unit_and_dearer_for_a_little() -> None:
    assert cheapest_mix(offers(), 1).counts == (1, 0)
    assert cheapest_mix(offers(), 4).counts == (0, 1)
    assert cheapest_mix(offers(), 5).counts == (1, 1)
    assert cheapest_mix(offers(), 7.5).counts == (0, 2)


def test_no_replica_is_replaced_to_save_cents() -> None:
    change = ChangeCost(payback_s=1800, cold_start_s=120)
    assert cheapest_mix(offers(slow=4, fast_price=3.9), 4, change=change).counts == (4, 0)
    # A start costs 2 minutes of 2.00 (0.07); in half an hour 1.00 is saved.
    assert cheapest_mix(offers(slow=4, fast_price=2.0), 4, change=change).counts == (0, 1)


def test_what_has_been_started_already_costs_no_start() -> None:
    change = ChangeCost(payback_s=600, cold_start_s=600)
    assert cheapest_mix(offers(slow=4), 4, change=change).counts == (4, 0)
    assert cheapest_mix(offers(slow=4, fast=1), 4, change=change).counts == (0, 1)


def test_a_budget_that_is_too_small_buys_the_most_capacity() -> None:
    found = cheapest_mix(offers(), 20, budget_per_hour=7)
    assert (found.counts, found.units, found.price_per_hour) == ((1, 2), 9.0, 7.0)


@pytest.mark.parametrize("units", [0, -1])
def test_nothing_is_needed(units: int) -> None:
    assert cheapest_mix(offers(slow=3), units).counts == (0, 0)


SPOT = ClassOffer("spot", 1.0, 0.3, 8, spot=True)
PLAIN = ClassOffer("plain", 1.0, 1.0, 8)


def test_a_floor_is_never_on_spot_machines() -> None:
    assert cheapest_mix([PLAIN, SPOT], 5).counts == (0, 5)
    assert cheapest_mix([PLAIN, SPOT], 5, floor=2).counts == (2, 3)
    fast = ClassOffer("fast", 4.0, 2.5, 8)
    assert cheapest_mix([PLAIN, SPOT, fast], 6, floor=3).counts == (0, 2, 1), (
        "dearer ones that give more count"
    )


def test_where_not_all_can_be_had_the_floor_comes_first() -> None:
    assert cheapest_mix([PLAIN, SPOT], 6, budget_per_hour=3, floor=2).counts == (2, 3)
    few = ClassOffer("plain", 1.0, 1.0, 1)
    assert cheapest_mix([few, SPOT], 5, floor=2).counts == (1, 4), "none to be had: spot machines carry it"


def test_a_thousand_units_with_a_floor_take_no_time() -> None:
    many = [ClassOffer(f"c{n}", 1 + n * 0.37, 1 + n * 0.36, 1000, 0, n % 2 == 0) for n in range(6)]
    found = cheapest_mix(many, 1000, floor=500)
    assert found.units >= 1000
    assert (
        sum(one.speed * count for one, count in zip(many, found.counts, strict=True) if not one.spot) >= 500
    )
    assert found.price_per_hour <= 1.05 * 1000 * 2.8 / 2.85


def test_a_thousand_units_of_six_classes_take_no_time() -> None:
    many = [ClassOffer(f"c{n}", 1 + n * 0.37, 1 + n * 0.36, 1000, 0) for n in range(6)]
    found = cheapest_mix(many, 1000)
    assert found.units >= 1000
    assert found.price_per_hour <= 1000 * 2.8 / 2.85 + 2.8


@pytest.mark.parametrize("gpus", [100, 400, 3000])
def test_a_thousand_units_on_few_gpus_take_no_time(gpus: int) -> None:
    """The cheapest class for a unit needs most GPUs for one."""
    many = [ClassOffer(f"c{n}", 1 + n * 0.5, 1 + n * 0.6, 1000, 0, gpus=2 if n < 3 else 1) for n in range(6)]
    found = cheapest_mix(many, 1000, gpus=gpus)
    assert found.gpus <= gpus
    assert found.units >= min(1000.0, 3.5 * gpus) - 5
    lean = leanest_mix(many, 1000)
    assert lean.gpus <= 1000 / 3.5 + 2


@pytest.mark.parametrize("units", [120, 400])
def test_a_large_floor_is_carried_by_the_cheapest_that_can(units: int) -> None:
    """And quickly: this is asked for each unit of a budget."""
    on_demand = [ClassOffer("p", 1.0, 3.0, 999), ClassOffer("p2", 2.0, 6.5, 999)]
    spot = [ClassOffer("s", 1.0, 1.0, 999, spot=True), ClassOffer("s2", 2.0, 2.2, 999, spot=True)]
    found = cheapest_mix([*on_demand, *spot], units, floor=units / 2)
    assert found.counts == (units // 2, 0, units // 2, 0)
