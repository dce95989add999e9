"""Copies blocks between the pool's memory and host memory, on threads other than the engine's."""

from __future__ import annotations

import ctypes
import mmap
from abc import ABC, abstractmethod

import numpy as np

from kv_transfer.transports.transport import KvMemoryRegion


class PoolCopier(ABC):
    """Reads and writes whole blocks of a pool. Whoever calls owns the block, so that no step writes to it."""

    @abstractmethod
    def host_memory(self, num_bytes: int) -> memoryview:
        """Writable host memory for blocks, from which this device copies fast."""

    @abstractmethod
    def save(self, block: int, into: memoryview) -> None:
        """Copies a block into host memory; done when it returns."""

    @abstractmethod
    def load(self, block: int, source: memoryview) -> None:
        """Copies host memory into a block; done when it returns, for steps that begin later."""


class HostPoolCopier(PoolCopier):
    """Of a pool in host memory."""

    def __init__(self, region: KvMemoryRegion) -> None:
        size = region.layout.block_bytes
        memory = (ctypes.c_uint8 * (region.num_blocks * size)).from_address(region.base_address)
        self._blocks = np.ctypeslib.as_array(memory).reshape(region.num_blocks, size)

    def host_memory(self, num_bytes: int) -> memoryview:
        """See `PoolCopier`. It takes memory as it is written."""
        return memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def save(self, block: int, into: memoryview) -> None:
        """See `PoolCopier`."""
        np.copyto(np.frombuffer(into, np.uint8), self._blocks[block])  # without the interpreter's lock

    def load(self, block: int, source: memoryview) -> None:
        """See `PoolCopier`."""
        np.copyto(self._blocks[block], np.frombuffer(source, np.uint8))
