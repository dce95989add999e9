"""A KV pool in plain memory, and layouts to go with it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kv_transfer.layout import KvLayout
from kv_transfer.transports.regions import KvMemoryRegion

LAYOUT = KvLayout(
    model_fingerprint="f" * 64, dtype="uint8", block_size_tokens=16, num_layers=2, num_kv_heads=2, head_dim=8
)
"""1 KiB a block."""


class NumpyPool:
    """`num_blocks` blocks of bytes; `data` is `[num_blocks, block_bytes]`, uint8."""

    def __init__(self, num_blocks: int, fill: int = 0, layout: KvLayout = LAYOUT) -> None:
        self.data: npt.NDArray[np.uint8] = np.full((num_blocks, layout.block_bytes), fill, dtype=np.uint8)
        self.memory = KvMemoryRegion(self.data.ctypes.data, num_blocks, layout)

    def stamp(self, seed: int) -> None:
        """Fills every block with its own reproducible bytes."""
        self.data[:] = np.random.default_rng(seed).integers(0, 256, self.data.shape, dtype=np.uint8)
