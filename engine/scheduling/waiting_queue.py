"""The order in which a worker serves requests that wait.

1. The higher class goes first.
2. Within a class tenants take turns in the order in which their requests arrived.
3. In a tenant's turn its request with the highest priority is served,
4. of equal ones the one that is due first, where requests have a deadline for their first token,
5. else the one that arrived first.

A request has a place in the order of arrival. On a tenant's turn its most urgent request is served, and trades places
with the request whose place it was. So a tenant's priorities and deadlines reorder its own requests only. Preemption
follows the same order from its end.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from splitserve.errors import BrokenInvariantError
from splitserve.queues import LazyHeap


@dataclass(frozen=True, slots=True)
class Precedence:
    """What orders a request among others: `Precedence` of protos/splitserve/v1/generation.proto."""

    class_rank: int = 0
    tenant_key: int = 0
    within_tenant: int = 0

    @property
    def group(self) -> tuple[int, int]:
        """Requests with the same class and tenant trade places."""
        return self.class_rank, self.tenant_key

    def precedes(self, other: Precedence) -> bool:
        """Whether a request goes before another one that arrived earlier."""
        if self.group == other.group:
            return self.within_tenant > other.within_tenant
        return self.class_rank > other.class_rank


FIRST_COME = Precedence()
"""The standard class, and no tenant."""


class Ranked(Protocol):
    """A request in an order. Hashable; compared by identity."""

    @property
    def precedence(self) -> Precedence:
        """Its class, tenant and priority."""

    @property
    def arrival(self) -> int:
        """Its number in the order of arrival, unique."""

    @property
    def due_s(self) -> float:
        """When its first token is due; infinity for never. Does not change while it waits."""

    place: int
    """Its place in that order: its arrival, until it trades places."""


R = TypeVar("R", bound=Ranked)


_Urgency = tuple[int, float, int]


def _urgency(item: Ranked) -> _Urgency:
    """Sort key among the requests of one tenant and class."""
    return -item.precedence.within_tenant, item.due_s, item.arrival


def in_order(items: Iterable[R]) -> list[R]:
    """The items in order of service. Places stay as they are."""
    turns = sorted(items, key=lambda item: (-item.precedence.class_rank, item.place))
    groups: defaultdict[tuple[int, int], list[R]] = defaultdict(list)
    for item in turns:
        groups[item.precedence.group].append(item)
    own: dict[tuple[int, int], Iterator[R]] = {
        group: iter(sorted(members, key=_urgency)) for group, members in groups.items()
    }
    return [next(own[item.precedence.group]) for item in turns]


def take_last(items: Iterable[R]) -> R:
    """The last of one or more items in order of service; it trades places with the item whose turn is last."""
    items = list(items)
    lowest = min(item.precedence.class_rank for item in items)
    last = max((item for item in items if item.precedence.class_rank == lowest), key=lambda item: item.place)
    own = (item for item in items if item.precedence.group == last.precedence.group)
    victim = max(own, key=_urgency)
    victim.place, last.place = last.place, victim.place
    return victim


@dataclass(slots=True)
class _Group(Generic[R]):
    """The waiting requests of one tenant and class."""

    items: LazyHeap[_Urgency, R] = field(default_factory=LazyHeap)
    at: dict[int, R] = field(default_factory=dict)
    """The request at each place."""
    places: list[int] = field(default_factory=list)
    """A heap of the places in `at`, and of some that no request has any more."""

    @property
    def first_place(self) -> int:
        while self.places[0] not in self.at:
            heapq.heappop(self.places)
        return self.places[0]


class WaitingQueue(Generic[R]):
    """Waiting requests in order of service. Every operation takes amortized O(log n)."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, int], _Group[R]] = {}
        self._turns: LazyHeap[tuple[int, int], tuple[int, int]] = LazyHeap()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, item: R) -> bool:
        group = self._groups.get(item.precedence.group)
        return group is not None and item in group.items

    def push(self, item: R) -> None:
        """Adds an item at its place."""
        key = item.precedence.group
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group()
        if item.place in group.at:
            raise BrokenInvariantError(f"place {item.place} is taken")
        group.items.push(_urgency(item), item)
        group.at[item.place] = item
        heapq.heappush(group.places, item.place)
        self._count += 1
        self._changed(key, group)

    def peek(self) -> R | None:
        """The item that `pop` would return, or None."""
        turn = self._turns.peek()
        if turn is None:
            return None
        first = self._groups[turn[1]].items.peek()
        return None if first is None else first[1]

    def pop(self) -> R | None:
        """Removes and returns the first item, which takes the place whose turn it is; None if empty."""
        item = self.peek()
        if item is None:
            return None
        group = self._groups[item.precedence.group]
        place = group.first_place
        if item.place != place:
            other = group.at[place]
            other.place, item.place = item.place, place
            group.at[other.place] = other
            group.at[place] = item
        self.discard(item)
        return item

    def discard(self, item: R) -> None:
        """Removes an item, and its place, if it is here."""
        key = item.precedence.group
        group = self._groups.get(key)
        if group is None or item not in group.items:
            return
        group.items.discard(item)
        del group.at[item.place]
        if len(group.places) > 2 * len(group.at) + 64:
            group.places = sorted(group.at)
        self._count -= 1
        self._changed(key, group)

    def _changed(self, key: tuple[int, int], group: _Group[R]) -> None:
        self._turns.discard(key)
        if group.at:
            self._turns.push((-key[0], group.first_place), key)
        else:
            del self._groups[key]
