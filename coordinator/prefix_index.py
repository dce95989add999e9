"""Which worker holds which KV blocks, as the workers told it. Bounded; a hint, never a promise.

A block is a 60-bit key (`splitserve.block_hashes.keys_of` its name), a worker's boot a slot, that is one bit; the
index maps keys to sets of slots. A key stands for all of a prompt up to its block, so that the longest cached prefix
is a walk along the prompt's keys until no worker is left. A worker that goes gives up its slot at once; what it held
is swept away later, a little at a time, before the slot is given to another. No I/O, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from coordinator.expected_blocks import ExpectedBlocks
from coordinator.pools import WorkerKey
from coordinator.prefix_hits import NO_HITS, PrefixHits, deepest, limited
from splitserve.block_hashes import NAME_BYTES, keys_of
from splitserve.errors import InvalidArgumentError
from splitserve.v1 import registry_pb2

DEFAULT_MAX_BLOCKS = 10_000_000
MAX_NAMES_A_MESSAGE = 2**17
MAX_SHARDS = 4096
_BLOCKS_A_SHARD = 2048
"""About; a dict of this size grows, and is swept, in well under a millisecond."""
_EVICTED_SHARE = 8
_MAX_SHARED_SETS = 2**14
_STRIDE = 4
_MAX_FOUND = 64
_FOUND_A_MESSAGE = 4


@dataclass(slots=True)
class _Told:
    """What is known of one boot's messages."""

    slot: int
    sequence: int = 0
    lost: bool = False
    """Something was missed: nothing counts until the worker has begun anew."""


