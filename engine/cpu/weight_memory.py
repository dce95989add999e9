"""Memory for packed weights: many of them in one mapping, so that it can have huge pages."""

from __future__ import annotations

import torch

from engine.host_pages import host_pages

CHUNK_BYTES = 32 << 20
SMALL_BYTES = 1 << 18
"""Smaller weights are read from a cache anyway."""
ALIGNED = 64
_HUGE_PAGE = 2 << 20


class WeightMemory:
    """Gives memory that is never given back one by one: tensors keep their mapping alive."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def like(self, weight: torch.Tensor) -> torch.Tensor:
        """Memory of a weight's shape and dtype, contiguous; what is in it is not said."""
        num_bytes = weight.numel() * weight.itemsize
        if num_bytes < SMALL_BYTES:
            return torch.empty_like(weight, memory_format=torch.contiguous_format)
        if self._used + num_bytes > len(self._chunk):
            size = -(-max(num_bytes, CHUNK_BYTES) // _HUGE_PAGE) * _HUGE_PAGE
            self._chunk, self._used = torch.frombuffer(host_pages(size), dtype=torch.uint8), 0
        begin = self._used
        self._used += -(-num_bytes // ALIGNED) * ALIGNED
        return self._chunk[begin : begin + num_bytes].view(weight.dtype).view(weight.shape)
