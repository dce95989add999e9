"""One tier: its books, its bytes, and the thread that moves them. And which of them has a block."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, TypeVar

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.cache_events import KvEventLog
from engine.tiers.copy_thread import CopyThread
from engine.tiers.pool_copier import PoolCopier
from engine.tiers.read_choice import ReadRate, TierName
from engine.tiers.stores.block_store import BlockStore
from engine.tiers.tier_index import Eviction, TierBlock, TierIndex
from engine.tiers.tier_read import TierRead
from splitserve.logs import log_event

_ASSUMED_BYTES_PER_S: dict[TierName, float] = {"host": 2e9, "disk": 4e8}
"""Until a tier's first read."""
_LOST_WEIGHT = 1 / 16
T = TypeVar("T")
Failure = Literal["write", "read", "skipped"]


@dataclass(slots=True)
class TierStats:
    """What came of a tier since the start."""

    hit_tokens: int = 0
    found_blocks: int = 0
    """That other workers have written, and a look-up has found."""
    read_bytes: int = 0
    read_s: float = 0.0
    failures: dict[Failure, int] = field(default_factory=lambda: {"write": 0, "read": 0, "skipped": 0})
    """Blocks that could not be written, that could not be read or were damaged, and that were not written because too
    much was being written."""


class ReadItem(NamedTuple):
    """A block of a read: its place in the read, where it lies, and where it goes."""

    place: int
    block_hash: bytes
    slot: int
    block: int


class ReadOutcome(NamedTuple):
    """How many of the blocks of a read, from the first on, have been read, and in which time."""

    good: int
    seconds: float
    missing: bool = False
    """Whether the next one was not there, or damaged."""


class Tier:
    """A tier. All but `read` is for the engine thread."""

    def __init__(self, name: TierName, store: BlockStore, eviction: Eviction) -> None:
        self.name: TierName = name
        self.store = store
        self.index = TierIndex(store.slots, eviction)
        self.rate = ReadRate(store.block_bytes / _ASSUMED_BYTES_PER_S[name])
        self.thread = CopyThread(f"kv-{name}")
        self.stats = TierStats()
        self.reading_blocks = 0
        """Of reads in progress."""
        self.lost_share = 0.0
        """Of the blocks that came to it of late, those that it did not take: a mean that fades."""

    @property
    def bytes(self) -> int:
        """Bytes of the blocks that it holds."""
        return len(self.index) * self.store.block_bytes

    @property
    def bytes_per_s(self) -> float:
        """How fast blocks are read, as far as is known."""
        return self.store.block_bytes / self.rate.block_s

    def start(
        self,
        work: Callable[[], T],
        done: Callable[[T], None],
        soon: Callable[[Callable[[], None]], None],
        *,
        urgent: bool = False,
    ) -> None:
        """Runs `work` on the tier's thread, then has `soon` call `done` with its result on the engine's."""

        def job() -> None:
            try:
                ended: Callable[[], None] = partial(done, work())
            except BaseException as error:
                ended = partial(raise_again, error)
            soon(ended)

        self.thread.put(job, urgent=urgent)

    def write(self, slot: int, block: TierBlock, content: memoryview) -> OSError | bool:
        """Writes a block, on the tier's thread: True, or why not."""
        try:
            self.store.write(slot, block, content)
        except OSError as error:
            return error
        return True

    def came(self, *, taken: bool) -> None:
        """Counts a block that came to it, in `lost_share`."""
        self.lost_share += ((not taken) - self.lost_share) * _LOST_WEIGHT

    def skipped(self) -> None:
        """Counts a block that is not written."""
        self.stats.failures["skipped"] += 1
        self.came(taken=False)

    def was_not_written(self, block: TierBlock, why: OSError | bool) -> None:
        """Drops a block that could not be written, or that was given up before."""
        self.index.drop(block.block_hash)
        if not isinstance(why, OSError):
            self.skipped()
            return
        self.stats.failures["write"] += 1
        self.came(taken=False)
        if self.stats.failures["write"] == 1:
            log_event("kv_tier.write_failed", tier=self.name, error=str(why))

    def items_of(self, read: TierRead) -> list[ReadItem]:
        """What it has of a read."""
        own = (place for place, name in enumerate(read.tiers) if name == self.name)
        found = ((place, self.index.slot_of(read.hashes[place])) for place in own)
        return [
            ReadItem(place, read.hashes[place], slot, read.blocks[place])
            for place, slot in found
            if slot is not None
        ]

    def read(
        self, read: TierRead, items: Sequence[ReadItem], copier: PoolCopier, closed: Callable[[], bool]
    ) -> ReadOutcome:
        """Copies blocks into the pool, on the tier's thread.

        Ends with the first one that is not there or damaged: what follows it is of no use. Also when `closed`, or when
        the read is given up.
        """
        began_s = time.perf_counter()
        good, missing = 0, False
        for item in items:
            try:
                content = self.store.read(item.slot, item.block_hash)
            except OSError as error:
                log_event("kv_tier.read_failed", tier=self.name, error=str(error))
                break
            missing = content is None
            if content is None or closed() or not read.load(copier, item.block, content):
                break
            good += 1
        return ReadOutcome(good, time.perf_counter() - began_s, missing)

    def was_read(self, read: TierRead, items: Sequence[ReadItem], outcome: ReadOutcome) -> ReadItem | None:
        """Books what came of a read's `items`; the one that turned out to be missing or damaged, which it drops."""
        self.reading_blocks -= len(items)
        came = outcome.good + read.given_up  # one came too late, and took its time, too
        self.rate.measured(came, outcome.seconds)
        self.stats.read_bytes += outcome.good * self.store.block_bytes
        self.stats.read_s += outcome.seconds
        read.brought.update(item.place for item in items[: outcome.good])
        if outcome.good == len(items) or read.given_up:
            return None
        self.stats.failures["read"] += 1
        damaged = items[outcome.good]
        self.index.drop(damaged.block_hash)
        return damaged


