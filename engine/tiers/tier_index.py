"""What a tier holds, and which block it gives up: pure, without the bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from splitserve.queues import LazyHeap

Eviction = Literal["history", "age"]
_MOST_USES = 3
"""Uses that count: a prefix that was hot for a day does not stay for another."""
_REMEMBERED = 4
"""Blocks that were evicted, in those that a tier holds, whose uses are remembered."""


class TierBlock(NamedTuple):
    """A block as tiers know it: `parent` is the hash of the one before it in its prefix, None for the first."""

    block_hash: bytes
    parent: bytes | None
    depth: int
    """Blocks before it in its prefix."""


class Placement(NamedTuple):
    """Where a new block goes, and which one gave up its slot for it, if any."""

    slot: int
    evicted: bytes | None


class _Entry:
    __slots__ = ("children", "cost", "parent", "rank", "ready", "slot", "uses")

    def __init__(self, parent: bytes | None, slot: int, cost: float, uses: int) -> None:
        self.parent, self.slot, self.cost, self.uses = parent, slot, cost, uses
        self.children, self.rank, self.ready = 0, 0.0, False


class TierIndex:
    """The blocks in the `slots` slots of a tier. Every operation costs amortized O(log n) a block.

    A block is of use only behind its parent, so a block that has children here is never evicted, and one whose parent
    is not here is not taken. Among the others, `age` evicts the one that was used least recently. `history` counts a
    block as used later than it was, for each use before the last one by as many uses of the tier as it has slots, times
    the block's cost. Uses count beyond an eviction: most blocks are used once, and one that comes again soon will come
    again. (LRU-K of O'Neil et al. 1993 retains such history, and 2Q, ARC and S3-FIFO have queues of ghosts for it; the
    comparison is in docs/decisions/0062.)
    """

    def __init__(self, slots: int, eviction: Eviction = "history") -> None:
        self.slots = slots
        self.evictions = 0
        self._eviction = eviction
        self._entries: dict[bytes, _Entry] = {}
        self._free = list(range(slots - 1, -1, -1))
        self._leaves: LazyHeap[float, bytes] = LazyHeap()
        self._uses = 0
        self._evicted: OrderedDict[bytes, int] = OrderedDict()
        """Uses of blocks that are not here any more, those evicted last at the end."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_hash: bytes) -> bool:
        entry = self._entries.get(block_hash)
        return entry is not None and entry.ready

    def knows(self, block_hash: bytes) -> bool:
        """Whether the block is here or on its way."""
        return block_hash in self._entries

    def hashes(self) -> Iterator[bytes]:
        """The blocks that are here, parents before their children unless a parent was dropped and came again."""
        return (block_hash for block_hash, entry in self._entries.items() if entry.ready)

    def slot_of(self, block_hash: bytes) -> int | None:
        """The slot of a block that is here, else None."""
        entry = self._entries.get(block_hash)
        return entry.slot if entry is not None and entry.ready else None

    def add(self, block: TierBlock, cost: float = 1.0) -> Placement | None:
        """Gives a block a slot; it is here once `ready` says so. `cost`: of computing it, in any unit.

        None if it is known, its parent is not, or no other block may be evicted now.
        """
        if block.block_hash in self._entries:
            return None
        if block.parent is not None and block.parent not in self._entries:
            return None
        evicted = None
        if not self._free:
            evicted = self._evict(keep=block.parent)
            if evicted is None:
                return None
        slot = self._free.pop()
        self._insert(block, slot, cost)
        return Placement(slot, evicted)

    def ready(self, block_hash: bytes) -> None:
        """The block has been written. Ignored if it was dropped meanwhile."""
        entry = self._entries.get(block_hash)
        if entry is not None and not entry.ready:
            entry.ready = True
            self._rank(block_hash, entry)

    def restore(self, found: Sequence[tuple[int, TierBlock]], cost: float = 1.0) -> None:
        """Takes what lies in slots since an earlier time.

        Blocks without their parents, of a wrong depth, twice or beyond the slots are left out. For an empty index.
        """
        depths: dict[bytes, int] = {}
        taken: set[int] = set()
        for slot, block in sorted(found, key=lambda each: each[1].depth):
            parent_depth = -1 if block.parent is None else depths.get(block.parent)
            fits = 0 <= slot < self.slots and slot not in taken
            if (
                parent_depth is None
                or parent_depth + 1 != block.depth
                or block.block_hash in depths
                or not fits
            ):
                continue
            depths[block.block_hash] = block.depth
            taken.add(slot)
            self._insert(block, slot, cost)
            self.ready(block.block_hash)
        self._free = [slot for slot in range(self.slots - 1, -1, -1) if slot not in taken]

    def touch(self, block_hashes: Iterable[bytes]) -> None:
        """Counts a use of each of these blocks that is here."""
        for block_hash in block_hashes:
            entry = self._entries.get(block_hash)
            if entry is not None:
                entry.uses = min(entry.uses + 1, _MOST_USES)
                self._rank(block_hash, entry)

    def drop(self, block_hash: bytes) -> None:
        """Removes a block whose bytes turned out to be missing or wrong; ignored if it is unknown."""
        entry = self._entries.pop(block_hash, None)
        if entry is not None:
            self._leaves.discard(block_hash)
            self._leave(entry)

    def _insert(self, block: TierBlock, slot: int, cost: float) -> None:
        uses = min(self._evicted.pop(block.block_hash, 0) + 1, _MOST_USES)
        self._entries[block.block_hash] = _Entry(block.parent, slot, cost, uses)
        if block.parent is not None:
            self._entries[block.parent].children += 1
            self._leaves.discard(block.parent)

    def _rank(self, block_hash: bytes, entry: _Entry) -> None:
        self._uses += 1
        entry.rank = self._uses
        if self._eviction == "history":
            entry.rank += self.slots * (entry.uses - 1) * entry.cost
        self._offer(block_hash, entry)

    def _offer(self, block_hash: bytes, entry: _Entry) -> None:
        """Makes a block without children that is here one of those that may be evicted."""
        self._leaves.discard(block_hash)
        if entry.ready and entry.children <= 0:
            self._leaves.push(entry.rank, block_hash)

    def _evict(self, keep: bytes | None) -> bytes | None:
        """Evicts the leaf of the least rank but `keep`, which is about to have a child."""
        kept = keep is not None and keep in self._leaves
        if kept and keep is not None:
            self._leaves.discard(keep)
        victim = self._leaves.pop()
        if kept and keep is not None:
            self._offer(keep, self._entries[keep])
        if victim is None:
            return None
        entry = self._entries.pop(victim)
        if self._eviction == "history":
            self._evicted[victim] = entry.uses
        if len(self._evicted) > _REMEMBERED * self.slots:
            self._evicted.popitem(last=False)
        self.evictions += 1
        self._leave(entry)
        return victim

    def _leave(self, entry: _Entry) -> None:
        self._free.append(entry.slot)
        parent = self._entries.get(entry.parent) if entry.parent is not None else None
        if parent is not None and entry.parent is not None:
            parent.children -= 1
            self._offer(entry.parent, parent)
