"""The KV blocks that each worker holds, from the workers' cache events. Bounded, and only a hint: blocks may be gone.

The index maps 60-bit block keys (`splitserve.generation.kv_blocks.keys_of`) to sets of slots; a slot is one bit, for
one boot of a worker. A key stands for the whole prompt up to its block, so the longest cached prefix is a walk along
the prompt's keys until no worker is left. A worker that leaves frees its slot at once; its entries are swept later, a
few shards at a time, before the slot is reused. No I/O, no clock.

`ExpectedBlocks` has the blocks that prompts in flight will fill, so that equal prompts that arrive together go to the
same worker. `RecentPrompts` has the tokens of the latest prompts, for `coordinator.routing.warming`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coordinator.workers.snapshot import Model, WorkerKey
from splitserve.errors import InvalidArgumentError
from splitserve.generation.kv_blocks import NAME_BYTES, Adapter, keys_of
from splitserve.v1 import registry_pb2

MAX_LEVELS = 48
"""Most distinct depths kept per query."""

Depths = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """Levels of (leading blocks held, slots as a bit set), the shallowest first. A slot is in at most one level.

    A slot is the index's number for a worker (`Worker.prefix_slot`). Slots in no level hold nothing.
    """

    levels: tuple[tuple[int, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.levels)

    def blocks(self, slot: int) -> int:
        """Leading blocks that a slot holds; 0 for slot -1."""
        if slot < 0:
            return 0
        return next((depth for depth, slots in self.levels if slots >> slot & 1), 0)

    def by_slot(self, count: int) -> Depths:
        """Leading blocks of the slots 0..count-1 as float64 [count + 1]; the last element is 0, so slot -1 reads 0."""
        depths = np.zeros(count + 1)
        for depth, slots in self.levels:
            width = min(slots.bit_length(), count)
            raw = np.frombuffer(slots.to_bytes(slots.bit_length() // 8 + 1, "little"), np.uint8)
            held = np.unpackbits(raw, count=width, bitorder="little").view(np.bool_)
            np.copyto(depths[:width], depth, where=held)
        return depths


NO_HITS = PrefixHits()


def limited(levels: list[tuple[int, int]]) -> PrefixHits:
    """Hits of at most `MAX_LEVELS` levels: surplus shallow levels are merged into the shallowest."""
    spare = len(levels) - MAX_LEVELS
    if spare > 0:
        slots = 0
        for _, more in levels[: spare + 1]:
            slots |= more
        levels = [(levels[0][0], slots), *levels[spare + 1 :]]
    return PrefixHits(tuple(levels))


LIFETIME_S = 10.0
"""An expectation lives for one to two lifetimes; by then the worker has reported the block, or never will."""
MAX_KEYS = 2**17
"""Keys per generation; beyond that the older generation is dropped early."""


class ExpectedBlocks:
    """Blocks with sets of slots, in two generations: dropping the older one forgets unconfirmed blocks."""

    def __init__(self) -> None:
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._since_s = 0.0

    def __bool__(self) -> bool:
        return bool(self._young or self._old)

    def add(self, keys: Sequence[int], slots: int, now: float) -> None:
        """Notes that the slots in the bit set `slots` will hold the blocks `keys` of one prompt."""
        self.expire(now)
        if len(self._young) > MAX_KEYS:
            self._begin(self._young, now)
        young = self._young
        for key in keys:
            before = young.get(key)
            young[key] = slots if before is None else before | slots

    def expire(self, now: float) -> None:
        """Drops a generation that has expired."""
        age_s = now - self._since_s
        if age_s >= LIFETIME_S:
            self._begin(self._young if age_s < 2 * LIFETIME_S else {}, now)

    def slots(self, key: int) -> int:
        """The slots that are expected to hold a block, as a bit set."""
        return self._young.get(key, 0) | self._old.get(key, 0)

    def clear(self) -> None:
        """Forgets everything."""
        self._begin({}, self._since_s)

    def _begin(self, old: dict[int, int], now: float) -> None:
        self._old, self._young, self._since_s = old, {}, now


class RecentPrompt(NamedTuple):
    """The leading full blocks of a prompt, with all that a worker needs to compute them again."""

    token_ids: tuple[int, ...]
    keys: tuple[int, ...]
    """Index keys of the blocks. They differ between tenants' salts and between adapters."""
    cache_salt: bytes
    adapter: Adapter | None


