"""The order of service: class first, then arrival; a tenant's priorities order its own requests and no one else's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.core.precedence import (
    Precedence,
    PrecedenceQueue,
    Turns,
    in_order,
    take_last,
    turns_by_urgency,
)
from splitserve.errors import BrokenInvariantError


@dataclass(eq=False, slots=True)
class Item:
    arrival: int
    precedence: Precedence
    place: int = field(init=False)

    def __post_init__(self) -> None:
        self.place = self.arrival


precedences = st.builds(
    Precedence, st.integers(-1, 1), st.integers(0, 2), st.sampled_from([-(2**31), -1, 0, 0, 1, 2**31 - 1])
)


def items_of(given_: Sequence[Precedence]) -> list[Item]:
    return [Item(number, precedence) for number, precedence in enumerate(given_)]


def drained(queue: PrecedenceQueue[Item]) -> list[Item]:
    served = []
    while (item := queue.pop()) is not None:
        served.append(item)
    return served


@given(st.lists(precedences, max_size=12))
def test_priorities_change_nothing_for_other_tenants(given_: list[Precedence]) -> None:
    flat = [replace(each, within_tenant=0) for each in given_]
    for tenant in range(3):
        # The turns of one tenant's requests, whatever all the others want.
        orders = []
        for each in (given_, flat):
            queue: PrecedenceQueue[Item] = PrecedenceQueue()
            for item in items_of(each):
                queue.push(item)
            turns = [item.precedence for item in drained(queue)]
            orders.append([turn for turn, p in enumerate(turns) if p.tenant_key == tenant])
        assert orders[0] == orders[1]


@given(st.lists(precedences, max_size=12), st.randoms(use_true_random=False), st.data())
def test_turns(given_: list[Precedence], chance: random.Random, data: st.DataObject) -> None:
    """Who is served has the place of the turn, whoever was served before; the others keep the places that are left."""
    items = items_of([replace(each, class_rank=0) for each in given_])
    queue: PrecedenceQueue[Item] = PrecedenceQueue()
    waiting = [item for item in items if chance.random() < 0.7]
    for item in waiting:
        queue.push(item)
    owners = list(items)
    chance.shuffle(owners)
    pairs = turns_by_urgency(owners)
    places = {owner: owner.place for owner in owners}
    assert [(o.precedence.tenant_key) for o, _ in pairs] == [s.precedence.tenant_key for _, s in pairs]
    turns = Turns(pairs)
    assert turns.order == [served for _, served in pairs]
    for owner, served in pairs[: data.draw(st.integers(0, len(pairs)))]:
        holder = turns.take(served)
        if holder is not served:
            queue.trade(served, holder)
        assert served.place == places[owner]
        if served in queue:
            queue.discard(served)
            waiting.remove(served)
    assert sorted(item.place for item in items) == list(range(len(items)))
    left = drained(queue)
    assert sorted(left, key=id) == sorted(waiting, key=id)
    for tenant in range(3):
        own = [served for _, served in pairs if served.precedence.tenant_key == tenant]
        urgencies = [served.precedence.within_tenant for served in own]
        assert urgencies == sorted(urgencies, reverse=True)


@given(st.lists(precedences, max_size=12), st.sets(st.integers(0, 11)), st.integers(0, 4))
def test_a_look_at_the_queue_is_its_order(given_: list[Precedence], gone: set[int], popped: int) -> None:
    queue: PrecedenceQueue[Item] = PrecedenceQueue()
    items = items_of(given_)
    for item in items:
        queue.push(item)
    for number in gone & set(range(len(items))):
        queue.discard(items[number])
    taken = [item for _ in range(popped) if (item := queue.pop()) is not None]
    for item in taken:
        queue.push(item)
    seen = list(queue.in_order())
    assert seen == drained(queue)


@given(st.lists(precedences, max_size=12))
def test_class_wins_and_priority_orders_within_a_tenant(given_: list[Precedence]) -> None:
    items = items_of(given_)
    served = in_order(items)
    assert [item.place for item in items] == list(range(len(items)))
    ranks = [item.precedence.class_rank for item in served]
    assert ranks == sorted(ranks, reverse=True)
    for group in {item.precedence.group for item in items}:
        own = [item for item in served if item.precedence.group == group]
        assert own == sorted(own, key=lambda item: (-item.precedence.within_tenant, item.arrival))
    queue: PrecedenceQueue[Item] = PrecedenceQueue()
    for item in items:
        queue.push(item)
    assert drained(queue) == served


@given(st.lists(precedences, min_size=1, max_size=12))
def test_preemption_takes_the_order_from_its_end(given_: list[Precedence]) -> None:
    items = items_of(given_)
    order = in_order(items)
    victims = []
    while items:
        victims.append(take_last(items))
        items.remove(victims[-1])
    assert victims == order[::-1]


def test_an_extreme_priority_neither_delays_nor_preempts_another_tenant() -> None:
    extreme, other = Precedence(0, 1, 2**31 - 1), Precedence(0, 2, 0)
    mine, theirs = Item(1, replace(extreme, within_tenant=0)), Item(2, other)
    late = [Item(number, extreme) for number in range(3, 9)]
    queue: PrecedenceQueue[Item] = PrecedenceQueue()
    for item in (mine, theirs, *late):
        queue.push(item)
    served = drained(queue)
    assert served[:2] == [late[0], theirs]
    assert served[-1] is mine
    for item in (mine, theirs, *late):
        item.place = item.arrival
    assert take_last([mine, theirs, *late]) is mine


def test_a_place_that_is_given_up_is_not_used_by_others_of_its_tenant() -> None:
    early, late = Item(1, Precedence(0, 1, 0)), Item(3, Precedence(0, 1, 5))
    theirs = Item(2, Precedence(0, 2, 0))
    queue: PrecedenceQueue[Item] = PrecedenceQueue()
    for item in (early, theirs, late):
        queue.push(item)
    queue.discard(early)
    assert drained(queue) == [theirs, late]


def test_two_items_at_one_place_are_a_bug() -> None:
    queue: PrecedenceQueue[Item] = PrecedenceQueue()
    queue.push(Item(1, Precedence()))
    with pytest.raises(BrokenInvariantError, match="place 1"):
        queue.push(Item(1, Precedence()))


class Queued(RuleBasedStateMachine):
    """A queue beside a list: items come, are served, come back, and leave."""

    waiting = Bundle("waiting")
    popped = Bundle("popped")

    def __init__(self) -> None:
        super().__init__()
        self.queue: PrecedenceQueue[Item] = PrecedenceQueue()
        self.model: list[Item] = []
        self.arrivals = 0

    @rule(target=waiting, precedence=precedences)
    def come(self, precedence: Precedence) -> Item:
        self.arrivals += 1
        item = Item(self.arrivals, precedence)
        self.queue.push(item)
        self.model.append(item)
        return item

    @rule(target=popped)
    def serve(self) -> Item | None:
        expected = in_order(self.model)[:1]
        place = (
            min(
                (i.place for i in self.model if i.precedence.group == expected[0].precedence.group), default=0
            )
            if expected
            else 0
        )
        item = self.queue.pop()
        assert [item] == (expected or [None])
        if item is not None:
            assert item.place == place
            self.model.remove(item)
        return item

    @rule(item=consumes(popped))
    def come_back(self, item: Item | None) -> None:
        if item is not None and item not in self.queue:
            self.queue.push(item)
            self.model.append(item)

    @rule(item=consumes(waiting))
    def leave(self, item: Item) -> None:
        self.queue.discard(item)
        if item in self.model:
            self.model.remove(item)

    @invariant()
    def same(self) -> None:
        assert len(self.queue) == len(self.model)
        places = [item.place for item in self.model]
        assert len(set(places)) == len(places)
        assert all(item in self.queue for item in self.model)
        assert self.queue.peek() is (in_order(self.model)[0] if self.model else None)


TestQueued = Queued.TestCase
