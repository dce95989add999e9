"""Copies blocks between the pool in a device's memory and host memory."""

from __future__ import annotations

import torch

from engine.tiers.pool_copier import PoolCopier
from kv_transfer.transports.transport import KvMemoryRegion


class TensorPoolCopier(PoolCopier):
    """Of a pool in a device's memory: through a stream of its own, and pinned memory."""

    def __init__(self, blocks: torch.Tensor) -> None:
        """`blocks`: uint8 `[num_blocks, block_bytes]`."""
        self._blocks = blocks
        self._stream = torch.cuda.Stream(blocks.device) if blocks.device.type == "cuda" else None

    def host_memory(self, num_bytes: int) -> memoryview:
        """See `PoolCopier`. Pinned, all of it at once."""
        pinned = self._stream is not None
        return memoryview(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned).numpy())

    def save(self, block: int, into: memoryview) -> None:
        """See `PoolCopier`."""
        self._copy(torch.frombuffer(into, dtype=torch.uint8), self._blocks[block])

    def load(self, block: int, source: memoryview) -> None:
        """See `PoolCopier`."""
        held = source if not source.readonly else memoryview(bytearray(source))
        self._copy(self._blocks[block], torch.frombuffer(held, dtype=torch.uint8))

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        if self._stream is None:
            to.copy_(source)
            return
        with torch.cuda.stream(self._stream):
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


def region_tensor(region: KvMemoryRegion) -> torch.Tensor:
    """The pool's memory on its device, uint8 `[num_blocks, block_bytes]`, no copy."""
    return torch.as_tensor(_DeviceBytes(region), device=torch.device("cuda", region.device_index))
