"""What a pool was coming to stays while others have what it wants instead, as long as it can be had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from autoscaler.classes.class_demand import ClassedDemand
from autoscaler.classes.on_demand_floor import NO_FLOOR, OnDemandFloor
from autoscaler.classes.search.offer import ChangeCost, ClassMix, ClassOffer
from autoscaler.policies.policy_file import TargetPool
from autoscaler.sharing.claims.class_shares import _kept_for_now
from autoscaler.sharing.claims.plan_parts import bound_by
from autoscaler.sharing.claims.shared_view import SharedView
from autoscaler.sharing.claims.shares import GPUS, MONEY, Rung, of_class

X, Y = of_class("x"), of_class("y")
OFFERS = (ClassOffer("x", 1, 1.0, 4, running=1), ClassOffer("y", 1, 2.0, 8))
POOL = TargetPool(kind="target", metric="backlog_tokens", target=1.0)
WANTED = ClassMix((1, 1), 2.0, 3.0)
BEFORE = (2, 0)


def demand(*offers: ClassOffer, floor: OnDemandFloor = NO_FLOOR) -> ClassedDemand:
    return ClassedDemand("prefill", POOL, offers, ChangeCost(), 2, 1, 0, {}, floor)


def kept(one: ClassedDemand, mix: ClassMix = WANTED) -> tuple[int, ...]:
    """Another has the only y; two of x were decided before, and one is there."""
    live = {("a", "prefill"): {X: 1.0}, ("b", "prefill"): {Y: 1.0}}
    decided = {"prefill": {X: 2.0, Y: 0.0, MONEY: 2.0}}
    view = SharedView("a", {X: 4.0, Y: 1.0}, {"a": {X: 1.0}, "b": {Y: 1.0}}, live, decided=decided)
    rung = Rung(2.0, {X: 1.0, Y: 1.0}, 1.0)
    return _kept_for_now(one, rung, mix, {X: 3.0, Y: 0.0}, view).counts


def test_it_stays_for_now() -> None:
    assert kept(demand(*OFFERS)) == BEFORE


@pytest.mark.parametrize("most", [0, 1])
def test_not_where_a_class_is_refused_or_too_slow(most: int) -> None:
    assert kept(demand(replace(OFFERS[0], most=most), OFFERS[1])) == WANTED.counts


def test_not_where_too_little_of_it_is_on_demand() -> None:
    offers = (replace(OFFERS[0], spot=True), OFFERS[1])
    assert kept(demand(*offers, floor=OnDemandFloor(units=1))) == WANTED.counts
    assert kept(demand(*offers)) == BEFORE
    assert kept(demand(*OFFERS, floor=OnDemandFloor(units=2))) == BEFORE


@pytest.mark.parametrize("limits", [{MONEY: 0.0}, {MONEY: 0.0, GPUS: 4.0}, {MONEY: 3.0, GPUS: 0.0}])
def test_of_nothing_nothing_is_left(limits: Mapping[str, float]) -> None:
    said, cause = bound_by(demand(*OFFERS), 1.0, WANTED, dict(limits), SharedView("a", limits, {"a": {}}))
    assert cause == ("money_budget" if not limits[MONEY] else "gpu_budget")
    assert "0" in said
