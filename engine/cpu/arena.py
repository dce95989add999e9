"""Memory for the results of a tape: those that are not needed at the same time share theirs.

So the memory of a step does not grow with the number of layers, and stays in the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

ALIGNED = 64


@dataclass(slots=True, eq=False)
class Buffer:
    """A result's memory. `fixed`: others than the kernels know its address, so it stays where it was first."""

    num_bytes: int
    fixed: bool = False
    uses: list[tuple[int, npt.NDArray[np.int64], int, int]] = field(default_factory=list)
    """When, an operation's pointers, which of them, and its distance from the beginning; in the order of time."""


class Arena:
    """Memory that tapes share: they are never played at the same time."""

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []

    def take(self, num_bytes: int) -> int:
        """The address of so many bytes; it stays."""
        for chunk in self._chunks:
            if chunk.numel() >= num_bytes + ALIGNED:
                break
        else:
            # In powers of two: programs that are a little larger each do not add up.
            chunk = torch.zeros((1 << (num_bytes - 1).bit_length()) + ALIGNED, dtype=torch.uint8)
            self._chunks.append(chunk)
        return -(-int(chunk.data_ptr()) // ALIGNED) * ALIGNED


def place(buffers: Iterable[Buffer], arena: Arena) -> None:
    """Gives every buffer that is not fixed its place in the arena, and rewrites the operations' pointers."""
    movable = [buffer for buffer in buffers if buffer.uses and not buffer.fixed]
    offsets, size = _pack(movable)
    base = arena.take(size)
    for buffer, offset in zip(movable, offsets, strict=True):
        for _, pointers, slot, distance in buffer.uses:
            pointers[slot] = base + offset + distance


def _pack(buffers: list[Buffer]) -> tuple[list[int], int]:
    """Offsets, and the bytes of all: each at the lowest place that is free for as long as it is used."""
    offsets = [0] * len(buffers)
    live: list[tuple[int, int, int]] = []  # offset, end, last use
    size = 0
    for index in sorted(range(len(buffers)), key=lambda index: buffers[index].uses[0][0]):
        buffer = buffers[index]
        first, last = buffer.uses[0][0], buffer.uses[-1][0]
        live = sorted(entry for entry in live if entry[2] >= first)
        wanted = -(-buffer.num_bytes // ALIGNED) * ALIGNED
        offset = 0
        for begin, end, _ in live:
            if begin - offset >= wanted:
                break
            offset = max(offset, end)
        offsets[index] = offset
        live.append((offset, offset + wanted, last))
        size = max(size, offset + wanted)
    return offsets, size
