"""Models that wait for each other's classes: what all want and what fits is reached, and no limit is ever exceeded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from autoscaler.sharing.claims.giving_way import PoolStanding, gives_way
from autoscaler.sharing.claims.shares import GPUS, MONEY, Claim, ClassOfClaim, Rung, of_class, share
from tests.support.classes.shared_models import Models, Wish, fits

X, Y, Z = of_class("x"), of_class("y"), of_class("z")
KINDS = {"x": (1.0, 1.0), "y": (1.0, 1.0), "z": (2.0, 3.0)}
EACH_TAKES = {"x": 2, "y": 1, "z": 3}
"""GPUs."""


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[str, Wish], dict[str, float]]:
    limits = {of_class(kind): draw(st.integers(1, 3)) for kind in KINDS}
    left = dict(limits)
    wishes: dict[str, Wish] = {}
    gpus = draw(st.sampled_from([{}, EACH_TAKES]))
    for name in ("a", "b", "c")[: draw(st.integers(2, 3))]:
        kinds = draw(st.sampled_from(["x", "y", "xy", "xz", "yz", "xyz"]))
        held = {}
        for kind in kinds:
            held[kind] = draw(st.integers(0, left[of_class(kind)]))
            left[of_class(kind)] -= held[kind]
        price = draw(st.sampled_from([0.5, 2.0]))
        classes = {kind: (KINDS[kind][0], KINDS[kind][1] * (price if kind == "x" else 1.0)) for kind in kinds}
        wishes[name] = Wish(draw(st.integers(1, 4)), classes, held, gpus)
    there = sum(gpus.get(kind, 0) * count for wish in wishes.values() for kind, count in wish.held.items())
    budget = {GPUS: float(there + draw(st.integers(0, 2)))} if there else {}
    return wishes, {name: float(limit) for name, limit in limits.items()} | budget


@pytest.mark.slow
@settings(max_examples=25, deadline=None, phases=[Phase.generate])
@given(worlds(), st.sampled_from([1, 3]))
def test_what_all_want_and_what_fits_is_reached(
    world: tuple[dict[str, Wish], dict[str, float]], start_rounds: int
) -> None:
    wishes, limits = world
    models = Models(wishes, limits, start_rounds)
    if fits(wishes, limits):
        assert models.settle(40 * start_rounds), "then nothing moves"
        assert models.all_have_what_they_want()
    else:
        models.settle(12)


FAST_Y = {"x": (1.0, 1.0), "y": (2.0, 1.0)}
FAST_X = {"x": (2.0, 1.0), "y": (1.0, 1.0)}


@pytest.mark.parametrize("budget", [None, 5.5])
def test_two_models_swap_full_classes_one_replica_at_a_time(budget: float | None) -> None:
    """Each has all of the class that the other is fast on."""
    wishes = {"a": Wish(4, FAST_Y, {"x": 2}), "b": Wish(4, FAST_X, {"y": 2})}
    models = Models(wishes, {X: 2.0, Y: 2.0} | ({} if budget is None else {MONEY: budget}))
    least = [9.0, 9.0]
    for _ in range(20):
        models.round()
        least = [min(known, one.units()) for known, one in zip(least, models.models, strict=True)]
    assert models.all_have_what_they_want()
    assert least == [1.0, 2.0], "only one gives way, and never with its last replica"
    assert models.settle(4), "then nothing moves"


def test_a_model_that_lacks_nothing_gives_its_class_for_another_of_the_same_use() -> None:
    wishes = {
        "a": Wish(2, {"x": (1.0, 1.0), "y": (1.0, 3.0)}, {"x": 2}),
        "b": Wish(2, {"x": (1.0, 1.0)}, {"x": 1}),
    }
    models = Models(wishes, {X: 3.0, Y: 2.0})
    assert models.settle()
    assert models.all_have_what_they_want()


def test_a_pool_halfway_between_two_mixes_does_not_turn_round() -> None:
    """With y, x and y the second has what it wants, and so has the third nothing; with z and x all have."""
    z_or = {"z": (2.0, 3.0)}
    wishes = {
        "a": Wish(1, {"x": (1.0, 0.5), **z_or}, {"x": 2, "z": 2}),
        "b": Wish(3, {"x": (1.0, 0.5), "y": (1.0, 1.0), **z_or}, {"y": 1}),
        "c": Wish(2, {"y": (1.0, 1.0), **z_or}, {}),
    }
    models = Models(wishes, {X: 2.0, Y: 2.0, Z: 2.0, MONEY: 9.5})
    assert models.settle()
    assert models.all_have_what_they_want()


EACH = {X: ClassOfClaim(), Y: ClassOfClaim()}


def has(held: Mapping[str, float], wanted: Mapping[str, float], weight: float = 1.0) -> PoolStanding:
    return PoolStanding(held, wanted, sum(wanted.values()), EACH, weight)


def given_way(
    pools: list[PoolStanding], limits: Mapping[str, float], last_too: bool = False
) -> dict[int, str]:
    held = {name: sum(one.held.get(name, 0.0) for one in pools) for name in limits}
    return {one: given.name for one, given in gives_way(pools, limits, held, last_too).items()}


def test_one_of_a_circle_gives_way() -> None:
    limits = {X: 3.0, Y: 3.0}
    swap = [has({X: 3.0}, {Y: 3.0}), has({Y: 3.0}, {X: 3.0})]
    assert given_way(swap, limits) == {0: X}
    assert given_way([replace(swap[0], weight=2.0), swap[1]], limits) == {1: Y}, "the one with less traffic"
    more = [has({X: 2.0}, {Y: 3.0}), has({Y: 3.0}, {X: 3.0}), has({X: 1.0}, {X: 0.0})]
    assert given_way(more, limits) == {}, "the third ends what it does not need, and all goes on"


def test_nobody_gives_way_while_anything_else_goes_on() -> None:
    assert given_way([has({X: 3.0}, {Y: 3.0}), has({Y: 2.0}, {X: 2.0})], {X: 3.0, Y: 3.0}) == {}
    partly = [has({X: 2.0}, {Y: 3.0}), has({X: 1.0, Y: 3.0}, {X: 3.0})]
    assert given_way(partly, {X: 3.0, Y: 3.0}) == {}, "the second has one more than it needs"
    assert given_way([has({X: 3.0}, {Y: 3.0})], {X: 3.0, Y: 0.0}) == {}, "there is none for it"
    assert given_way([], {}) == {}


def test_the_last_replica_that_does_its_work_stays() -> None:
    limits = {X: 1.0, Y: 1.0}
    content = [has({X: 1.0}, {Y: 1.0}), has({Y: 1.0}, {X: 1.0})]
    assert given_way(content, limits) == {}
    slow = {**EACH, Y: ClassOfClaim(usable=False)}
    assert given_way([content[0], replace(content[1], classes=slow)], limits) == {1: Y}


def test_a_full_claim_makes_room_by_the_same_capacity_of_others() -> None:
    """The first could do with y or z, the second with x or y; the third needs x."""

    def one_of(*names: str) -> Claim:
        found = [Rung(1.0, {name: 1.0, MONEY: float(n + 1)}, 1.0) for n, name in enumerate(names)]
        return Claim((Rung(0.0, {}, 0.0, 0.0), *found))

    claims = [one_of(Y, Z), one_of(X, Y), one_of(X)]
    limits = {X: 1.0, Y: 1.0, Z: 1.0}
    at = share(claims, limits)
    assert [claim.rungs[rung].units for claim, rung in zip(claims, at, strict=True)] == [1.0, 1.0, 1.0]
    assert share(claims, {**limits, MONEY: 3.0}) != at, "there is no money for that"
