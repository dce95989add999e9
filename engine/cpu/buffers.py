"""Which result an address belongs to, while a pass of the model is noted down."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from engine.cpu.arena import Buffer


class Buffers:
    """Results that were seen. Nothing here keeps them: the memory of one that is gone may come again as another's."""

    def __init__(self) -> None:
        self.all: list[Buffer] = []
        self._starts: list[int] = []
        self._found: list[tuple[StorageWeakRef, Buffer]] = []

    def add(self, storage: torch.UntypedStorage) -> None:
        """New memory of a result."""
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
        """The result that lies there now and the distance from its beginning."""
        index = bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        storage, buffer = self._found[index]
        distance = address - self._starts[index]
        return None if distance >= buffer.num_bytes or storage.expired() else (buffer, distance)
