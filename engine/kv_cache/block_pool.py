"""Tracks KV blocks: their owners, the prefix cache, and the free blocks, in runs that are as long as possible."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from splitserve.errors import BrokenInvariantError
from splitserve.generation.kv_blocks import NAMES_A_MESSAGE, name_of
from splitserve.v1 import registry_pb2

_FREE, _REFERENCED, _QUARANTINED, _RESERVED = range(4)


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Number of blocks by owner; the four kinds are disjoint and add up to `total`.

    `free` blocks have no owner (evictable cached blocks included), `referenced` ones are owned by requests, `reserved`
    ones by a request and a writer, `quarantined` ones by a writer only.
    """

    total: int
    free: int
    reserved: int
    quarantined: int
    referenced: int


class BlockPool:
    """Owners, prefix cache and free runs of `num_blocks` blocks.

    A block can be owned by requests (counted, because several may share a cached prefix) and by one writer (a peer that
    may be writing into it). It is free when it has neither. A free block with known content stays in the prefix cache
    until it is needed, least recently used first. Changes of the prefix cache are recorded in `log`. Misuse, such as a
    double free, raises BrokenInvariantError: it is a bug in the caller that must not go unnoticed.
    """

    def __init__(self, num_blocks: int, log: KvEventLog | None = None) -> None:
        self.total = num_blocks
        """Blocks in the pool."""
        self._log = log or KvEventLog()
        self._requests = array("i", bytes(4 * num_blocks))
        self._writer = bytearray(num_blocks)
        self._counts = [num_blocks, 0, 0, 0]
        self._unused = FreeBlocks(num_blocks)
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """Number of blocks that `allocate` can return, evictable cached ones included."""
        return self._counts[_FREE]

    def counts(self) -> BlockCounts:
        """Blocks by owner."""
        free, referenced, quarantined, reserved = self._counts
        return BlockCounts(self.total, free, reserved, quarantined, referenced)

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
        """Adds an owned block to the prefix cache; it is full, and its content has this hash.

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

    def _uncache(self, block: int) -> None:
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        self._log.removed(block_hash)

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
        for bucket in (*self._buckets[fitting:], *reversed(self._buckets[:fitting])):
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


Change = tuple[bytes, bool]
"""A block's name, and whether the block is cached now."""
MAX_LOGGED = 2**15
"""Maximum number of changes kept for readers that have not read them yet."""


class KvEventLog:
    """The names of the blocks that are cached now, and the latest changes. A change costs O(1)."""

    def __init__(self, max_logged: int = MAX_LOGGED) -> None:
        self._lock = threading.Lock()
        self._names: dict[bytes, None] = {}
        self._changes: deque[Change] = deque(maxlen=max_logged)
        self._end = 0
        self._unread = False
        self._on_change: Callable[[], object] | None = None

    def subscribe(self, on_change: Callable[[], object]) -> None:
        """Calls `on_change` on the engine thread, at the first change after each read."""
        self._on_change = on_change

    def stored(self, block_hash: bytes) -> None:
        """Records that a block with this hash is cached now."""
        self._changed(name_of(block_hash), True)

    def removed(self, block_hash: bytes) -> None:
        """Records that no block with this hash is cached any more."""
        self._changed(name_of(block_hash), False)

    def _changed(self, name: bytes, cached: bool) -> None:
        with self._lock:
            if cached:
                self._names[name] = None
            else:
                self._names.pop(name, None)
            self._changes.append((name, cached))
            self._end += 1
            first, self._unread = not self._unread, True
        if first and self._on_change is not None:
            self._on_change()

    def snapshot(self) -> tuple[dict[bytes, bool], int]:
        """All names that are cached now, parents before children, each with True; and the position in the log."""
        with self._lock:
            self._unread = False
            return dict.fromkeys(self._names, True), self._end

    def since(self, position: int) -> tuple[dict[bytes, bool], int] | None:
        """The names that changed since a position, each with whether it is cached now; and the new position.

        None if the log does not reach back that far.
        """
        with self._lock:
            missed = self._end - position
            if missed > len(self._changes):
                return None
            self._unread = False
            latest = list(islice(reversed(self._changes), missed))  # from the end: costs O(missed)
            return dict(reversed(latest)), self._end


class KvEventReader:
    """Reads the log for one Report stream. The first events, and those after `resync`, list the whole cache."""

    def __init__(self, log: KvEventLog) -> None:
        self._log = log
        self._sequence = 0
        self._position = -1
        self._unsent: deque[Change] = deque()
        self._resync = True

    @property
    def has_more(self) -> bool:
        """Whether events are left that did not fit into the last message."""
        return bool(self._unsent) or self._resync

    def resync(self) -> None:
        """Starts again with a snapshot: the coordinator has lost its copy."""
        self._resync = True

    def next_events(self) -> registry_pb2.CacheEvents | None:
        """The next message, None if nothing has changed. The message counts as sent."""
        cleared = self._resync
        if not self._resync and not self._unsent:
            changes = self._log.since(self._position)
            if changes is None:
                cleared = True
            else:
                self._unsent, self._position = deque(changes[0].items()), changes[1]
        if cleared:
            names, self._position = self._log.snapshot()
            self._unsent, self._resync = deque(names.items()), False
        elif not self._unsent:
            return None
        sent = [self._unsent.popleft() for _ in range(min(len(self._unsent), NAMES_A_MESSAGE))]
        self._sequence += 1
        return registry_pb2.CacheEvents(
            sequence=self._sequence,
            cleared=cleared,
            removed=b"".join(name for name, cached in sent if not cached),
            stored=b"".join(name for name, cached in sent if cached),
        )
