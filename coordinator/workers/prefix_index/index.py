"""Which worker holds which KV blocks, from the workers' cache events. Bounded, and only a hint: blocks may be gone.

The index maps 60-bit block keys (`splitserve.generation.kv_blocks.keys_of`) to sets of slots; a slot is one bit, for
one boot of a worker. A key stands for the whole prompt up to its block, so the longest cached prefix is a walk along
the prompt's keys until no worker is left. A worker that leaves frees its slot at once; its entries are swept later, a
few shards at a time, before the slot is reused. No I/O, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from coordinator.workers.prefix_index.expected_blocks import ExpectedBlocks
from coordinator.workers.prefix_index.gaps import Gaps
from coordinator.workers.prefix_index.hits import (
    NO_HITS,
    PrefixHits,
    StoreSharing,
    deepest,
    joined,
    limited,
    with_shared,
)
from coordinator.workers.prefix_index.lost_blocks import MOST_LOST, LostBlocks
from coordinator.workers.snapshot import WorkerKey
from splitserve.errors import InvalidArgumentError
from splitserve.generation.kv_blocks import NAME_BYTES, NAMES_A_MESSAGE, BlockKeys, keys_of
from splitserve.v1 import registry_pb2

DEFAULT_MAX_BLOCKS = 10_000_000
MAX_NAMES_A_MESSAGE = 2**17
"""In each of the lists; in `lost` there are fewer."""
MAX_NAMES_OF_ALL = 2 * MAX_NAMES_A_MESSAGE
MAX_SHARDS = 4096
_BLOCKS_A_SHARD = 2048
"""Approximate; a dict of this size is resized, or swept, in well under a millisecond."""
_EVICTED_SHARE = 8
"""A full shard evicts one in this many of its keys."""
_MAX_SHARED_SETS = 2**14
_STRIDE = 4
"""Growth of the steps with which `hits` walks along a prompt."""
_MAX_FOUND = 64
_FOUND_A_MESSAGE = 4
"""Recently found prompts whose keys are refreshed per message of a worker."""


@dataclass(slots=True)
class _EventCursor:
    """Position in one boot's stream of cache events."""

    slots: tuple[int, ...]
    """The first has all blocks; with tiers the second has those in host memory or nearer, the third the pool's."""
    sequence: int = 0
    shared_id: int = 0
    """Of the store that it shares with others."""
    lost: bool = False
    """A message was missed: everything is ignored until the worker has resent its whole cache."""


