"""One tier: its books, its bytes, and the thread that moves them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from engine.tiers.block_store import BlockStore
from engine.tiers.copy_thread import CopyThread
from engine.tiers.pool_copier import PoolCopier
from engine.tiers.read_choice import ReadRate, TierName
from engine.tiers.tier_index import Eviction, TierBlock, TierIndex
from splitserve.logs import log_event

_ASSUMED_BYTES_PER_S: dict[TierName, float] = {"host": 2e9, "disk": 4e8}
"""Until a tier's first read."""
Failure = Literal["write", "read", "skipped"]


@dataclass(slots=True)
class TierStats:
    """What came of a tier since the start."""

    hit_tokens: int = 0
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


@dataclass(eq=False, slots=True)
class TierRead:
    """Blocks on their way into the pool, for one prompt."""

    hits: list[int]
    """Blocks of the prefix before them, which must stay."""
    hashes: Sequence[bytes]
    tiers: Sequence[TierName]
    blocks: list[int]
    then: Callable[[], None] | None
    """What waits for them; None once it has waited long enough."""
    parts: int = 0
    brought: set[int] = field(default_factory=set)


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

    @property
    def bytes(self) -> int:
        """Bytes of the blocks that it holds."""
        return len(self.index) * self.store.block_bytes

    @property
    def bytes_per_s(self) -> float:
        """How fast blocks are read, as far as is known."""
        return self.store.block_bytes / self.rate.block_s

    def write(self, slot: int, block: TierBlock, content: memoryview) -> OSError | bool:
        """Writes a block, on the tier's thread: True, or why not."""
        try:
            self.store.write(slot, block, content)
        except OSError as error:
            return error
        return True

    def read(self, items: Sequence[ReadItem], copier: PoolCopier, closed: Callable[[], bool]) -> ReadOutcome:
        """Copies blocks into the pool, on the tier's thread.

        Ends with the first one that is not there or damaged: what follows it is of no use. Also when `closed`.
        """
        began_s = time.perf_counter()
        good = 0
        for item in items:
            try:
                content = self.store.read(item.slot, item.block_hash)
            except OSError as error:
                log_event("kv_tier.read_failed", tier=self.name, error=str(error))
                break
            if content is None or closed():
                break
            copier.load(item.block, content)
            good += 1
        return ReadOutcome(good, time.perf_counter() - began_s)
