"""Queues with bounded bypass, and a heap with lazy deletion."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from splitserve.errors import BrokenInvariantError

K = TypeVar("K", float, tuple[int, int], tuple[int, float, int])
T = TypeVar("T")


class Bypassable(Protocol):
    """An item in a queue. `bypassed` counts the later items that were taken while it did not fit."""

    bypassed: int


B = TypeVar("B", bound=Bypassable)


class Offer(enum.Enum):
    """Result of offering the free capacity to an item."""

    TAKEN = enum.auto()
    """The item left the queue."""
    MISFIT = enum.auto()
    """The item does not fit; smaller items behind it might."""
    SKIP = enum.auto()
    """The item waits for something else; items taken meanwhile do not count as bypassing it."""
    STOP = enum.auto()
    """No capacity is left for any item."""


def offer_in_order(
    items: Iterable[B], attempt: Callable[[B], Offer], *, max_bypasses: int, max_looks: int
) -> Iterator[B]:
    """Offers capacity to items in order, while it is iterated, and yields the items that were taken.

    A misfit may be bypassed `max_bypasses` times in total over all rounds; after that no later item is taken before
    it, so a stream of small items cannot starve it. A round ends after `max_looks` misfits, which bounds its cost.
    Every item drawn from `items` is attempted.
    """
    misfits: list[B] = []
    most = -1  # the most bypasses of a misfit
    for item in items:
        offer = attempt(item)
        if offer is Offer.MISFIT:
            misfits.append(item)
            most = max(most, item.bypassed)
        elif offer is Offer.TAKEN:
            for misfit in misfits:
                misfit.bypassed += 1
            most += bool(misfits)
            yield item
        elif offer is Offer.STOP:
            return
        if misfits and (most >= max_bypasses or len(misfits) >= max_looks):
            return


class LazyHeap(Generic[K, T]):
    """A priority queue: smallest key first, equal keys in insertion order. Items are hashable and unique.

    `discard` only marks an entry. Marked entries are dropped when they reach the top, or all at once when they
    outnumber the live ones, so memory is proportional to the live items and every operation takes amortized
    O(log n).
    """

    def __init__(self) -> None:
        self._heap: list[tuple[K, int, T]] = []
        self._live: dict[T, int] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item: T) -> bool:
        return item in self._live

    def push(self, key: K, item: T) -> None:
        """Adds an item, which must not be in the heap."""
        if item in self._live:
            raise BrokenInvariantError(f"{item!r} is queued already")
        self._serial += 1
        self._live[item] = self._serial
        heapq.heappush(self._heap, (key, self._serial, item))

    def discard(self, item: T) -> None:
        """Removes an item if it is in the heap."""
        self._live.pop(item, None)
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [entry for entry in self._heap if self._live.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def peek(self) -> tuple[K, T] | None:
        """Key and item that `pop` would return, or None."""
        while self._heap:
            key, serial, item = self._heap[0]
            if self._live.get(item) == serial:
                return key, item
            heapq.heappop(self._heap)
        return None

    def pop(self) -> T | None:
        """Removes and returns the item with the smallest key; None if empty."""
        first = self.peek()
        if first is None:
            return None
        heapq.heappop(self._heap)
        del self._live[first[1]]
        return first[1]
