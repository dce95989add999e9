"""Memory for the intermediate results of a graph; results that are not live at the same time share memory.

So a step's memory does not grow with the number of layers, and stays in the processor's cache.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import StorageWeakRef

ALIGNED = 64


@dataclass(slots=True, eq=False)
class Buffer:
    """A result's memory. `fixed`: others than the kernels use its address, so it stays where it is."""

    num_bytes: int
    fixed: bool = False
    uses: list[tuple[int, npt.NDArray[np.int64], int, int]] = field(default_factory=list)
    """Each use, in order: the operation's number, its pointer array, the index in it, the offset into the buffer."""


class MemoryPlanner:
    """Memory that graphs share: they are never replayed at the same time."""

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []

    def take(self, num_bytes: int) -> int:
        """The address of `num_bytes` bytes, valid for as long as the planner lives."""
        for chunk in self._chunks:
            if chunk.numel() >= num_bytes + ALIGNED:
                break
        else:
            # Powers of two, so that graphs of slightly growing size do not each take a chunk.
            chunk = torch.zeros((1 << (num_bytes - 1).bit_length()) + ALIGNED, dtype=torch.uint8)
            self._chunks.append(chunk)
        return -(-int(chunk.data_ptr()) // ALIGNED) * ALIGNED


def assign_memory(buffers: Iterable[Buffer], planner: MemoryPlanner) -> None:
    """Gives every buffer that is not fixed memory of the planner, and rewrites the operations' pointers."""
    movable = [buffer for buffer in buffers if buffer.uses and not buffer.fixed]
    offsets, size = _pack(movable)
    base = planner.take(size)
    for buffer, offset in zip(movable, offsets, strict=True):
        for _, pointers, slot, distance in buffer.uses:
            pointers[slot] = base + offset + distance


def _pack(buffers: list[Buffer]) -> tuple[list[int], int]:
    """The offset of each buffer and the total size in bytes.

    First fit in the order of first use: each buffer takes the lowest gap between the buffers that are live then.
    """
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


class Buffers:
    """Results by address. Does not keep them alive: freed memory may be allocated again for another result."""

    def __init__(self) -> None:
        self.all: list[Buffer] = []
        self._starts: list[int] = []
        self._found: list[tuple[StorageWeakRef, Buffer]] = []

    def add(self, storage: torch.UntypedStorage) -> None:
        """Adds a result's new memory; forgets the freed results that it overlaps."""
        begin, num_bytes = storage.data_ptr(), storage.nbytes()
        if not num_bytes:
            return
        low, high = bisect_right(self._starts, begin), bisect_left(self._starts, begin + num_bytes)
        if low and self._starts[low - 1] + self._found[low - 1][1].num_bytes > begin:
            low -= 1
        buffer = Buffer(num_bytes)
        self._starts[low:high] = [begin]
        self._found[low:high] = [(StorageWeakRef(storage), buffer)]
        self.all.append(buffer)

    def find(self, address: int) -> tuple[Buffer, int] | None:
        """The live result that holds this address, and the offset of the address in it."""
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        storage, buffer = self._found[index]
        distance = address - self._starts[index]
        return None if distance >= buffer.num_bytes or storage.expired() else (buffer, distance)
