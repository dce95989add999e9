"""The order in which a worker serves requests: by class, then by arrival; tenants order only their own.

A request takes a place in the order of arrival. Where a tenant's turn comes, its most urgent request is served, and the
one whose place that was takes the place of the request served: requests of one tenant trade places, and those of other
tenants see no difference, whatever priorities it gives. Preemption takes the same order from its end.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Generic, Protocol, TypeVar

from splitserve.errors import BrokenInvariantError
from splitserve.queues import LazyHeap, heap_in_order


@dataclass(frozen=True, slots=True)
class Precedence:
    """See `Precedence` in protos/splitserve/v1/generation.proto."""

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
        """Where it stands among others."""

    @property
    def arrival(self) -> int:
        """Its number in the order of arrival, unique."""

    place: int
    """Its place in that order: its arrival, until it trades places."""


R = TypeVar("R", bound=Ranked)


def _urgency(item: Ranked) -> tuple[int, int]:
    """Sort key among the requests of one tenant and class."""
    return -item.precedence.within_tenant, item.arrival


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
    """The last item in order of service, of at least one; it trades places with the one whose turn is last."""
    items = list(items)
    lowest = min(item.precedence.class_rank for item in items)
    last = max((item for item in items if item.precedence.class_rank == lowest), key=lambda item: item.place)
    own = (item for item in items if item.precedence.group == last.precedence.group)
    victim = max(own, key=_urgency)
    victim.place, last.place = last.place, victim.place
    return victim


class Preemptible(Ranked, Protocol):
    """A running request."""

    @property
    def remaining(self) -> int:
        """Tokens that it has to compute before the next one is sampled."""


P = TypeVar("P", bound=Preemptible)


def whom_to_preempt(running: Iterable[P], late: frozenset[P]) -> P:
    """The last one in order of service, of at least one, but in its class a late prompt before any other."""
    candidates = list(running)
    lowest = min(one.precedence.class_rank for one in candidates)
    paused = [
        one for one in candidates if one in late and one.remaining > 1 and one.precedence.class_rank == lowest
    ]
    return take_last(paused or candidates)


class Turns(Generic[R]):
    """Whose turn it is, and who is served then: the owner of a turn and a request of the same tenant and class."""

    def __init__(self, turns: Iterable[tuple[R, R]]) -> None:
        """`turns`: owner and who is served, in order."""
        self._owner = {served: owner for owner, served in turns}
        self.order = list(self._owner)
        """Who is served, in order."""
        self._holder: dict[R, R] = {}
        self._holds: dict[R, R] = {}

    def take(self, served: R) -> R:
        """Gives a request the turn in which it is served. Returns who held that turn, and now has its one."""
        turn, own = self._owner[served], self._holds.get(served, served)
        holder = self._holder.get(turn, turn)
        self._holds[served], self._holds[holder] = turn, own
        self._holder[turn], self._holder[own] = served, holder
        return holder


def turns_by_urgency(owners: Iterable[R]) -> list[tuple[R, R]]:
    """The turns of these owners, of one class: in each, the owner's tenant has its most urgent request served. Among
    equally urgent ones the order stays."""
    owners = list(owners)
    tenants: defaultdict[tuple[int, int], list[R]] = defaultdict(list)
    for owner in owners:
        tenants[owner.precedence.group].append(owner)
    served = {
        group: iter(sorted(own, key=lambda item: -item.precedence.within_tenant))
        for group, own in tenants.items()
    }
    return [(owner, next(served[owner.precedence.group])) for owner in owners]


@dataclass(slots=True)
class _Group(Generic[R]):
    """The waiting requests of one tenant and class."""

    items: LazyHeap[tuple[int, int], R] = field(default_factory=LazyHeap)
    at: dict[int, R] = field(default_factory=dict)
    """Who holds which place."""
    places: list[int] = field(default_factory=list)
    """A heap of the places in `at`, and of some that are given up."""

    @property
    def first_place(self) -> int:
        while self.places[0] not in self.at:
            heapq.heappop(self.places)
        return self.places[0]

    def turns(self, key: tuple[int, int]) -> Iterator[tuple[int, int, tuple[int, int]]]:
        """When it is the turn of this group, whose key is `key`: sort keys and `key`, in order."""
        for place, _ in groupby(heap_in_order(self.places)):
            if place in self.at:
                yield -key[0], place, key


class PrecedenceQueue(Generic[R]):
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

    def trade(self, item: R, other: R) -> None:
        """Two items of one group, here or not, trade places."""
        item.place, other.place = other.place, item.place
        key = item.precedence.group
        group = self._groups.get(key)
        if group is None:
            return
        here = [each for each in (item, other) if each in group.items]
        for each in here:
            group.at.pop(other.place if each is item else item.place, None)
        for each in here:
            group.at[each.place] = each
            heapq.heappush(group.places, each.place)
        if here:
            self._changed(key, group)

    def in_order(self, class_rank: int | None = None) -> Iterator[R]:
        """The items, of one class or of all, in order of service; places stay as they are. Not to be changed meanwhile.
        Takes O(groups), and O(log n) for each item that is taken."""
        groups = [(key, group) for key, group in self._groups.items() if class_rank in (None, key[0])]
        own = {key: group.items.in_order() for key, group in groups}
        for _, _, key in heapq.merge(*(group.turns(key) for key, group in groups)):
            yield next(own[key])

    def most_urgent(self, group: tuple[int, int]) -> R:
        """The most urgent item of this class and tenant, of which there is one at least."""
        first = self._groups[group].items.peek()
        assert first is not None
        return first[1]

    def by_class(self) -> dict[int, list[R]]:
        """The items of each class, the highest first, in no order."""
        found: dict[int, list[R]] = {}
        for (rank, _), group in sorted(self._groups.items(), key=lambda one: -one[0][0]):
            found.setdefault(rank, []).extend(group.at.values())
        return found

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