MAX_RECENT_TOKENS = 2**18
"""Tokens kept of all prompts of a model; each takes up to 40 bytes."""
MAX_PROMPT_TOKENS = 2**13
"""Tokens kept of one prompt, from its beginning."""


class RecentPrompts:
    """The latest prompts of each base model: at most `most`, and `MAX_RECENT_TOKENS` tokens. None if `most` is 0."""

    def __init__(self, most: int = 0) -> None:
        self._most = most
        self._prompts: dict[str, deque[RecentPrompt]] = {}
        self._tokens: dict[str, int] = {}

    def of(self, model: str) -> Sequence[RecentPrompt]:
        """The prompts of a base model, the latest last."""
        return self._prompts.get(model, ())

    def add(self, model: Model, token_ids: tuple[int, ...], keys: tuple[int, ...], cache_salt: bytes) -> None:
        """Keeps a prompt, with its index keys `keys`, that was sent to workers of the model."""
        if not self._most:
            return
        blocks = min(len(keys), MAX_PROMPT_TOKENS // model.block_size_tokens)
        prompt = token_ids[: blocks * model.block_size_tokens]
        kept = self._prompts.setdefault(model.base_name, deque())
        kept.append(RecentPrompt(prompt, keys[:blocks], cache_salt, model.adapter))
        tokens = self._tokens.get(model.base_name, 0) + len(prompt)
        while len(kept) > self._most or tokens > MAX_RECENT_TOKENS:
            tokens -= len(kept.popleft().token_ids)
        self._tokens[model.base_name] = tokens


DEFAULT_MAX_BLOCKS = 10_000_000
MAX_NAMES_A_MESSAGE = 2**17
"""Most names in each list of a message."""
MAX_SHARDS = 4096
_BLOCKS_A_SHARD = 2048
"""Approximate size of a shard: a dict of this size is resized or swept in well under a millisecond."""
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

    slot: int
    sequence: int = 0
    lost: bool = False
    """A message was missed: all messages are ignored until the worker has resent its whole cache."""


class PrefixIndex:
    """Up to `max_blocks` keys. When a shard is full, the keys stored or found longest ago are evicted."""

    def __init__(self, max_blocks: int = DEFAULT_MAX_BLOCKS, recent: RecentPrompts | None = None) -> None:
        self.recent = recent or RecentPrompts()
        wanted = max(1, min(MAX_SHARDS, max_blocks // _BLOCKS_A_SHARD))
        count = 1 << (wanted.bit_length() - 1)
        self._shards: list[dict[int, int]] = [{} for _ in range(count)]
        self._mask = count - 1
        self._shard_limit = max(1, max_blocks // count)
        self._cursors: dict[WorkerKey, _EventCursor] = {}
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
        """Prompts found since the last message, with their depth. They are in use, so their keys stay longest."""

    def __len__(self) -> int:
        """Keys held now; those of removed workers count until they are swept. O(shards)."""
        return sum(map(len, self._shards))

    def slot_of(self, worker: WorkerKey) -> int:
        """The worker's slot in the results of `hits`; -1 before its first message."""
        cursor = self._cursors.get(worker)
        return -1 if cursor is None else cursor.slot

    def apply(self, worker: WorkerKey, events: registry_pb2.CacheEvents) -> None:
        """Applies a worker's next message. After a gap its blocks are forgotten until it has resent its whole cache.

        Raises InvalidArgumentError for names that are not a multiple of 8 bytes long, or too many.
        """
        removed, stored = _checked("removed", events.removed), _checked("stored", events.stored)
        cursor = self._cursors.get(worker)
        follows = events.sequence == (cursor.sequence + 1 if cursor is not None else 1)
        if cursor is None:
            cursor = self._cursors[worker] = _EventCursor(self._take_slot())
        elif events.cleared or (not follows and not cursor.lost):
            self._release_slot(cursor.slot)
            cursor.slot = self._take_slot()
        cursor.sequence = events.sequence
        if events.cleared:
            cursor.lost = False
        elif not cursor.lost and (not follows or events.sequence == 1):
            cursor.lost = True
            self._resync.add(worker)
        for _ in range(min(len(self._found), _FOUND_A_MESSAGE)):
            keys, depth = self._found.popleft()
            self._touch(keys[:depth])
        if not cursor.lost:
            self._remove(cursor.slot, removed)
            self._store(cursor.slot, stored)
            # Keys spread evenly, so one shard represents all.
            self._crowded = 4 * len(self._shards[0]) > 3 * self._shard_limit
        self.sweep(1)

    def take_resync(self, worker: WorkerKey) -> bool:
        """Whether to ask the worker for its whole cache; True once per gap."""
        asks = worker in self._resync
        self._resync.discard(worker)
        return asks

    def forget(self, worker: WorkerKey) -> None:
        """Removes a worker. O(1); its blocks are swept later."""
        cursor = self._cursors.pop(worker, None)
        self._resync.discard(worker)
        if cursor is not None:
            self._release_slot(cursor.slot)

    def expect(self, workers: Iterable[WorkerKey], keys: Sequence[int], now: float) -> None:
        """Counts a prompt as cached on these workers until they report its blocks or a lifetime is over."""
        slots = 0
        for worker in workers:
            if (cursor := self._cursors.get(worker)) is not None:
                slots |= self._bits[cursor.slot]
        if slots:
            self._expected.add(keys, slots, now)

    def hits(self, keys: Sequence[int], now: float) -> PrefixHits:
        """The number of a prompt's leading blocks that each worker holds or is expected to hold soon.

        A worker that holds a block holds all blocks before it, because caches evict a prefix from its end. So the walk
        takes growing strides until no worker is left, then bisects each stride in which some worker drops out:
        O(log blocks) look-ups per distinct depth.
        """
        self._expected.expire(now)
        holders, count = self._holders(), len(keys)
        # First pass: (depth, slots that hold the block there), in growing strides.
        ahead: list[tuple[int, int]] = []
        holding, end = self._live, 1
        while holding and count:
            holding &= holders(keys[end - 1])
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
                ahead.append((middle, holding & holders(keys[middle - 1]) | still))
                continue
            if still != holding and depth:
                levels.append((depth, holding ^ still))
            depth, holding = end, still
            ahead.pop()
        if holding and depth:
            levels.append((depth, holding))
        if self._crowded and levels:
            self._found.append((keys, levels[-1][0]))
        return limited(levels) if levels else NO_HITS

    def _holders(self) -> Callable[[int], int]:
        """A function from a key to the slots that hold its block or are expected to, as a bit set."""
        shards, mask, expected = self._shards, self._mask, self._expected
        if not expected:
            return lambda key: shards[key & mask].get(key, 0)
        return lambda key: shards[key & mask].get(key, 0) | expected.slots(key)

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

    def _take_slot(self) -> int:
        if not self._free_slots:
            self._free_slots.append(len(self._bits))
            self._bits.append(1 << len(self._bits))
        slot = self._free_slots.pop()
        self._live |= self._bits[slot]
        return slot

    def _release_slot(self, slot: int) -> None:
        self._live &= ~self._bits[slot]
        self._dead.append(slot)

    def _remove(self, slot: int, keys: Sequence[int]) -> None:
        shards, mask, own = self._shards, self._mask, self._bits[slot]
        others = self._live & ~own
        for key in keys:
            shard = shards[key & mask]
            holders = shard.get(key, 0)
            if holders & own:
                if left := holders & others:
                    shard[key] = self._shared(left)
                else:
                    del shard[key]

    def _store(self, slot: int, keys: Sequence[int]) -> None:
        shards, mask, limit, own = self._shards, self._mask, self._shard_limit, self._bits[slot]
        live = self._live
        for key in keys:
            shard = shards[key & mask]
            holders = shard.get(key)
            if holders is None:
                if len(shard) >= limit:
                    shard = self._evicted(key & mask)
                shard[key] = own
            elif not holders & own:
                shard[key] = self._shared(holders & live | own)

    def _evicted(self, number: int) -> dict[int, int]:
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


def _checked(field: str, names: bytes) -> list[int]:
    if len(names) % NAME_BYTES or len(names) > MAX_NAMES_A_MESSAGE * NAME_BYTES:
        message = f"cache_events.{field} must hold names of {NAME_BYTES} bytes, at most {MAX_NAMES_A_MESSAGE}"
        raise InvalidArgumentError(message, field=f"cache_events.{field}")
    return keys_of(names) if names else []