class TierPlaces:
    """Where below the pool blocks are, as coordinators hear of it."""

    def __init__(self, tiers: Mapping[TierName, Tier]) -> None:
        """`tiers`: the nearest first."""
        self._tiers = tiers

    def attach(self, pool: BlockPool, log: KvEventLog) -> None:
        """Joins the pool. `log`: a block counts as cached for as long as any tier has it."""
        self._pool, self._log = pool, log
        pool.place_below, log.tiered = self.of, True
        for tier in self._tiers.values():
            for block_hash in tier.index.hashes():
                if tier.name == self.of(block_hash):
                    log.stored(block_hash, tier.name)

    def of(self, block_hash: bytes) -> TierName | None:
        """The nearest tier that has a block; None if none has."""
        return next((name for name, tier in self._tiers.items() if block_hash in tier.index), None)

    def arrived(self, tier: Tier, found: TierBlock) -> int | None:
        """Counts a block as held by a tier; its slot, None if the tier has dropped it."""
        before = self.of(found.block_hash)
        tier.index.ready(found.block_hash)
        self._tell(found.block_hash, before)
        return tier.index.slot_of(found.block_hash)

    def left(self, block_hash: bytes | None, *, lost: bool = False) -> None:
        """A tier has given a block up. `lost`: a store that workers share was found not to have it."""
        if block_hash is not None:
            self._tell(block_hash, "host", lost=lost)

    def _tell(self, block_hash: bytes, before: TierName | None, *, lost: bool = False) -> None:
        """Tells coordinators where a block is now, unless they know: in the pool, or `before`."""
        place = self.of(block_hash)
        if place == before or self._pool.lookup(block_hash) is not None:
            return
        if place is None:
            self._log.removed(block_hash, lost=lost)
        else:
            self._log.stored(block_hash, place)


def raise_again(error: BaseException) -> None:
    """Raises what a thread has met, on the thread that is to know."""
    raise error
