"""Copies blocks that enter the prefix cache down: to host memory, and from there to the disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from engine.kv_cache.block_pool import BlockPool
from engine.tiers.pool_copier import PoolCopier
from engine.tiers.read_choice import TierName
from engine.tiers.stores.block_store import HostStore
from engine.tiers.tier import Tier, TierPlaces
from engine.tiers.tier_index import TierBlock

_SHARE = 2
"""One block in so many of the pool may be owned by copies to host memory, and as many by reads."""
_DISK_BACKLOG_BYTES = 256 << 20


def most_owned(pool: BlockPool) -> int:
    """Blocks of the pool that copies to host memory may own, and as many reads."""
    return max(1, pool.total // _SHARE)


class CopiesDown:
    """For the engine thread. A block that is being copied has an owner in the pool, so nobody writes to it."""

    def __init__(
        self,
        copier: PoolCopier,
        host_store: HostStore,
        tiers: Mapping[TierName, Tier],
        places: TierPlaces,
        soon: Callable[[Callable[[], None]], None],
        cost: Callable[[int], float],
    ) -> None:
        """`soon` has a function called on the engine thread. `cost`: of computing a block, by the blocks before it."""
        self._copier, self._host_store = copier, host_store
        self._tiers, self._places, self._soon, self._cost = tiers, places, soon, cost
        self._host, self._disk = tiers["host"], tiers.get("disk")
        self.blocks = 0
        """Blocks of the pool that are being copied to host memory."""
        self._writes = 0
        """Blocks that are being written to the disk."""

    @property
    def under_way(self) -> int:
        """Blocks on their way down."""
        return self.blocks + self._writes

    def attach(self, pool: BlockPool) -> None:
        """Joins the pool."""
        self._pool, self._most_owned = pool, most_owned(pool)

    def stored(self, block: int, found: TierBlock) -> None:
        """Copies a block that entered the pool's prefix cache, once the thread has time."""
        if self._host.index.knows(found.block_hash):
            return
        if self.blocks >= self._most_owned:
            self._host.stats.failures["skipped"] += 1
            return
        placement = self._host.index.add(found, self._cost(found.depth))
        if placement is None:
            return
        self._places.left(placement.evicted)
        self._pool.share([block])
        self.blocks += 1
        work = partial(self._save, block, found, placement.slot)
        self._host.start(work, partial(self._saved, block, found), self._soon)

    def used(self, hits: Sequence[int], hashes: Sequence[bytes]) -> None:
        """A prompt starts with these blocks of the pool's prefix cache."""
        for tier in self._tiers.values():
            tier.index.touch(hashes)
        for depth, (block, block_hash) in enumerate(zip(hits, hashes, strict=True)):
            if not self._host.index.knows(block_hash):
                self.stored(block, TierBlock(block_hash, hashes[depth - 1] if depth else None, depth))

    def _save(self, block: int, found: TierBlock, slot: int) -> None:
        """On the thread of the host tier."""
        self._copier.save(block, self._host_store.room(slot))
        self._host_store.seal(slot, found)

    def _saved(self, block: int, found: TierBlock, _: None) -> None:
        self.blocks -= 1
        self._pool.release([block])
        slot = self._places.arrived(self._host, found)
        disk = self._disk
        if disk is None or slot is None:
            return
        if len(disk.thread) * self._host_store.block_bytes > _DISK_BACKLOG_BYTES:
            disk.skipped()
            return
        placement = disk.index.add(found, self._cost(found.depth))
        if placement is not None:
            self._places.left(placement.evicted)
            self._writes += 1
            work = partial(self._write, disk, found, slot, placement.slot)
            disk.start(work, partial(self._written, disk, found), self._soon)
        elif not disk.index.knows(found.block_hash):
            disk.came(taken=False)

    def _write(self, disk: Tier, found: TierBlock, source: int, slot: int) -> OSError | bool:
        """On the thread of the disk. Whether the block has been written."""
        content = self._host_store.copy(source, found.block_hash)
        # None: host memory has given the block up meanwhile.
        return content is not None and disk.write(slot, found, content)

    def _written(self, disk: Tier, found: TierBlock, outcome: OSError | bool) -> None:
        self._writes -= 1
        if outcome is True:
            disk.came(taken=True)
            self._places.arrived(disk, found)
        else:
            disk.was_not_written(found, outcome)
