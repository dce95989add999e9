"""How much of one prompt's beginning each worker holds, as one query of the prefix index answers it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_LEVELS = 16
_FEW = 8
"""Bits that are set one by one rather than by unpacking the whole set."""

Depths = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """Levels of (leading blocks held, set of slots as bits), the shallowest first; a slot stands in one level.

    A slot is the number that the index gave a worker (`Worker.prefix_slot`). Slots of no level hold nothing.
    """

    levels: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, blocks: Mapping[int, int]) -> PrefixHits:
        """Hits by slot; for policies' tests and simulations."""
        levels: dict[int, int] = {}
        for slot, depth in blocks.items():
            if depth > 0:
                levels[depth] = levels.get(depth, 0) | 1 << slot
        return cls(tuple(sorted(levels.items())))

    def __bool__(self) -> bool:
        return bool(self.levels)

    def blocks(self, slot: int) -> int:
        """Leading blocks that a slot holds; -1 is nobody's slot."""
        if slot < 0:
            return 0
        return next((depth for depth, slots in self.levels if slots >> slot & 1), 0)

    def by_slot(self, count: int) -> Depths:
        """Leading blocks of the slots 0..count-1, and a 0 behind them, so that slot -1 reads as nothing."""
        found = np.zeros(count + 1)
        for depth, slots in self.levels:
            if slots.bit_count() <= _FEW:
                for slot in _bits(slots):
                    if slot < count:
                        found[slot] = depth
                continue
            width = min(slots.bit_length(), count)
            raw = np.frombuffer(slots.to_bytes(slots.bit_length() // 8 + 1, "little"), np.uint8)
            held = np.unpackbits(raw, count=width, bitorder="little").view(np.bool_)
            np.copyto(found[:width], depth, where=held)
        return found


NO_HITS = PrefixHits()


def limited(levels: list[tuple[int, int]]) -> PrefixHits:
    """Hits of at most `MAX_LEVELS` levels: where there are more, the shallowest ones count as their shallowest."""
    spare = len(levels) - MAX_LEVELS
    if spare > 0:
        slots = 0
        for _, more in levels[: spare + 1]:
            slots |= more
        levels = [(levels[0][0], slots), *levels[spare + 1 :]]
    return PrefixHits(tuple(levels))


def deepest(levels: list[tuple[int, int]], live: int) -> list[tuple[int, int]]:
    """Levels in which each of the `live` slots stands once, at its greatest depth; the shallowest first."""
    found: list[tuple[int, int]] = []
    for depth, slots in sorted(levels, reverse=True):
        if fresh := slots & live:
            live ^= fresh
            if found and found[-1][0] == depth:
                fresh |= found.pop()[1]
            found.append((depth, fresh))
    found.reverse()
    return found


def _bits(slots: int) -> Iterator[int]:
    while slots:
        highest = slots.bit_length() - 1
        yield highest
        slots ^= 1 << highest
