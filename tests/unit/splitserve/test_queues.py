"""Bounded bypass: items are served in order except that misfits may be bypassed a bounded number of times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.queues import LazyHeap, Offer, offer_in_order

pytestmark = pytest.mark.timeout(60)


@dataclass(eq=False)
class Item:
    name: int
    size: int
    bypassed: int = 0


class Queue:
    """Items in order, served in rounds in which some units of capacity become free."""

    def __init__(self, sizes: list[int], max_bypasses: int, max_looks: int) -> None:
        self.items = [Item(name, size) for name, size in enumerate(sizes)]
        self.max_bypasses, self.max_looks = max_bypasses, max_looks
        self.tried: list[Item] = []

    def round(self, capacity: int) -> list[Item]:
        self.tried = []

        def attempt(item: Item) -> Offer:
            nonlocal capacity
            self.tried.append(item)
            if item.size > capacity:
                return Offer.MISFIT if capacity else Offer.STOP
            capacity -= item.size
            return Offer.TAKEN

        taken = list(
            offer_in_order(
                list(self.items), attempt, max_bypasses=self.max_bypasses, max_looks=self.max_looks
            )
        )
        self.items = [item for item in self.items if item not in taken]
        return taken


def reference_scheduler_loop(queue: Queue, capacity: int) -> list[Item]:
    """The scheduler's former loop: ends a round once any misfit has reached its bypasses."""
    skipped: list[Item] = []
    taken: list[Item] = []
    for item in queue.items:
        if capacity == 0 or len(skipped) >= queue.max_looks:
            break
        if item.size > capacity:
            skipped.append(item)
        else:
            capacity -= item.size
            taken.append(item)
            for other in skipped:
                other.bypassed += 1
        if any(other.bypassed >= queue.max_bypasses for other in skipped):
            break
    queue.items = [item for item in queue.items if item not in taken]
    return taken


def reference_admission_loop(queue: Queue, capacity: int) -> list[Item]:
    """The former loop of admission and of the reservation queue: takes one item per round."""
    skipped: list[Item] = []
    for item in queue.items:
        if item.size <= capacity:
            for other in skipped:
                other.bypassed += 1
            queue.items.remove(item)
            return [item]
        if capacity == 0:
            return []
        skipped.append(item)
        if item.bypassed >= queue.max_bypasses or len(skipped) == queue.max_looks:
            return []
    return []


sizes = st.lists(st.integers(1, 12), max_size=30)
capacities = st.lists(st.integers(0, 14), max_size=30)
scenario = given(sizes, capacities, st.integers(0, 5), st.integers(1, 9))
reproducible = settings(derandomize=True, max_examples=300, deadline=None)


@reproducible
@scenario
def test_nobody_is_bypassed_more_often_than_allowed(
    sizes: list[int], capacities: list[int], max_bypasses: int, max_looks: int
) -> None:
    queue = Queue(sizes, max_bypasses, max_looks)
    overtaken = dict.fromkeys(queue.items, 0)
    for capacity in capacities:
        waiting = list(queue.items)
        taken = queue.round(capacity)
        for item in queue.items:
            overtaken[item] += sum(1 for other in taken if other.name > item.name)
        assert [item.name for item in taken] == sorted(item.name for item in taken)
        assert [item for item in waiting if item not in taken] == queue.items
    assert all(times <= max_bypasses for times in overtaken.values())
    assert all(item.bypassed == overtaken[item] for item in queue.items)


@reproducible
@scenario
def test_without_misfits_it_is_first_come_first_served(
    sizes: list[int], capacities: list[int], max_bypasses: int, max_looks: int
) -> None:
    queue = Queue([1] * len(sizes), max_bypasses, max_looks)
    served = [item.name for capacity in capacities for item in queue.round(capacity)]
    assert served == list(range(len(served)))


@reproducible
@scenario
def test_a_round_tries_at_most_so_many_misfits(
    sizes: list[int], capacities: list[int], max_bypasses: int, max_looks: int
) -> None:
    queue = Queue(sizes, max_bypasses, max_looks)
    for capacity in capacities:
        taken = queue.round(capacity)
        assert sum(1 for item in queue.tried if item not in taken) <= max_looks


@reproducible
@scenario
def test_it_serves_as_the_scheduler_did(
    sizes: list[int], capacities: list[int], max_bypasses: int, max_looks: int
) -> None:
    new, old = Queue(sizes, max_bypasses, max_looks), Queue(sizes, max_bypasses, max_looks)
    for capacity in capacities:
        assert [item.name for item in new.round(capacity)] == [
            item.name for item in reference_scheduler_loop(old, capacity)
        ]
        assert [item.bypassed for item in new.items] == [item.bypassed for item in old.items]


@reproducible
@scenario
def test_one_at_a_time_it_serves_as_admission_did(
    sizes: list[int], capacities: list[int], max_bypasses: int, max_looks: int
) -> None:
    new, old = Queue(sizes, max_bypasses, max_looks), Queue(sizes, max_bypasses, max_looks)
    for capacity in capacities:

        def attempt(item: Item, capacity: int = capacity) -> Offer:
            if item.size <= capacity:
                return Offer.TAKEN
            return Offer.MISFIT if capacity else Offer.STOP

        taken = next(offer_in_order(new.items, attempt, max_bypasses=max_bypasses, max_looks=max_looks), None)
        if taken is not None:
            new.items.remove(taken)
        assert [item.name for item in ([taken] if taken else [])] == [
            item.name for item in reference_admission_loop(old, capacity)
        ]
        assert [item.bypassed for item in new.items] == [item.bypassed for item in old.items]


def test_who_is_skipped_is_not_counted_and_holds_nobody_up() -> None:
    items = [Item(0, 1), Item(1, 1), Item(2, 1)]

    def attempt(item: Item) -> Offer:
        return Offer.SKIP if item.name == 0 else Offer.TAKEN

    taken = list(offer_in_order(items, attempt, max_bypasses=0, max_looks=1))
    assert [item.name for item in taken] == [1, 2]
    assert [item.bypassed for item in items] == [0, 0, 0]


def test_nothing_is_asked_of_the_source_that_is_not_tried() -> None:
    heap: LazyHeap[float, Item] = LazyHeap()
    for name in range(5):
        heap.push(float(name), Item(name, 1))

    def popped() -> Iterator[Item]:
        while (item := heap.pop()) is not None:
            yield item

    assert list(offer_in_order(popped(), lambda _: Offer.MISFIT, max_bypasses=3, max_looks=2)) == []
    assert len(heap) == 3
