"""Tracks KV blocks: their owners, the prefix cache, the free ones as runs that are as long as possible."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.kv_cache.cache_events import KvEventLog, Place
from splitserve.errors import BrokenInvariantError

_FREE, _REFERENCED, _QUARANTINED, _RESERVED = range(4)


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Number of blocks by owner; the four kinds are disjoint and add up to `total`.

    `free` blocks have no owner (evictable cached blocks included), `referenced` ones are owned by requests, `reserved`
    ones by a request and a writer, `quarantined` ones by a writer only. `kept` of the free ones are left to preempted
    sequences that wait for a read.
    """

    total: int
    free: int
    reserved: int
    quarantined: int
    referenced: int
    kept: int = 0


def nowhere_below(_: bytes) -> Place | None:
    """There is nothing below the pool."""
    return None


class BlockPool:
    """Owners, prefix cache and free runs of `num_blocks` blocks.

    A block can be owned by requests (counted, because several may share a cached prefix) and by one writer (a peer that
    may be writing into it). It is free when it has neither. A free block with known content stays in the prefix cache
    until it is needed, least recently used first. Changes of the prefix cache are recorded in `log`. Misuse, such as a
    double free, raises BrokenInvariantError: it is a bug in the caller that must not go unnoticed.
    """

    def __init__(self, num_blocks: int, log: KvEventLog | None = None) -> None:
        self._total = num_blocks
        self._log = log or KvEventLog()
        self.place_below: Callable[[bytes], Place | None] = nowhere_below
        """Where below the pool a block with this hash is: to coordinators that counts as cached, too."""
        self._requests = array("i", bytes(4 * num_blocks))
        self._writer = bytearray(num_blocks)
        self._counts = [num_blocks, 0, 0, 0]
        self._unused = FreeBlocks(num_blocks)
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def total(self) -> int:
        """Blocks in the pool."""
        return self._total

    @property
    def free(self) -> int:
        """Number of blocks that `allocate` can return, evictable cached ones included."""
        return self._counts[_FREE]

    def counts(self) -> BlockCounts:
        """Blocks by owner."""
        free, referenced, quarantined, reserved = self._counts
        return BlockCounts(self._total, free, reserved, quarantined, referenced)

    def allocate(self, count: int, *, after: int | None = None, writer: bool = False) -> list[int]:
        """Returns `count` blocks in few ascending runs, owned by the caller's request.

        The first one follows the block `after` if that is free. With `writer`, a writer owns them too. Evicts cached
        blocks as needed. Costs O(count). Raises BrokenInvariantError if `count` > `free`: callers check first.
        """
        if count > self.free:
            raise BrokenInvariantError(f"{count} blocks asked for, {self.free} free")
        while len(self._unused) < count:
            block, _ = self._evictable.popitem(last=False)
            self._uncache(block)
            self._unused.add(block)
        blocks = self._unused.take(count, after)
        for block in blocks:
            self._requests[block] = 1
            self._writer[block] = writer
        self._counts[_FREE] -= count
        self._counts[_RESERVED if writer else _REFERENCED] += count
        return blocks

    def lookup(self, block_hash: bytes) -> int | None:
        """The cached block with this hash, or None. Takes no ownership; see `share`."""
        return self._block_of.get(block_hash)

    def unowned(self, blocks: Iterable[int]) -> int:
        """How many of these blocks have no owner, and so count as free."""
        requests, writer = self._requests, self._writer
        return sum([not (requests[block] or writer[block]) for block in blocks])

    def share(self, blocks: Iterable[int]) -> None:
        """Adds one more request as owner of cached blocks."""
        for block in blocks:
            if block not in self._hash_of:
                raise BrokenInvariantError(f"block {block} is shared but not cached")
            before = self._kind(block)
            if before == _FREE:
                del self._evictable[block]
            self._requests[block] += 1
            self._moved(block, before)

    def cache(self, block: int, block_hash: bytes) -> None:
        """Adds an owned block, which is full of the KV that this hash names, to the prefix cache.

        If another block has the same hash already, that one stays the cached one.
        """
        if self._requests[block] < 1:
            raise BrokenInvariantError(f"block {block} is cached without an owner")
        if block in self._hash_of:
            raise BrokenInvariantError(f"block {block} is cached twice")
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash
            self._log.stored(block_hash)

    def release(self, blocks: Sequence[int]) -> None:
        """Ends a request's ownership of its blocks, given in sequence order.

        Releases the last block first, so that eviction shortens a cached prefix from its end.
        """
        for block in reversed(blocks):
            if self._requests[block] < 1:
                raise BrokenInvariantError(f"block {block} is freed twice")
            before = self._kind(block)
            self._requests[block] -= 1
            self._moved(block, before)

    def release_writer(self, blocks: Sequence[int]) -> None:
        """Ends the writer's ownership of these blocks."""
        for block in reversed(blocks):
            if not self._writer[block]:
                raise BrokenInvariantError(f"block {block} has no writer")
            before = self._kind(block)
            self._writer[block] = 0
            self._moved(block, before)

    def forget(self) -> None:
        """Empties the prefix cache. Raises BrokenInvariantError while a block has an owner: its content is needed."""
        if self.free < self._total:
            raise BrokenInvariantError(f"{self._total - self.free} blocks have owners")
        for block in self._evictable:
            self._uncache(block)
            self._unused.add(block)
        self._evictable.clear()

    def _uncache(self, block: int) -> None:
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        place = self.place_below(block_hash)
        if place is None:
            self._log.removed(block_hash)
        else:
            self._log.stored(block_hash, place)

    def owners(self, block: int) -> tuple[int, bool]:
        """Number of owning requests, and whether a writer owns the block."""
        return self._requests[block], bool(self._writer[block])

    def _kind(self, block: int) -> int:
        if self._requests[block]:
            return _RESERVED if self._writer[block] else _REFERENCED
        return _QUARANTINED if self._writer[block] else _FREE

    def _moved(self, block: int, before: int) -> None:
        now = self._kind(block)
        self._counts[before] -= 1
        self._counts[now] += 1
        if now == _FREE:
            if block in self._hash_of:
                self._evictable[block] = None
            else:
                self._unused.add(block)


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
