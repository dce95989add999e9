"""The account of several models: never exceeded, whatever is ordered when, by whom, and whoever is stuck."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from autoscaler.sharing.claims.shared_view import summed
from autoscaler.sharing.claims.shares import GPUS, MONEY, Claim, Rung, Uses, of_class
from autoscaler.sharing.shared_account import STALE_S, UNHEARD_S, Holding, SharedAccount
from splitserve.errors import UnavailableError
from tests.support.scaling.signal_sources import Clock

ONE = {MONEY: 1.0}


def nothing() -> dict[str, float]:
    return {}


def account(limit: float = 4.0, clock: Clock | None = None, **least: float) -> SharedAccount:
    models = {"a": 0.0, "b": 0.0} | least

    def needs(price: float) -> dict[str, float]:
        return {MONEY: price}

    return SharedAccount(
        {MONEY: limit},
        {model: (lambda price=price: needs(price)) for model, price in models.items()},  # type: ignore[misc]
        move_after_s=30.0,
        clock=clock or Clock(),
    )


def has(count: float, resource: str = MONEY) -> Holding:
    return Holding({resource: count}, {"decode": {resource: count}})


def known(made: SharedAccount, **counts: float) -> SharedAccount:
    for model, count in counts.items():
        made.holds(model, has(count), made.generation)
        made.claim(model, {}, worth_moving=False)
    return made


def test_what_is_ordered_counts_until_it_is_listed() -> None:
    made = known(account(), a=1, b=1)
    assert made.reserve("a", "decode", 1, ONE) == 1
    assert made.reserve("b", "decode", 5, ONE) == 1, "as many as there is room for"
    with pytest.raises(UnavailableError, match="of 4 for all models a has 2, b 2") as refused:
        made.reserve("a", "decode", 1, ONE)
    assert refused.value.reason == "SHARED_BUDGET"
    known(made, a=2)
    assert made.used == {"a": {MONEY: 2.0}, "b": {MONEY: 2.0}}
    known(made, a=1)
    assert made.reserve("b", "decode", 1, ONE) == 1


def test_nothing_is_ordered_before_all_have_said_what_they_have() -> None:
    made = known(account(), a=0)
    with pytest.raises(UnavailableError, match="what b has and wants is not known") as refused:
        made.reserve("a", "decode", 1, ONE)
    assert refused.value.reason == "SHARED_UNKNOWN"
    known(made, b=3)
    assert made.reserve("a", "decode", 2, ONE) == 1


def test_who_has_not_decided_yet_is_waited_for_a_while() -> None:
    clock = Clock()
    made = known(account(clock=clock), a=0)
    made.holds("b", has(0), made.generation)
    with pytest.raises(UnavailableError, match="what b has and wants is not known"):
        made.reserve("a", "decode", 1, ONE)
    clock.now += STALE_S
    assert made.reserve("a", "decode", 1, ONE) == 1


def test_a_list_from_before_another_stopped_acting_says_nothing() -> None:
    """Another autoscaler held the lease and started replicas, which an earlier list does not have."""
    made = known(account(), a=0, b=0)
    asked = made.generation
    made.forget()
    made.holds("b", has(0), asked)
    assert made.unknown == ["a", "b"]
    made.holds("b", has(4), made.generation)
    known(made, a=0)
    with pytest.raises(UnavailableError):
        made.reserve("a", "decode", 1, ONE)


def test_what_is_ordered_survives_that() -> None:
    made = known(account(), a=0, b=0)
    made.reserve("a", "decode", 3, ONE)
    made.forget()
    known(made, b=0)
    assert made.unknown == ["a"]
    assert made.used["a"] == {MONEY: 3.0}


def test_a_correction_drops_no_order() -> None:
    made = known(account(), a=1, b=0)
    made.reserve("a", "decode", 1, ONE)
    made.corrected("a", has(2))
    assert made.used["a"] == {MONEY: 3.0}


def test_what_takes_nothing_of_a_limit_needs_no_room_in_it() -> None:
    made = known(account(), a=5, b=0)
    assert made.reserve("b", "decode", 2, {GPUS: 1.0}) == 2


def want(count: int, least: int = 0) -> Claim:
    return Claim(tuple(Rung(n, {MONEY: float(n)}, n / count) for n in range(least, count + 1)))


def test_a_model_that_is_stuck_keeps_what_it_has_and_claims_no_more() -> None:
    clock = Clock()
    made = known(account(clock=clock), a=1, b=1)
    made.claim("b", {"decode": want(4)}, worth_moving=False)
    assert made.view("a").others["b", "decode"].rungs[-1].uses == {MONEY: 4.0}
    clock.now += STALE_S + 1
    (claim,) = made.view("a").others.values()
    assert [rung.uses for rung in claim.rungs] == [{MONEY: 1.0}]
    assert made.view("a").granted({"decode": want(4)}).rungs == (3,), "the rest"


def test_a_model_that_decides_seldom_is_not_stuck_for_that() -> None:
    clock = Clock()
    made = SharedAccount(
        {MONEY: 4.0}, {"a": nothing, "b": nothing}, interval_s={"a": 1, "b": 60}.__getitem__, clock=clock
    )
    made.claim("b", {"decode": want(4)}, worth_moving=False)
    clock.now += STALE_S + 1
    assert made.view("a").others.keys() == {("b", "decode")}
    clock.now += 120
    assert made.view("a").others.keys() == {("b", "")}


def test_before_its_first_decision_a_model_claims_the_least_that_it_needs() -> None:
    made = known(account(b=2.0), a=0)
    made.holds("b", has(0), made.generation)
    assert made.view("a").granted({"decode": want(4)}).rungs == (2,)


def test_something_moves_only_once_it_was_worth_it_for_a_while() -> None:
    clock = Clock()
    made = known(account(clock=clock), a=4, b=0)
    assert not made.view("a").may_move
    made.claim("b", {"decode": want(4)}, worth_moving=True)
    clock.now += 29
    assert not made.view("a").may_move
    made.claim("a", {"decode": want(4)}, worth_moving=False)
    made.claim("b", {"decode": want(4)}, worth_moving=True)
    clock.now += 29
    assert not made.view("a").may_move, "it was not worth it in between"
    made.claim("a", {}, worth_moving=False)
    clock.now += 1
    assert made.view("a").may_move


def test_who_shares_nothing_of_it_delays_no_move() -> None:
    """Two share the GPUs of their actuator; a third with classes, which are limited, decides as often as they do."""
    clock, small = Clock(), of_class("small")
    made = SharedAccount({small: 4.0}, dict.fromkeys("abc", nothing), move_after_s=30.0, clock=clock)
    for model, held in (("a", {GPUS: 4.0}), ("b", {small: 1.0}), ("c", {})):
        made.holds(model, Holding(held, {"decode": held}), made.generation)
    few = Claim(tuple(Rung(n, {GPUS: float(n)}, 1.0) for n in range(5)), weight=0.1)
    many = Claim(tuple(Rung(n, {GPUS: float(n)}, n / 4) for n in range(5)))
    classed = Claim((Rung(1, {small: 1.0}, 1.0),))
    moved_s = None
    for second in range(0, 60, 5):
        clock.now = float(second)
        # Four GPUs, all of which `a` has: the actuator leaves out those of others.
        for model, claim, inventory in (("a", few, 4), ("b", classed, None), ("c", many, 0)):
            got = made.view(model, inventory).granted({"decode": claim})
            made.claim(model, {"decode": claim}, got.worth_moving)
            if model == "c" and got.rungs == (4,) and moved_s is None:
                moved_s = second
            assert model != "b" or not got.worth_moving
    assert moved_s == 30, "`c` says at once that it is worth it"


def test_without_a_limit_the_inventory_is_what_is_shared() -> None:
    clock = Clock()
    made = SharedAccount({}, {"a": nothing, "b": nothing, "classed": nothing}, clock=clock)
    for model, count in (("a", 2.0), ("b", 3.0), ("classed", 1.0)):
        made.holds(model, has(count, GPUS), made.generation)
    made.claim("b", {"decode": Claim((Rung(1, {GPUS: 1.0}, 1.0),))}, worth_moving=False)
    made.claim("classed", {"decode": Claim((Rung(1, {MONEY: 1.0}, 1.0),))}, worth_moving=False)
    # Eight GPUs: the actuator of `a` leaves out the four that others have.
    view = made.view("a", inventory=4)
    assert view.limits == {GPUS: 7.0}
    assert view.free(GPUS) == 2.0


def test_a_stuck_model_counts_once_beside_the_inventory() -> None:
    """The GPUs of one with classes are not in the inventory that others share; those of one without are."""
    clock = Clock()
    least = {"a": nothing, "classed": lambda: {MONEY: 1.0}, "silent": lambda: {GPUS: 1.0}}
    made = SharedAccount({}, least, clock=clock)
    for model, count in (("a", 2.0), ("classed", 3.0), ("silent", 1.0)):
        made.holds(model, has(count, GPUS), made.generation)
    wants = Claim(tuple(Rung(n, {GPUS: float(n)}, n / 4) for n in range(5)))
    for claims in ({}, {"decode": Claim((Rung(1, {MONEY: 1.0}, 1.0),))}):
        made.claim("classed", claims, worth_moving=False)
        clock.now += STALE_S + 1
        # Eight GPUs: the actuator of `a` leaves out the four of the others. The one without classes never decided.
        view = made.view("a", inventory=4)
        assert (view.limits, view.free(GPUS)) == ({GPUS: 5.0}, 2.0)
        assert view.granted({"decode": wants}).rungs == (4,)
        assert view.others["classed", ""].rungs[0].uses == {MONEY: 1.0}


SMALL, WIDE = {MONEY: 2.0, GPUS: 1.0}, {MONEY: 1.0, GPUS: 2.0}


class AnyOrder(RuleBasedStateMachine):
    """Starts, lists, ends, failures, another holder, in any order: what really runs never exceeds the limits."""

    MODELS = st.sampled_from(["a", "b", "c"])
    LIMITS: ClassVar[Uses] = {MONEY: 8.0, GPUS: 7.0}

    @initialize()
    def begin(self) -> None:
        self.clock = Clock()
        self.account = SharedAccount(self.LIMITS, dict.fromkeys("abc", nothing), clock=self.clock)
        self.real: dict[str, list[Uses]] = {model: [] for model in "abc"}
        for model in "abc":
            self.account.holds(model, holding([]), self.account.generation)
            self.account.claim(model, {}, worth_moving=False)
        self.asked: dict[str, tuple[int, list[Uses]]] = {}
        self.late: list[tuple[str, Uses]] = []
        """Orders that may be carried out yet, by model."""

    @rule(
        model=MODELS,
        count=st.integers(1, 4),
        each=st.sampled_from([SMALL, WIDE]),
        outcome=st.sampled_from(["arrives", "fails", "unheard"]),
    )
    def start(self, model: str, count: int, each: Uses, outcome: str) -> None:
        if model in self.asked:
            return  # a control loop does one thing at a time
        try:
            able = self.account.reserve(model, "decode", count, each)
        except UnavailableError:
            return
        if outcome == "arrives":
            self.real[model] += [each] * able
        elif outcome == "unheard":
            self.account.unheard(model, able)
            self.late += [(model, each)] * able

    @rule()
    def arrive_late(self) -> None:
        if self.late:
            model, each = self.late.pop()
            self.real[model].append(each)

    @rule()
    def pass_time(self) -> None:
        """No order and no list is on its way for so long."""
        self.clock.now += UNHEARD_S
        self.late, self.asked = [], {}

    @rule(model=MODELS)
    def ask(self, model: str) -> None:
        self.asked[model] = (self.account.generation, list(self.real[model]))

    @rule(model=MODELS)
    def answer(self, model: str) -> None:
        if model in self.asked:
            generation, there = self.asked.pop(model)
            self.account.holds(model, holding(there), generation)

    @rule(model=MODELS)
    def look(self, model: str) -> None:
        self.ask(model)
        self.answer(model)

    @rule(model=MODELS)
    def end(self, model: str) -> None:
        self.real[model] = self.real[model][1:]

    @rule()
    def take_over(self) -> None:
        """Another has acted meanwhile, within the same limits."""
        self.account.forget()
        there = summed([*self.all_real(), *(each for _, each in self.late)])
        if all(there.get(name, 0.0) + WIDE[name] <= limit for name, limit in self.LIMITS.items()):
            self.real["a"].append(WIDE)

    def all_real(self) -> list[Uses]:
        return [one for there in self.real.values() for one in there]

    @invariant()
    def within_the_limits(self) -> None:
        if hasattr(self, "real"):
            there = summed(self.all_real())
            assert all(there.get(name, 0.0) <= limit for name, limit in self.LIMITS.items())


def holding(there: list[Uses]) -> Holding:
    return Holding(summed(there), {"decode": summed(there)})


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
