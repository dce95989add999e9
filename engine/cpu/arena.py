"""Memory for the results of a tape: those that are not needed at the same time share theirs.

So the memory of a step does not grow with the number of layers, and stays in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

ALIGNED = 64


@dataclass(slots=True)
class Buffer:
    """Memory that a result was first written to. `fixed`: others than the kernels know its address."""

    address: int
    num_bytes: int
    fixed: bool = False
    first: int = -1
    last: int = -1


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
            chunk = torch.zeros(num_bytes + ALIGNED, dtype=torch.uint8)
            self._chunks.append(chunk)
        return -(-int(chunk.data_ptr()) // ALIGNED) * ALIGNED


def place(notes: list[Any], buffers: list[Buffer], arena: Arena) -> None:
    """Gives every buffer that is not fixed its place in the arena, and rewrites the operations' pointers.

    `notes` are operations (arrays) in the order in which they run; anything else among them is passed over.
    """
    movable = sorted((b for b in buffers if not b.fixed and b.num_bytes), key=lambda buffer: buffer.address)
    starts = np.array([buffer.address for buffer in movable], dtype=np.int64)
    uses: list[tuple[Any, int, Buffer]] = []
    for index, note in enumerate(notes):
        if not isinstance(note, np.ndarray):
            continue
        pointers = note["pointer"][0]
        for slot in range(len(pointers)):
            at = int(np.searchsorted(starts, pointers[slot], side="right")) - 1
            if at < 0 or pointers[slot] >= movable[at].address + movable[at].num_bytes:
                continue
            buffer = movable[at]
            buffer.first = index if buffer.first < 0 else buffer.first
            buffer.last = index
            uses.append((pointers, slot, buffer))
    offsets, size = _pack([buffer for buffer in movable if buffer.first >= 0])
    base = arena.take(size)
    for pointers, slot, buffer in uses:
        pointers[slot] += base + offsets[buffer.address] - buffer.address


def _pack(buffers: list[Buffer]) -> tuple[dict[int, int], int]:
    """Offsets by address, and the bytes of all: each at the lowest place that is free for as long as it lives."""
    offsets: dict[int, int] = {}
    live: list[tuple[int, int, int]] = []  # offset, end, last use
    size = 0
    for buffer in sorted(buffers, key=lambda buffer: buffer.first):
        live = sorted(entry for entry in live if entry[2] >= buffer.first)
        wanted = -(-buffer.num_bytes // ALIGNED) * ALIGNED
        offset = 0
        for begin, end, _ in live:
            if begin - offset >= wanted:
                break
            offset = max(offset, end)
        offsets[buffer.address] = offset
        live.append((offset, offset + wanted, buffer.last))
        size = max(size, offset + wanted)
    return offsets, size
