"""The slots of a tier, where bytes of blocks are kept: the interface, and the one in host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import xxhash

from engine.tiers.tier_index import TierBlock


class BlockStore(ABC):
    """`slots` slots of `block_bytes` bytes. Each knows which block it holds, and a checksum of it.

    What is read is what was written, or None: never other bytes. Used by one thread at a time.
    """

    slots: int
    block_bytes: int

    @abstractmethod
    def write(self, slot: int, block: TierBlock, content: memoryview) -> None:
        """Replaces what the slot holds. Raises OSError if that failed; then the slot holds nothing."""

    @abstractmethod
    def read(self, slot: int, block_hash: bytes) -> memoryview | None:
        """The bytes of this block, valid until the next call; None if the slot holds another one or is damaged.

        Raises OSError if it cannot be read.
        """

    def found(self) -> Sequence[tuple[int, TierBlock]]:
        """Slots and blocks that were here when it was opened. Their bytes are checked when they are read."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Lets go of memory and files."""


class HostStore(BlockStore):
    """Slots in the memory of this process."""

    def __init__(self, memory: memoryview, block_bytes: int) -> None:
        """`memory`: writable bytes, at least one block."""
        self.block_bytes = block_bytes
        self.slots = len(memory) // block_bytes
        self._memory = memory
        self._held: list[tuple[bytes, int] | None] = [None] * self.slots
        """Hash of the block in each slot, and its checksum."""

    def room(self, slot: int) -> memoryview:
        """The bytes of a slot, which holds nothing from now on; `seal` ends that."""
        self._held[slot] = None
        return self._bytes(slot)

    def seal(self, slot: int, block: TierBlock) -> None:
        """The bytes in `room` are now those of this block."""
        self._held[slot] = block.block_hash, xxhash.xxh3_64_intdigest(self._bytes(slot))

    def write(self, slot: int, block: TierBlock, content: memoryview) -> None:
        """See `BlockStore`."""
        self.room(slot)[:] = content
        self.seal(slot, block)

    def read(self, slot: int, block_hash: bytes) -> memoryview | None:
        """See `BlockStore`."""
        content = self._bytes(slot)
        return content if self._matches(slot, block_hash, content) else None

    def copy(self, slot: int, block_hash: bytes) -> memoryview | None:
        """What `read` returns, as a copy; for other threads than the one that writes."""
        content = memoryview(bytes(self._bytes(slot)))
        return content if self._matches(slot, block_hash, content) else None

    def close(self) -> None:
        """See `BlockStore`."""
        self._held = [None] * self.slots

    def _matches(self, slot: int, block_hash: bytes, content: memoryview) -> bool:
        held = self._held[slot]
        return held is not None and held == (block_hash, xxhash.xxh3_64_intdigest(content))

    def _bytes(self, slot: int) -> memoryview:
        return self._memory[slot * self.block_bytes : (slot + 1) * self.block_bytes]
