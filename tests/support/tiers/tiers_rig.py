"""Tiers below a simulated engine, which tests wait for; and stores that fail."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from engine.tiers.build import identity_of
from engine.tiers.kv_tiers import KvTiers
from engine.tiers.pool_copier import HostPoolCopier
from engine.tiers.stores.block_store import BlockStore, HostStore
from engine.tiers.stores.disk_store import DiskStore, open_disk_store
from engine.tiers.tier_index import TierBlock
from kv_transfer.layout import SAME
from kv_transfer.transports.transport import KvMemoryRegion
from splitserve.alarms import Alarms
from tests.support.engine.engine_rig import BLOCK, Rig
from tests.support.waiting import PATIENCE_S


class FailingStore(BlockStore):
    """A store in memory whose writes and reads fail as told."""

    def __init__(self, slots: int, block_bytes: int) -> None:
        self._store = HostStore(memoryview(bytearray(slots * block_bytes)), block_bytes)
        self.slots, self.block_bytes = slots, block_bytes
        self.full = self.unreadable = False
        self.flip: Callable[[int], bool] = lambda slot: False
        """Which slots are damaged when they are read."""
        self.may_read = threading.Event()
        """Reads wait for it."""
        self.may_read.set()

    def write(self, slot: int, block: TierBlock, content: memoryview) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._store.write(slot, block, content)

    def read(self, slot: int, block_hash: bytes) -> memoryview | None:
        self.may_read.wait(PATIENCE_S)
        if self.unreadable:
            raise OSError(errno.EIO, "Input/output error")
        if self.flip(slot):
            self._store._bytes(slot)[0] ^= 1
        return self._store.read(slot, block_hash)

    def close(self) -> None:
        self.may_read.set()
        self._store.close()


class HandAlarms(Alarms):
    """Rings as its time is put forward, without a thread."""

    time_s = 0.0
    refuses = False
    """As if there could be no more threads."""

    def now(self) -> float:
        return self.time_s

    def advance(self, seconds: float) -> None:
        self.time_s += seconds
        while (first := self._due.peek()) is not None and first[0] <= self.time_s:
            self._due.discard(first[1])
            first[1].call()

    def _begun(self) -> bool:
        return not self.refuses


class TieredRig(Rig):
    """A rig with so many blocks of host memory below it, and a disk that is waited for by hand."""

    def __init__(
        self,
        host_blocks: int,
        disk: Path | BlockStore | None = None,
        disk_blocks: int = 64,
        num_blocks: int = 64,
        **overrides: int | bool,
    ) -> None:
        self.woken = threading.Event()
        self.alarms = HandAlarms("by hand")

        def below(memory: KvMemoryRegion) -> KvTiers:
            size, store = memory.layout.block_bytes, disk
            if isinstance(store, Path):
                store = open_disk_store(
                    store, identity_of(memory.layout, SAME), size, disk_bytes(disk_blocks, size)
                )
            host = HostStore(memoryview(bytearray(host_blocks * size)), size)
            tiers = KvTiers(HostPoolCopier(memory), host, store, BLOCK, alarms=self.alarms)
            tiers.wake = self.woken.set
            return tiers

        super().__init__(below=below, num_blocks=num_blocks, **overrides)

    def step(self) -> None:
        """A step, and time for its blocks to be copied: a small pool lets few of them wait."""
        super().step()
        while self.below.copying_blocks:
            assert self.woken.wait(PATIENCE_S)
            self.woken.clear()
            self.below.collect()

    @property
    def below(self) -> KvTiers:
        assert self.tiers is not None
        return self.tiers

    def settle(self, busy: Callable[[], bool] | None = None) -> None:
        """Runs the engine until nothing is on its way between tiers any more."""
        busy = busy or (lambda: self.below.busy)
        self.run()
        while busy():
            if not self.woken.wait(0.05):  # a job that has put its result is counted a moment longer
                continue
            self.woken.clear()
            self.below.collect()
            self.run()
        self.below.collect()
        self.run()

    def hits(self) -> dict[str, int]:
        return {str(name): tier.stats.hit_tokens for name, tier in self.below.all.items()}


def disk_bytes(blocks: int, block_bytes: int) -> int:
    """Bytes of a file with so many slots."""
    return 8192 + blocks * (block_bytes + 88)


def chain(length: int, name: int = 0) -> list[TierBlock]:
    """A prefix of blocks."""
    hashes = [bytes([name, depth]) + bytes(30) for depth in range(length)]
    return [TierBlock(each, hashes[depth - 1] if depth else None, depth) for depth, each in enumerate(hashes)]


def hashes_of(blocks: Iterable[TierBlock]) -> list[bytes]:
    return [block.block_hash for block in blocks]


def damage(store: DiskStore, slot: int) -> None:
    """Changes a byte of a slot behind the store's back."""
    import os

    at = store._start + slot * store.block_bytes
    byte = os.pread(store._file, 1, at)
    os.pwrite(store._file, bytes([byte[0] ^ 1]), at)