class PrefixIndex:
    """Up to `max_blocks` keys. When a shard is full, the keys stored or found longest ago are evicted."""

    def __init__(self, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        wanted = max(1, min(MAX_SHARDS, max_blocks // _BLOCKS_A_SHARD))
        count = 1 << (wanted.bit_length() - 1)
        self._shards: list[dict[int, int]] = [{} for _ in range(count)]
        self._mask = count - 1
        self._shard_limit = max(1, max_blocks // count)
        self._cursors: dict[WorkerKey, _EventCursor] = {}
        self._resync: set[WorkerKey] = set()
        self.gaps = Gaps()
        self._bits: list[int] = []
        self._free_slots: list[int] = []
        self._live = 0
        self._dead: list[int] = []
        self._sweeping: list[int] = []
        self._next_shard = 0
        self._sets: dict[int, int] = {}
        self._expected = ExpectedBlocks()
        self._crowded = False
        self._groups: list[StoreSharing] | None = []
        """Whose slots hold what any of them does; None: to be made again. It stays empty until `share`."""
        self._lost = LostBlocks()
        self._found: deque[tuple[Sequence[int], int]] = deque(maxlen=_MAX_FOUND)
        """Prompts found since the last message, with the depth: in use, so their keys should not be evicted."""

    def __len__(self) -> int:
        """Keys held now; those of removed workers count until they are swept. O(shards)."""
        return sum(map(len, self._shards))

    def slot_of(self, worker: WorkerKey) -> int:
        """The worker's slot in the results of `hits`; -1 before its first message."""
        return self.slots_of(worker)[0]

    def slots_of(self, worker: WorkerKey) -> tuple[int, int, int]:
        """That slot, the one of what it has in host memory or nearer, and the one of its pool: all the same without
        tiers."""
        cursor = self._cursors.get(worker)
        slots = (-1,) if cursor is None else cursor.slots
        return slots[0], slots[len(slots) // 2], slots[-1]

    def apply(self, worker: WorkerKey, events: registry_pb2.CacheEvents) -> None:
        """Applies a worker's next message. After a gap its blocks are forgotten until it has resent its whole cache.

        Raises InvalidArgumentError for names that are not a multiple of 8 bytes long, too many, or of tiers that the
        worker does not have.
        """
        _check(events)
        removed, stored = _checked("removed", events.removed), _checked("stored", events.stored)
        in_host, on_disk = _checked("in_host", events.in_host), _checked("on_disk", events.on_disk)
        lost = _checked("lost", events.lost, MOST_LOST)
        width = 3 if events.tiered else 1
        cursor = self._cursors.get(worker)
        follows = events.sequence == (cursor.sequence + 1 if cursor is not None else 1)
        if cursor is None:
            cursor = self._cursors[worker] = _EventCursor(self._take_slots(width))
        elif events.cleared or (not follows and not cursor.lost):
            self._release_slots(cursor.slots)
            cursor.slots = self._take_slots(width)
        cursor.sequence = events.sequence
        if events.cleared:
            cursor.lost = False
        elif not cursor.lost and (not follows or events.sequence == 1):
            cursor.lost = True
            self._resync.add(worker)
        full = sum(map(len, (removed, on_disk, in_host, stored))) >= NAMES_A_MESSAGE
        self.gaps.told(worker, lost=cursor.lost, cleared=events.cleared, full=full)
        for _ in range(min(len(self._found), _FOUND_A_MESSAGE)):
            keys, depth = self._found.popleft()
            self._touch(keys[:depth])
        if not cursor.lost:
            self._found_again(cursor, (on_disk, in_host, stored))
            for count, names in enumerate((removed, on_disk, in_host, stored)):
                self._place(cursor.slots, names, count)
            if lost and cursor.shared_id and self._sharing():
                self._lost.add(cursor.shared_id, (key for key in lost if self._holders(key)))
            # Keys spread evenly: one shard speaks for all.
            self._crowded = 4 * len(self._shards[0]) > 3 * self._shard_limit
        self.sweep(1)

    def take_resync(self, worker: WorkerKey) -> bool:
        """Whether to ask the worker for its whole cache. True once per gap."""
        asks = worker in self._resync
        self._resync.discard(worker)
        return asks

    def forget(self, worker: WorkerKey) -> None:
        """Removes a worker. O(1); its blocks are swept later."""
        cursor = self._cursors.pop(worker, None)
        self._resync.discard(worker)
        self.gaps.forget(worker)
        if cursor is not None:
            self._release_slots(cursor.slots)

    def share(self, worker: WorkerKey, shared_id: int) -> None:
        """The worker reads what any worker of the same `shared_id` holds, as from its own disk. 0: none."""
        cursor = self._cursors.get(worker)
        if cursor is not None and cursor.shared_id != shared_id:
            cursor.shared_id, self._groups = shared_id, None

    def expect(self, workers: Iterable[WorkerKey], keys: Sequence[int], now: float) -> None:
        """Counts a prompt sent to these workers as held by them, until they report its blocks or a lifetime is over."""
        bits = 0
        for worker in workers:
            if (cursor := self._cursors.get(worker)) is not None:
                bits |= self._bits_of(cursor.slots)
        if bits:
            self._expected.add(keys, bits, now)

    def hits(self, keys: Sequence[int], now: float, *, confirmed_only: bool = False) -> PrefixHits:
        """How many of a prompt's leading blocks each worker holds; `confirmed_only`: without those that are expected.

        A worker that holds a block holds all blocks before it, because caches evict a prefix from its end. So the walk
        takes growing strides until no worker is left, then bisects each stride in which some worker drops out:
        O(log blocks) look-ups per distinct depth.
        """
        self._expected.expire(now)
        shards, mask, count = self._shards, self._mask, len(keys)
        # First pass: (depth, slots that hold the block there), in growing strides.
        ahead: list[tuple[int, int]] = []
        holding, end = self._live, 1
        while holding and count:
            holding &= shards[(key := keys[end - 1]) & mask].get(key, 0)
            ahead.append((end, holding))
            if end == count:
                break
            end = min(_STRIDE * end, count)
        # Second pass: `holding` is known at `depth`. Where slots drop out before `end`, bisect until the strides are 1.
        ahead.reverse()
        levels: list[tuple[int, int]] = []
        depth, holding = 0, self._live
        while ahead:
            end, still = ahead[-1]
            if still != holding and end - depth > 1:
                middle = (depth + end) // 2
                key = keys[middle - 1]
                ahead.append((middle, holding & shards[key & mask].get(key, 0) | still))
                continue
            if still != holding and depth:
                levels.append((depth, holding ^ still))
            depth, holding = end, still
            ahead.pop()
        if holding and depth:
            levels.append((depth, holding))
        if self._crowded and levels:
            self._found.append((keys, levels[-1][0]))
        if levels and (groups := self._sharing()):
            lost = self._lost
            levels = with_shared(
                levels, groups, self._live, lambda store, most: lost.before(store, keys, most)
            )
        if not confirmed_only and (expected := self._expected.levels(keys)):
            levels = deepest(levels + expected, self._live)
        return limited(levels) if levels else NO_HITS

    def hits_of(self, keys: BlockKeys, now: float, *, confirmed_only: bool = False) -> PrefixHits:
        """As `hits`, by a prompt's keys for each block size; each worker's in blocks of its own size."""
        found = [self.hits(of_size, now, confirmed_only=confirmed_only) for of_size in keys.values()]
        return joined(found) if found else NO_HITS

    def sweep(self, shards: int) -> None:
        """Clears the entries of removed workers from the next shards; cheap when there is nothing to clear."""
        if not self._sweeping:
            if not self._dead:
                return
            self._sweeping, self._dead, self._next_shard = self._dead, [], 0
        for shard in self._shards[self._next_shard : self._next_shard + shards]:
            self._clear(shard)
        self._next_shard += shards
        if self._next_shard >= len(self._shards):
            self._expected.clear()
            self._free_slots += self._sweeping
            self._sweeping = []

    def _clear(self, shard: dict[int, int]) -> None:
        live = self._live
        for key, holders in list(shard.items()):
            if not (left := holders & live):
                del shard[key]
            elif left != holders:
                shard[key] = self._shared(left)

    def _sharing(self) -> list[StoreSharing]:
        if self._groups is None:
            stores: dict[int, list[tuple[int, int]]] = {}
            for cursor in self._cursors.values():
                if cursor.shared_id:
                    held, in_memory = cursor.slots[0], cursor.slots[len(cursor.slots) // 2]
                    stores.setdefault(cursor.shared_id, []).append((self._bits[held], self._bits[in_memory]))
            self._lost.keep(stores)
            self._groups = [
                StoreSharing(store, sum(held for held, _ in members), tuple(members))
                for store, members in stores.items()
            ]
        return self._groups

    def _holders(self, key: int) -> int:
        """The slots of live workers that hold a block."""
        return self._shards[key & self._mask].get(key, 0) & self._live

    def _found_again(self, cursor: _EventCursor, stored: Iterable[Sequence[int]]) -> None:
        """Blocks that a worker did not have before it has written, or is about to, or has found in its store."""
        own = self._bits_of(cursor.slots)
        for names in stored:
            for key in self._lost.among(cursor.shared_id, names):
                if not self._holders(key) & own:
                    self._lost.discard(cursor.shared_id, key)

    def _take_slots(self, count: int) -> tuple[int, ...]:
        taken = []
        for _ in range(count):
            if not self._free_slots:
                self._free_slots.append(len(self._bits))
                self._bits.append(1 << len(self._bits))
            taken.append(self._free_slots.pop())
        self._live |= self._bits_of(taken)
        self._groups = self._groups and None
        return tuple(taken)

    def _release_slots(self, slots: tuple[int, ...]) -> None:
        self._live &= ~self._bits_of(slots)
        self._groups = self._groups and None
        self._dead += slots

    def _bits_of(self, slots: Sequence[int]) -> int:
        return sum(self._bits[slot] for slot in slots)

    def _place(self, slots: tuple[int, ...], keys: Sequence[int], count: int) -> None:
        """The first `count` of a worker's slots hold these blocks from now on, the others do not."""
        if not keys:
            return
        shards, mask, limit = self._shards, self._mask, self._shard_limit
        own, now = self._bits_of(slots), self._bits_of(slots[:count])
        others = self._live & ~own
        for key in keys:
            shard = shards[key & mask]
            holders = shard.get(key)
            if holders is None:
                if now:
                    if len(shard) >= limit:
                        shard = self._evicted(key & mask)
                    shard[key] = now
            elif holders & own != now:
                if left := holders & others | now:
                    shard[key] = self._shared(left)
                else:
                    del shard[key]

    def _evicted(self, number: int) -> dict[int, int]:
        self.gaps.evicted(self._cursors)
        # A new dict: after many deletions the old one would keep half as much memory again.
        shard = self._shards[number]
        self._shards[number] = left = dict(islice(shard.items(), len(shard) // _EVICTED_SHARE + 1, None))
        return left

    def _touch(self, keys: Sequence[int]) -> None:
        # A dict keeps insertion order: a key that is inserted again is evicted last.
        shards, mask = self._shards, self._mask
        for key in keys:
            shard = shards[key & mask]
            if (holders := shard.pop(key, None)) is not None:
                shard[key] = holders

    def _shared(self, holders: int) -> int:
        # Blocks of a prompt mostly have the same holders: share one int object between them.
        if len(self._sets) > _MAX_SHARED_SETS:
            self._sets.clear()
        return self._sets.setdefault(holders, holders)


def _check(events: registry_pb2.CacheEvents) -> None:
    if not events.tiered and (events.in_host or events.on_disk or events.lost):
        message = "cache_events.tiered: must be set with names in in_host, on_disk or lost"
        raise InvalidArgumentError(message, field="cache_events.tiered")
    lists = events.removed, events.stored, events.in_host, events.on_disk, events.lost
    if sum(map(len, lists)) > MAX_NAMES_OF_ALL * NAME_BYTES:
        message = f"cache_events must hold at most {MAX_NAMES_OF_ALL} names in its five lists together"
        raise InvalidArgumentError(message, field="cache_events")


def _checked(field: str, names: bytes, most: int = MAX_NAMES_A_MESSAGE) -> list[int]:
    if len(names) % NAME_BYTES or len(names) > most * NAME_BYTES:
        message = f"cache_events.{field} must hold names of {NAME_BYTES} bytes, at most {most}"
        raise InvalidArgumentError(message, field=f"cache_events.{field}")
    return keys_of(names) if names else []
