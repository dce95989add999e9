"""The result of a query of the prefix index: how many leading blocks of a prompt each worker holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MAX_LEVELS = 48
"""Distinct depths kept per query: of sixteen workers that hold prefixes of different lengths. With tiers each has three
depths: of what it holds anywhere, in host memory or nearer, and in its pool."""
_FEW = 8
"""Up to this many bits are set one by one instead of unpacking the whole set."""

Depths = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """Levels of (leading blocks held, slots as a bit set), the shallowest first. A slot is in at most one level.

    A slot is the index's number for a worker (`Worker.prefix_slot`). Slots in no level hold nothing.
    """

    levels: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, blocks: Mapping[int, int]) -> PrefixHits:
        """Hits from leading blocks by slot, for tests and simulations."""
        levels: dict[int, int] = {}
        for slot, depth in blocks.items():
            if depth > 0:
                levels[depth] = levels.get(depth, 0) | 1 << slot
        return cls(tuple(sorted(levels.items())))

    def __bool__(self) -> bool:
        return bool(self.levels)

    def blocks(self, slot: int) -> int:
        """Leading blocks that a slot holds; 0 for slot -1."""
        if slot < 0:
            return 0
        return next((depth for depth, slots in self.levels if slots >> slot & 1), 0)

    def by_slot(self, count: int) -> Depths:
        """Leading blocks of the slots 0..count-1 as float64 [count + 1]; the last element is 0, so slot -1 reads 0."""
        found = np.zeros(count + 1)
        for depth, slots in self.levels:
            if slots.bit_count() <= _FEW:
                for slot in bits(slots):
                    if slot < count:
                        found[slot] = depth
                continue
            width = min(slots.bit_length(), count)
            raw = np.frombuffer(slots.to_bytes(slots.bit_length() // 8 + 1, "little"), np.uint8)
            held = np.unpackbits(raw, count=width, bitorder="little").view(np.bool_)
            np.copyto(found[:width], depth, where=held)
        return found


NO_HITS = PrefixHits()


def joined(found: Sequence[PrefixHits]) -> PrefixHits:
    """Hits of one prompt by its keys for several block sizes. A worker has one size, so each slot is in one of them.

    Each depth is in blocks of the slot's own worker.
    """
    if len(found) == 1:
        return found[0]
    levels: dict[int, int] = {}
    for hits in found:
        for depth, slots in hits.levels:
            levels[depth] = levels.get(depth, 0) | slots
    return limited(sorted(levels.items()))


def limited(levels: list[tuple[int, int]]) -> PrefixHits:
    """Hits of at most `MAX_LEVELS` levels: surplus shallow levels are merged into the shallowest."""
    spare = len(levels) - MAX_LEVELS
    if spare > 0:
        slots = 0
        for _, more in levels[: spare + 1]:
            slots |= more
        levels = [(levels[0][0], slots), *levels[spare + 1 :]]
    return PrefixHits(tuple(levels))


def deepest(levels: list[tuple[int, int]], live: int) -> list[tuple[int, int]]:
    """Levels with each of the `live` slots once, at its greatest depth; the shallowest first."""
    found: list[tuple[int, int]] = []
    for depth, slots in sorted(levels, reverse=True):
        if fresh := slots & live:
            live ^= fresh
            if found and found[-1][0] == depth:
                fresh |= found.pop()[1]
            found.append((depth, fresh))
    found.reverse()
    return found


class StoreSharing(NamedTuple):
    """Workers that share a store."""

    shared_id: int
    slots: int
    """Of what each of them holds, a bit set."""
    members: tuple[tuple[int, int], ...]
    """Of each worker the bit of what it holds, and of what it has in host memory or nearer."""


def with_shared(
    levels: list[tuple[int, int]],
    groups: Sequence[StoreSharing],
    live: int,
    readable: Callable[[int, int], int] = lambda shared_id, depth: depth,
) -> list[tuple[int, int]]:
    """Levels with all slots of a group at the greatest depth of any of them: what one has, all can read.

    `readable`: how many of so many blocks a store has for certain not lost; what comes after these counts only where a
    worker has it in its own memory.
    """
    more: list[tuple[int, int]] = []
    for group in groups:
        depth = max((depth for depth, slots in levels if slots & group.slots), default=0)
        if depth and (limit := readable(group.shared_id, depth)) < depth:
            levels = _lowered(levels, group, limit)
            depth = limit
        if depth:
            more.append((depth, group.slots))
    return deepest([*levels, *more], live) if more else levels


def _lowered(levels: list[tuple[int, int]], group: StoreSharing, limit: int) -> list[tuple[int, int]]:
    """Levels with each member's first slot no deeper than `limit`, or than its memory goes."""
    more: list[tuple[int, int]] = []
    for held, in_memory in group.members:
        depth = max(limit, next((depth for depth, slots in levels if slots & in_memory), 0))
        if any(deeper > depth and slots & held for deeper, slots in levels):
            levels = [(at, slots & ~held) for at, slots in levels if slots & ~held]
            more.append((depth, held))
    return sorted([*levels, *((depth, held) for depth, held in more if depth)])


def bits(slots: int) -> Iterator[int]:
    """The slots of a bit set, from the last."""
    while slots:
        highest = slots.bit_length() - 1
        yield highest
        slots ^= 1 << highest
