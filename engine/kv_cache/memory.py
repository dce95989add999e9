"""The memory of a worker's KV blocks, and how much memory this process may still take.

Formats of the kernel's figures: proc(5), and its document `admin-guide/cgroup-v2`.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from kv_transfer.lanes import probe_blocks
from kv_transfer.layout import KvLayout
from kv_transfer.transports.regions import KvMemoryRegion
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError
from splitserve.host_facts import number_in

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Types of weights and KV, by their names in settings."""
DEFAULT_BYTES = 1 << 30


class KvCacheMemory:
    """Contiguous blocks of a layout, initially zero: `bytes`, uint8 `[num_blocks, block_bytes]`.

    `tensor` is the same memory as the layout's dtype `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`.
    Its address never changes, since it is registered with transports. On cpu it is an anonymous mapping, page-aligned,
    whose pages the kernel allocates when they are first written. Blocks for lane probes follow in the same memory.
    Raises ConfigError for more memory than is free.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device
        self._probe_blocks = probe_blocks(layout.block_bytes)
        total = num_blocks + self._probe_blocks
        if device.type == "cpu":
            require_free_memory(total * layout.block_bytes)
            pages = mmap.mmap(-1, total * layout.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory = torch.frombuffer(pages, dtype=torch.uint8)
        else:
            _refuse_expandable_segments()
            memory = torch.zeros(total * layout.block_bytes, dtype=torch.uint8, device=device)
        blocks = memory.view(total, layout.block_bytes)
        self.bytes = blocks[:num_blocks]
        # Reads of pages never written all hit the kernel's one page of zeros, so probes would measure too fast a lane.
        blocks[num_blocks:].fill_(1)
        heads = (2, layout.num_kv_heads, layout.block_size_tokens)
        shape = (num_blocks, layout.num_layers, *heads, layout.head_dim)
        self.tensor = self.bytes.view(DTYPES[layout.dtype]).view(shape)

    def memory(self) -> KvMemoryRegion:
        """All blocks, probe blocks included, as one region to register with a transport."""
        on_cpu = self.device.type == "cpu"
        return KvMemoryRegion(
            base_address=self.bytes.data_ptr(),
            num_blocks=self.num_blocks + self._probe_blocks,
            layout=self.layout,
            memory_kind="DRAM" if on_cpu else "VRAM",
            device_index=0 if on_cpu else (self.device.index or 0),
            probe_blocks=self._probe_blocks,
        )

    def read_blocks(self, block_ids: Sequence[int]) -> list[memoryview]:
        """The bytes of each block, uint8 `[block_bytes]`; on cpu the blocks' own memory, else a copy."""
        if self.device.type == "cpu":
            return [memoryview(self.bytes[block].numpy()) for block in block_ids]
        copied = self.bytes[list(block_ids)].cpu().numpy()
        return [memoryview(row) for row in copied]

    def view(self, layer: int) -> torch.Tensor:
        """One layer's KV, `[2, num_kv_heads, num_blocks, block_size, head_dim]`, strided, no copy."""
        return self.tensor[:, layer].permute(1, 2, 0, 3, 4)


def choose_num_blocks(config: EngineConfig, layout: KvLayout) -> int:
    """The number of blocks by the settings. On cuda `engine.runner.memory_profile` has set one of them.

    Raises ConfigError if there would be fewer than two.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    budget = DEFAULT_BYTES if config.kv_memory_bytes is None else config.kv_memory_bytes
    size = layout.block_bytes
    blocks = budget // size
    if blocks < 2:
        message = (
            f"engine.kv_memory_bytes: {budget} bytes hold {blocks} KV blocks of {size} bytes;"
            " at least 2 are needed"
        )
        raise ConfigError(message, field="engine.kv_memory_bytes")
    return int(blocks)


def _refuse_expandable_segments() -> None:
    # UCX cannot map such memory between processes. It copies through the host, far below the lane's speed
    # (ai-dynamo/nixl#1754).
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").replace(" ", "").lower():
            message = (
                f"{name} must not enable expandable_segments: KV cannot be transferred at speed from there"
            )
            raise ConfigError(message, field=name)


_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_KIB = 1024


_CACHE = ("inactive_file", "active_file")
"""Lines of `memory.stat` that count page cache."""


def free_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Bytes that this process may still take: the minimum of the machine's free memory and of what each limit leaves.

    Page cache counts as free, since the kernel gives it up; swap does not. None if nothing is known.
    """
    machine = _line(proc / "meminfo", "MemAvailable:")
    known = [] if machine is None else [machine * _KIB]
    for folder in _groups(proc, cgroups):
        limit, used = number_in(folder / "memory.max"), number_in(folder / "memory.current")
        if limit is not None and used is not None:
            cache = sum(_line(folder / "memory.stat", name) or 0 for name in _CACHE)
            known.append(max(0, limit - used + cache))
    return min(known, default=None)


def require_free_memory(num_bytes: int) -> None:
    """Raises ConfigError unless `num_bytes` bytes are free.

    Memory is populated at its first use, so a lack of it would kill a worker that already serves. Workers that start at
    the same time on one host do not see each other's blocks.
    """
    free = free_memory()
    if free is not None and num_bytes > free:
        message = (
            f"engine.kv_memory_bytes: KV blocks take {num_bytes} bytes,"
            f" and {free} bytes of memory are free on this machine, or below the limit of this container; lower it, or"
            " engine.num_blocks"
        )
        raise ConfigError(message, field="engine.kv_memory_bytes")


def _groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """The folders of this process's control group and of all groups above it, up to the top of the mounted ones."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers:
            continue  # of version 1
        parts = Path(path.lstrip("/")).parts
        # A container may see its own group as the top, but the path as seen by the host.
        for depth in range(len(parts) + 1):
            yield cgroups.joinpath(*parts[:depth])


def _line(path: Path, name: str) -> int | None:
    """The number after `name` at the beginning of a line; None if there is none."""
    try:
        words = (line.split() for line in path.read_text().splitlines())
        return next((int(line[1]) for line in words if line[:1] == [name]), None)
    except (OSError, ValueError, IndexError):
        return None
