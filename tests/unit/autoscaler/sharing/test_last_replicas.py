"""A pool's last replica that another model needs: it moves, its replacement first wherever that has room."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from autoscaler.sharing.claims.giving_way import PoolStanding
from autoscaler.sharing.claims.shares import GPUS, MONEY, ClassOfClaim, of_class
from autoscaler.sharing.shared_account import STALE_S
from tests.support.classes.shared_models import ROUND_S, Models, Wish
from tests.unit.autoscaler.sharing.claims.test_giving_way import given_way

X, Y, Z = of_class("x"), of_class("y"), of_class("z")
ONE = (1.0, 1.0)


def least_while_settling(models: Models, rounds: int = 14) -> dict[str, list[float]]:
    """Units in rotation of each model, round after round."""
    found: dict[str, list[float]] = {one.name: [] for one in models.models}
    for _ in range(rounds):
        models.round()
        for one in models.models:
            found[one.name].append(one.units())
    return found


def without(units: list[float]) -> int:
    """Rounds without a replica in rotation, once there was one."""
    return sum(not count for count in units[units.index(max(units)) :]) if max(units) else len(units)


def test_it_moves_to_another_class_that_has_room_and_nobody_is_without() -> None:
    models = Models(
        {"a": Wish(1, {"x": ONE, "y": (1.0, 3.0)}, {"x": 1}), "b": Wish(1, {"x": ONE}, {})}, {X: 1.0, Y: 1.0}
    )
    units = least_while_settling(models)
    assert min(units["a"]) == 1.0
    assert units["b"][-1] == 1.0


def chain(**more: float) -> Models:
    """The first needs what the second has, who can do with what the third has, who can do with z."""
    either = {"a": {"x": ONE}, "b": {"x": ONE, "y": ONE}, "c": {"y": ONE, "z": ONE}}
    held: dict[str, dict[str, int]] = {"a": {}, "b": {"x": 1}, "c": {"y": 1}}
    wishes = {name: Wish(1, classes, held[name]) for name, classes in either.items()}
    return Models(wishes, {X: 1.0, Y: 1.0, Z: 1.0, **more})


def test_so_does_a_chain_of_them() -> None:
    units = least_while_settling(chain())
    assert min(units["b"] + units["c"]) == 1.0
    assert units["a"][-1] == 1.0


@pytest.mark.parametrize(
    ("limits", "gpus"),
    [({GPUS: 2.0}, {"x": 2, "y": 1}), ({MONEY: 4.0}, {})],
)
def test_where_both_have_no_room_it_ends_first_after_the_time_of_moves(
    limits: Mapping[str, float], gpus: Mapping[str, int]
) -> None:
    """Beside x nothing fits: 2 GPUs, or 3 an hour (decodes take 0.5 each)."""
    wishes = {
        "a": Wish(1, {"x": (1.0, 3.0), "y": (1.0, 1.5)}, {"x": 1}, gpus),
        "b": Wish(1, {"y": (1.0, 1.5)}, {}, gpus),
    }
    models = Models(wishes, limits)
    units = least_while_settling(models)
    assert units["a"][:2] == [1.0, 1.0], "not before what others have moves"
    assert without(units["a"]) == 1, "it ends, and the next one starts"
    assert models.all_have_what_they_want()
    assert models.settle(4), "then nothing moves"


def swap(start_rounds: int = 1, **more: float) -> Models:
    """Each has the class that the other is to have, the second for twice as much. The first may have a third."""
    wishes = {
        "a": Wish(1, {"x": ONE, "y": ONE, "z": (1.0, 9.0)}, {"x": 1}),
        "b": Wish(2, {"x": (2.0, 1.0), "y": ONE}, {"y": 1}),
    }
    return Models(wishes, {X: 1.0, Y: 1.0, Z: 0.0, **more}, start_rounds)


def test_two_single_replicas_swap_and_one_pool_is_without_for_two_starts() -> None:
    """The one that has too few for its work."""
    models = swap()
    units = least_while_settling(models, 16)
    assert models.all_have_what_they_want()
    assert min(units["a"]) == 1.0
    assert units["b"][:10].count(0) == 4, "two ends, two starts"
    assert models.settle(4), "then nothing moves"


def test_who_gave_its_last_replica_to_one_that_is_stuck_then_gets_another() -> None:
    models = swap()
    first, second = models.models
    while second.units():
        models.round()
    first.stuck = True
    for _ in range(math.ceil(STALE_S / ROUND_S) + 3):
        models.round()
    assert (first.units(), second.units()) == (1.0, 1.0)


@pytest.mark.parametrize("start_rounds", [1, 4])
def test_a_third_class_with_room_serves_meanwhile(start_rounds: int) -> None:
    """It is dearer, so in the end it has what it was to have."""
    models = swap(start_rounds, **{Z: 1.0})
    ever: set[str] = set()
    for _ in range(30):
        models.round()
        ever |= {one.replica_class for one in models.models[0].there}
        assert min(one.units() for one in models.models) >= 1.0, "nobody is without"
    assert models.all_have_what_they_want()
    assert {"x", "y", "z"} <= ever
    assert models.settle(4), "then nothing moves"
    assert [one.replica_class for one in models.models[0].there if one.name.startswith("prefill")] == ["y"]


def test_where_the_least_of_both_does_not_fit_nothing_moves_and_the_reasons_say_so() -> None:
    models = Models({"a": Wish(1, {"x": ONE}, {"x": 1}), "b": Wish(1, {"x": ONE}, {})}, {X: 1.0})
    assert models.settle()
    first, second = models.models
    assert (first.units(), second.units()) == (1.0, 0.0)
    for one in models.models:
        assert one.plan is not None
        said = "the least of all models takes 2 x, and there are 1 (a has 1, b 0): nothing moves for that"
        assert said in one.plan.prefill.reason


EACH = {X: ClassOfClaim(gpus=2), Y: ClassOfClaim(gpus=1)}


def test_it_ends_only_for_another_pool() -> None:
    """What it would save by itself is no reason to be without."""
    alone = PoolStanding({X: 1.0, GPUS: 2.0}, {Y: 1.0, GPUS: 1.0}, 1.0, EACH)
    assert given_way([alone], {GPUS: 2.0}, last_too=True) == {}
    other = PoolStanding({}, {Y: 1.0, GPUS: 1.0}, 1.0, EACH)
    alike = PoolStanding({GPUS: 0.0}, {GPUS: 1.0}, 1.0, {})
    for waiting in (other, alike):
        assert given_way([alone, waiting], {GPUS: 2.0}, last_too=True) == {0: X}
        assert given_way([alone, waiting], {GPUS: 2.0}) == {}, "not before it was so for a while"
        assert given_way([alone, waiting], {GPUS: 3.0}, last_too=True) == {}, "there is room"
