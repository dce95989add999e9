"""Copies blocks between the pool's memory and host memory, on threads other than the engine's."""

from __future__ import annotations

import ctypes
import mmap
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from kv_transfer.transports.transport import VRAM, KvMemoryRegion


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


class TensorPoolCopier(PoolCopier):
    """Of a pool in a device's memory: through a stream of its own, and pinned memory."""

    def __init__(self, blocks: Any) -> None:
        """`blocks`: a tensor uint8 `[num_blocks, block_bytes]`."""
        import torch

        self._torch, self._blocks = torch, blocks
        self._stream = torch.cuda.Stream(blocks.device) if blocks.device.type == "cuda" else None

    def host_memory(self, num_bytes: int) -> memoryview:
        """See `PoolCopier`. Pinned, all of it at once."""
        pinned = self._stream is not None
        return memoryview(self._torch.empty(num_bytes, dtype=self._torch.uint8, pin_memory=pinned).numpy())

    def save(self, block: int, into: memoryview) -> None:
        """See `PoolCopier`."""
        self._copy(self._torch.frombuffer(into, dtype=self._torch.uint8), self._blocks[block])

    def load(self, block: int, source: memoryview) -> None:
        """See `PoolCopier`."""
        held = source if not source.readonly else memoryview(bytearray(source))
        self._copy(self._blocks[block], self._torch.frombuffer(held, dtype=self._torch.uint8))

    def _copy(self, to: Any, source: Any) -> None:
        if self._stream is None:
            to.copy_(source)
            return
        with self._torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
        self._stream.synchronize()


class _DeviceBytes:
    """Memory of a device as torch takes it from others."""

    def __init__(self, region: KvMemoryRegion) -> None:
        self.__cuda_array_interface__ = {
            "shape": (region.num_blocks, region.layout.block_bytes),
            "typestr": "|u1",
            "data": (region.base_address, False),
            "version": 3,
        }


def make_pool_copier(region: KvMemoryRegion) -> PoolCopier:
    """The copier of a pool's memory."""
    if region.memory_kind != VRAM:
        return HostPoolCopier(region)
    import torch

    device = torch.device("cuda", region.device_index)
    return TensorPoolCopier(torch.as_tensor(_DeviceBytes(region), device=device))
