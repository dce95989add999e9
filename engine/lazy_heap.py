"""A priority queue whose items can leave from the middle in constant time."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

K = TypeVar("K", float, tuple[int, int])
T = TypeVar("T")


class LazyHeap(Generic[K, T]):
    """Smallest key first; equal keys in order of arrival. Items are hashable and held at most once.

    `discard` only marks an entry. Marked entries are dropped when they surface, or all at once when they
    outnumber the live ones, so memory stays proportional to the live items and every operation costs
    amortised O(log n).
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
        """Adds an item that is not in the heap."""
        if item in self._live:
            raise AssertionError(f"{item!r} is queued already")
        self._serial += 1
        self._live[item] = self._serial
        heapq.heappush(self._heap, (key, self._serial, item))

    def discard(self, item: T) -> None:
        """Removes an item if it is there."""
        self._live.pop(item, None)
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [entry for entry in self._heap if self._live.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def peek(self) -> tuple[K, T] | None:
        """Key and item that `pop` would take, or None."""
        while self._heap:
            key, serial, item = self._heap[0]
            if self._live.get(item) == serial:
                return key, item
            heapq.heappop(self._heap)
        return None

    def pop(self) -> T | None:
        """Takes the item with the smallest key, or None."""
        first = self.peek()
        if first is None:
            return None
        heapq.heappop(self._heap)
        del self._live[first[1]]
        return first[1]
