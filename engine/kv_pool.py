"""The memory that holds all KV blocks of a worker."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from engine.host_pages import host_pages
from kv_transfer.lane_probe import probe_blocks
from kv_transfer.layout import KvLayout
from kv_transfer.transport import PoolMemory
from splitserve.config import EngineConfig
from splitserve.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEFAULT_CPU_BYTES = 1 << 30
CUDA_FREE_SHARE = 0.8


class BlockMemory:
    """Blocks of a layout, one behind the other, zero at first: `bytes`, uint8 `[num_blocks, block_bytes]`.

    It never moves: transports register its address once. On cpu it is an anonymous mapping, so it begins on
    a page; all of its memory is taken at once. Behind it, in the same memory, lie probe blocks.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device
        self._probe_blocks = probe_blocks(layout.block_bytes)
        total = num_blocks + self._probe_blocks
        if device.type == "cpu":
            memory = torch.frombuffer(host_pages(total * layout.block_bytes), dtype=torch.uint8)
        else:
            _refuse_expandable_segments()
            memory = torch.zeros(total * layout.block_bytes, dtype=torch.uint8, device=device)
        blocks = memory.view(total, layout.block_bytes)
        # Untouched pages would all be read from one page of zeros, faster than memory is.
        blocks[num_blocks:].fill_(1)
        self.bytes = blocks[:num_blocks]

    def memory(self) -> PoolMemory:
        """All blocks as one range, for registration with a transport."""
        on_cpu = self.device.type == "cpu"
        return PoolMemory(
            base_address=self.bytes.data_ptr(),
            num_blocks=self.num_blocks + self._probe_blocks,
            layout=self.layout,
            memory_kind="DRAM" if on_cpu else "VRAM",
            device_index=0 if on_cpu else (self.device.index or 0),
            probe_blocks=self._probe_blocks,
        )

    def read_blocks(self, block_ids: Sequence[int]) -> list[memoryview]:
        """The bytes of each block, uint8; on cpu the blocks' own memory, else a copy."""
        if self.device.type == "cpu":
            return [memoryview(self.bytes[block].numpy()) for block in block_ids]
        copied = self.bytes[list(block_ids)].cpu().numpy()
        return [memoryview(row) for row in copied]


class KvPool(BlockMemory):
    """One tensor `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`."""

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        super().__init__(layout, num_blocks, device)
        heads = (layout.num_layers, 2, layout.num_kv_heads)
        shape = (num_blocks, *heads, layout.block_size_tokens, layout.head_dim)
        self.tensor = self.bytes.view(DTYPES[layout.dtype]).view(shape)

    def view(self, layer: int) -> torch.Tensor:
        """One layer's KV, `[2, num_kv_heads, num_blocks, block_size, head_dim]`, strided, no copy."""
        return self.tensor[:, layer].permute(1, 2, 0, 3, 4)


def choose_num_blocks(
    config: EngineConfig, layout: KvLayout, device: torch.device, extra_bytes: int = 0
) -> int:
    """How many blocks the settings ask for; call after the weights are loaded (cuda: what is free then).

    Each takes `extra_bytes` more of the memory beside the pool. Raises ConfigError when they are fewer than two.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    budget = config.kv_memory_bytes
    if budget is None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        budget = int(free * CUDA_FREE_SHARE)
    budget = DEFAULT_CPU_BYTES if budget is None else budget
    size = layout.block_bytes + extra_bytes
    blocks = budget // size
    if blocks < 2:
        message = (
            f"engine.kv_memory_bytes: {budget} bytes hold {blocks} KV blocks of {size} bytes;"
            " at least 2 are needed"
        )
        raise ConfigError(message, field="engine.kv_memory_bytes")
    return int(blocks)


def _refuse_expandable_segments() -> None:
    # UCX cannot map such memory between processes and falls back to copies through the host, far below
    # the lane's speed (ai-dynamo/nixl#1754).
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").replace(" ", "").lower():
            message = (
                f"{name} must not enable expandable_segments: KV cannot be transferred at speed from there"
            )
            raise ConfigError(message, field=name)
