"""Keeps free block numbers as maximal runs, so that allocations are as contiguous as possible."""

from __future__ import annotations

from splitserve.errors import BrokenInvariantError


class FreeBlocks:
    """A set of integers below `size`, stored as runs with boundary tags and bucketed by length.

    Bucket k holds the runs of length [2^k, 2^(k+1)): segregated fit with coalescing on free (Knuth,
    The Art of Computer Programming, volume 1, section 2.5). `add` costs O(1), `take(n)` O(n).
    """

    def __init__(self, size: int) -> None:
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._buckets: list[dict[int, None]] = [{} for _ in range(max(size, 1).bit_length())]
        self._count = size
        if size:
            self._insert(0, size)

    def __len__(self) -> int:
        return self._count

    def add(self, number: int) -> None:
        """Adds one number, merging it with its neighbours."""
        start, end = number, number + 1
        if number in self._start_of:
            start = self._start_of[number]
            self._remove(start)
        if end in self._end_of:
            right = end
            end = self._end_of[right]
            self._remove(right)
        self._insert(start, end)
        self._count += 1

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Removes `count` numbers: the run after `after` if free, then a run that fits, else the longest runs."""
        taken: list[int] = []
        if after is not None and count and after + 1 in self._end_of:
            self._cut(after + 1, count, taken)
        while len(taken) < count:
            self._cut(self._choose(count - len(taken)), count - len(taken), taken)
        self._count -= count
        return taken

    def _choose(self, count: int) -> int:
        # Any run in the buckets from ceil(log2 count) on is long enough. The bucket below may have one too, but
        # finding it would need a search.
        fitting = (count - 1).bit_length()
        for bucket in self._buckets[fitting:]:
            if bucket:
                return _any_of(bucket)
        for bucket in reversed(self._buckets[:fitting]):
            if bucket:
                return _any_of(bucket)
        raise BrokenInvariantError("no free block is left")

    def _cut(self, start: int, limit: int, taken: list[int]) -> None:
        end = self._end_of[start]
        stop = min(end, start + limit)
        self._remove(start)
        if stop < end:
            self._insert(stop, end)
        taken.extend(range(start, stop))

    def _insert(self, start: int, end: int) -> None:
        self._end_of[start] = end
        self._start_of[end] = start
        self._buckets[(end - start).bit_length() - 1][start] = None

    def _remove(self, start: int) -> None:
        end = self._end_of.pop(start)
        del self._start_of[end]
        del self._buckets[(end - start).bit_length() - 1][start]


def _any_of(bucket: dict[int, None]) -> int:
    # `next(iter(bucket))` would skip the gaps of removed entries again each time; `popitem` discards them.
    start, _ = bucket.popitem()
    bucket[start] = None
    return start