class PrefixIndex:
    """Up to `max_blocks` keys. When it is full, the keys that were stored or found longest ago make room."""

    def __init__(self, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        wanted = max(1, min(MAX_SHARDS, max_blocks // _BLOCKS_A_SHARD))
        count = 1 << (wanted.bit_length() - 1)
        self._shards: list[dict[int, int]] = [{} for _ in range(count)]
        self._mask = count - 1
        self._shard_limit = max(1, max_blocks // count)
        self._told: dict[WorkerKey, _Told] = {}
        self._resync: set[WorkerKey] = set()
        self._bits: list[int] = []
        self._free_slots: list[int] = []
        self._live = 0
        self._dead: list[int] = []
        self._sweeping: list[int] = []
        self._next_shard = 0
        self._sets: dict[int, int] = {}
        self._expected = ExpectedBlocks()
        self._crowded = False
        self._found: deque[tuple[Sequence[int], int]] = deque(maxlen=_MAX_FOUND)
        """Prompts that were found since the last message, and to which depth: in use, so not to be evicted."""

    def __len__(self) -> int:
        """Keys held now, those of workers that have gone included until they are swept. O(shards)."""
        return sum(map(len, self._shards))

    def slot_of(self, worker: WorkerKey) -> int:
        """The slot under which `hits` speaks of a worker; -1 while it has told nothing."""
        told = self._told.get(worker)
        return -1 if told is None else told.slot

    def apply(self, worker: WorkerKey, events: registry_pb2.CacheEvents) -> None:
        """Takes a worker's next message. After a gap its blocks are forgotten until it has begun anew.

        Raises InvalidArgumentError for names that are no whole number of 8 bytes, or too many.
        """
        removed, stored = _checked("removed", events.removed), _checked("stored", events.stored)
        told = self._told.get(worker)
        follows = events.sequence == (told.sequence + 1 if told is not None else 1)
        if told is None:
            told = self._told[worker] = _Told(self._take_slot())
        elif events.cleared or (not follows and not told.lost):
            self._give_up(told.slot)
            told.slot = self._take_slot()
        told.sequence = events.sequence
        if events.cleared:
            told.lost = False
        elif not told.lost and (not follows or events.sequence == 1):
            told.lost = True
            self._resync.add(worker)
        for _ in range(min(len(self._found), _FOUND_A_MESSAGE)):
            keys, depth = self._found.popleft()
            self._touch(keys[:depth])
        if not told.lost:
            self._remove(told.slot, removed)
            self._store(told.slot, stored)
            # Keys spread evenly: one shard speaks for all.
            self._crowded = 4 * len(self._shards[0]) > 3 * self._shard_limit
        self.sweep(1)

    def take_resync(self, worker: WorkerKey) -> bool:
        """Whether the worker is to be asked for its whole cache; asked once."""
        if worker not in self._resync:
            return False
        self._resync.discard(worker)
        return True

    def forget(self, worker: WorkerKey) -> None:
        """The worker is gone. O(1); its blocks are swept away later."""
        told = self._told.pop(worker, None)
        self._resync.discard(worker)
        if told is not None:
            self._give_up(told.slot)

    def expect(self, workers: Iterable[WorkerKey], keys: Sequence[int], now: float) -> None:
        """A prompt was sent to these workers, which will hold its blocks soon; counts until they tell, or a while."""
        bits = 0
        for worker in workers:
            if (told := self._told.get(worker)) is not None:
                bits |= self._bits[told.slot]
        if bits:
            self._expected.add(keys, bits, now)

    def hits(self, keys: Sequence[int], now: float) -> PrefixHits:
        """How many of a prompt's leading blocks each worker holds.

        Who holds a block holds those before it, as caches lose a prefix from its end. So the walk goes in growing
        strides until nobody is left, and halves each stride in which somebody falls back: O(log) looks for each depth.
        """
        self._expected.expire(now)
        shards, mask, count = self._shards, self._mask, len(keys)
        ahead: list[tuple[int, int]] = []
        holding, end = self._live, 1
        while holding and count:
            holding &= shards[(key := keys[end - 1]) & mask].get(key, 0)
            ahead.append((end, holding))
            if end == count:
                break
            end = min(_STRIDE * end, count)
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
        if expected := self._expected.levels(keys):
            levels = deepest(levels + expected, self._live)
        return limited(levels) if levels else NO_HITS

    def sweep(self, shards: int) -> None:
        """Clears what workers that have gone left behind in the next shards; cheap when there is nothing to clear."""
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
            left = holders & live
            if not left:
                del shard[key]
            elif left != holders:
                shard[key] = self._shared(left)

    def _take_slot(self) -> int:
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = len(self._bits)
            self._bits.append(1 << slot)
        self._live |= self._bits[slot]
        return slot

    def _give_up(self, slot: int) -> None:
        self._live &= ~self._bits[slot]
        self._dead.append(slot)

    def _store(self, slot: int, keys: Sequence[int]) -> None:
        shards, mask, limit, bit = self._shards, self._mask, self._shard_limit, self._bits[slot]
        for key in keys:
            shard = shards[key & mask]
            holders = shard.get(key)
            if holders is None:
                if len(shard) >= limit:
                    shard = self._evicted(key & mask)
                shard[key] = bit
            elif not holders & bit:
                shard[key] = self._shared(holders & self._live | bit)

    def _remove(self, slot: int, keys: Sequence[int]) -> None:
        shards, mask, bit = self._shards, self._mask, self._bits[slot]
        for key in keys:
            shard = shards[key & mask]
            holders = shard.get(key)
            if holders is None or not holders & bit:
                continue
            if left := holders ^ bit:
                shard[key] = self._shared(left)
            else:
                del shard[key]

    def _evicted(self, number: int) -> dict[int, int]:
        # A new dict: one from which much was deleted takes half as much memory again.
        shard = self._shards[number]
        self._shards[number] = left = dict(islice(shard.items(), len(shard) // _EVICTED_SHARE + 1, None))
        return left

    def _touch(self, keys: Sequence[int]) -> None:
        # A dict keeps the order of insertion: what is put in again is evicted last.
        shards, mask = self._shards, self._mask
        for key in keys:
            shard = shards[key & mask]
            if (holders := shard.pop(key, None)) is not None:
                shard[key] = holders

    def _shared(self, holders: int) -> int:
        # The blocks of a prompt have the same holders mostly: one int object for all of them.
        if len(self._sets) > _MAX_SHARED_SETS:
            self._sets.clear()
        return self._sets.setdefault(holders, holders)


def _checked(field: str, names: bytes) -> list[int]:
    if len(names) % NAME_BYTES or len(names) > MAX_NAMES_A_MESSAGE * NAME_BYTES:
        message = f"cache_events.{field} must hold names of {NAME_BYTES} bytes, at most {MAX_NAMES_A_MESSAGE}"
        raise InvalidArgumentError(message, field=f"cache_events.{field}")
    return keys_of(names) if names else []
