"""The order of service: class, tenants' turns, and in a turn the tenant's priorities, deadlines and arrivals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.scheduling.waiting_queue import Precedence, WaitingQueue, in_order, take_last
from splitserve.errors import BrokenInvariantError


@dataclass(eq=False, slots=True)
class Item:
    arrival: int
    precedence: Precedence
    due_s: float = math.inf
    place: int = field(init=False)

    def __post_init__(self) -> None:
        self.place = self.arrival


Request = tuple[Precedence, float]
precedences = st.builds(
    Precedence, st.integers(-1, 1), st.integers(0, 2), st.sampled_from([-(2**31), -1, 0, 0, 1, 2**31 - 1])
)


requests = st.tuples(precedences, st.sampled_from([1.0, 2.0, 3.0, math.inf]))


def items_of(given_: Sequence[Request]) -> list[Item]:
    return [Item(number, *request) for number, request in enumerate(given_)]


def drained(queue: WaitingQueue[Item]) -> list[Item]:
    served = []
    while (item := queue.pop()) is not None:
        served.append(item)
    return served


@given(st.lists(requests, max_size=12))
def test_priorities_and_deadlines_change_nothing_for_other_tenants(given_: list[Request]) -> None:
    flat = [(replace(precedence, within_tenant=0), math.inf) for precedence, _ in given_]
    for tenant in range(3):
        # The turns of one tenant's requests, whatever all the others want.
        orders = []
        for each in (given_, flat):
            queue: WaitingQueue[Item] = WaitingQueue()
            for item in items_of(each):
                queue.push(item)
            turns = [item.precedence for item in drained(queue)]
            orders.append([turn for turn, p in enumerate(turns) if p.tenant_key == tenant])
        assert orders[0] == orders[1]


@given(st.lists(requests, max_size=12))
def test_class_wins_then_priority_and_deadline_order_within_a_tenant(given_: list[Request]) -> None:
    items = items_of(given_)
    served = in_order(items)
    assert [item.place for item in items] == list(range(len(items)))
    ranks = [item.precedence.class_rank for item in served]
    assert ranks == sorted(ranks, reverse=True)
    for group in {item.precedence.group for item in items}:
        own = [item for item in served if item.precedence.group == group]
        assert own == sorted(own, key=lambda item: (-item.precedence.within_tenant, item.due_s, item.arrival))
    queue: WaitingQueue[Item] = WaitingQueue()
    for item in items:
        queue.push(item)
    assert drained(queue) == served


@given(st.lists(requests, min_size=1, max_size=12))
def test_preemption_takes_the_order_from_its_end(given_: list[Request]) -> None:
    items = items_of(given_)
    order = in_order(items)
    victims = []
    while items:
        victims.append(take_last(items))
        items.remove(victims[-1])
    assert victims == order[::-1]


def test_a_place_that_is_given_up_is_not_used_by_others_of_its_tenant() -> None:
    early, late = Item(1, Precedence(0, 1, 0)), Item(3, Precedence(0, 1, 5))
    theirs = Item(2, Precedence(0, 2, 0))
    queue: WaitingQueue[Item] = WaitingQueue()
    for item in (early, theirs, late):
        queue.push(item)
    queue.discard(early)
    assert drained(queue) == [theirs, late]


def test_two_items_at_one_place_are_a_bug() -> None:
    queue: WaitingQueue[Item] = WaitingQueue()
    queue.push(Item(1, Precedence()))
    with pytest.raises(BrokenInvariantError, match="place 1"):
        queue.push(Item(1, Precedence()))


class Queued(RuleBasedStateMachine):
    """A queue beside a list: items come, are served, come back, and leave."""

    waiting = Bundle("waiting")
    popped = Bundle("popped")

    def __init__(self) -> None:
        super().__init__()
        self.queue: WaitingQueue[Item] = WaitingQueue()
        self.model: list[Item] = []
        self.arrivals = 0

    @rule(target=waiting, request=requests)
    def come(self, request: Request) -> Item:
        self.arrivals += 1
        item = Item(self.arrivals, *request)
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
