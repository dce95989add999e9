"""The memory of a worker's KV blocks."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch

from engine.kv_cache.free_memory import require_free_memory
from engine.kv_cache.storages import give_back
from kv_transfer.lane_probe import probe_blocks
from kv_transfer.layout import INT8, KvLayout
from kv_transfer.transports.transport import KvMemoryRegion
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Of weights, and of KV that is kept as it is computed."""
DEFAULT_BYTES = 1 << 30
PIECE_BYTES = 2**21
"""KV converted at a time, so that intermediate results stay in the caches."""


_advise = ctypes.CDLL(None).madvise
"""`madvise(2)`: without the interpreter's lock, which the one of `mmap` keeps."""
_advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class BlockMemory:
    """Contiguous blocks of a layout, initially zero: `bytes`, uint8 `[num_blocks, block_bytes]`.

    It stays where it is, since its address is registered with transports, until it is given up: on a device it may
    come back elsewhere. On cpu it is an anonymous mapping, page-aligned; see `populate`. Blocks for lane probes follow
    in the same memory. Raises ConfigError for more than is free there, with `beside_bytes` that are going to be taken
    for other things.
    """

    def __init__(
        self, layout: KvLayout, num_blocks: int, device: torch.device, beside_bytes: int = 0
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device
        self._probe_blocks = probe_blocks(layout.block_bytes)
        total = num_blocks + self._probe_blocks
        self._pages: mmap.mmap | None = None
        self._populated = 0
        if device.type == "cpu":
            require_free_memory(total * layout.block_bytes + beside_bytes)
            self._pages = _huge_pages(total * layout.block_bytes)
            memory = torch.frombuffer(self._pages, dtype=torch.uint8)
        else:
            _refuse_expandable_segments()
            memory = torch.zeros(total * layout.block_bytes, dtype=torch.uint8, device=device)
        self._storage = memory.untyped_storage()
        blocks = memory.view(total, layout.block_bytes)
        self.bytes, self._probes = blocks[:num_blocks], blocks[num_blocks:]
        self._fill_probes()

    def _fill_probes(self) -> None:
        # Reads of untouched pages would all hit the kernel's one page of zeros, and so measure too fast a lane.
        self._probes.fill_(1)

    def populate(self) -> bool:
        """On cpu: has the kernel allocate the next few pages, which may be in use already. Whether there were any left:
        call it again then. Some milliseconds."""
        if self._pages is None or self._populated >= len(self._pages):
            return False
        size = min(_PIECE, len(self._pages) - self._populated)
        refused = _advise(self.bytes.data_ptr() + self._populated, size, _MADV_POPULATE_WRITE)
        # An older kernel refuses: pages are taken as they are used.
        self._populated = len(self._pages) if refused else self._populated + size
        return not refused

    def give_up(self) -> None:
        """Gives all memory back: the content is lost. No transport may have it registered: where one has pinned pages,
        a device would write to those, and readers would see others. On cpu the kernel takes the pages, and the
        addresses stay taken; a device takes those as well, so nobody may have kept one, as a CUDA graph does."""
        if self._pages is None:
            give_back([self._storage])
            return
        self._populated = len(self._pages)
        self._pages.madvise(mmap.MADV_DONTNEED)

    def take_back(self) -> None:
        """Makes the blocks usable again after `give_up`, all zero, and to be populated. On cpu the caller has seen that
        `total_bytes` are free, with what else it takes back; a device that has less raises torch.OutOfMemoryError.
        Views of the blocks are valid again."""
        if self._pages is None:
            self._storage.resize_(self.total_bytes)
            self.bytes.zero_()
        self._fill_probes()
        self._populated = 0

    @property
    def total_bytes(self) -> int:
        """What it takes, probe blocks included."""
        return int(self._probes.numel() + self.bytes.numel())

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


class KvCacheMemory(BlockMemory):
    """`tensor`: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]` of the layout's dtype.

    `scales`: for int8, bfloat16 `[num_blocks, num_layers, 2, num_kv_heads, block_size]`, strided, in the same blocks;
    else None.
    """

    def __init__(
        self, layout: KvLayout, num_blocks: int, device: torch.device, beside_bytes: int = 0
    ) -> None:
        super().__init__(layout, num_blocks, device, beside_bytes)
        heads = (2, layout.num_kv_heads, layout.block_size_tokens)
        self.scales: torch.Tensor | None = None
        if layout.dtype == INT8:
            pieces = self.bytes.view(num_blocks, layout.num_layers, -1)
            codes = layout.block_vectors // layout.num_layers * layout.head_dim
            self.tensor = pieces[..., :codes].view(torch.int8).unflatten(2, (*heads, layout.head_dim))
            self.scales = pieces[..., codes:].view(torch.bfloat16).unflatten(2, heads)
            return
        shape = (num_blocks, layout.num_layers, *heads, layout.head_dim)
        self.tensor = self.bytes.view(DTYPES[layout.dtype]).view(shape)

    def view(self, layer: int) -> torch.Tensor:
        """One layer's KV, `[2, num_kv_heads, num_blocks, block_size, head_dim]`, strided, no copy."""
        return self.tensor[:, layer].permute(1, 2, 0, 3, 4)

    def scales_view(self, layer: int) -> torch.Tensor | None:
        """One layer's scales, `[2, num_kv_heads, num_blocks, block_size]`, strided, no copy; None without scales."""
        return None if self.scales is None else self.scales[:, layer].permute(1, 2, 0, 3)


def block_pieces(
    block_ids: Sequence[int], at_once: int, device: torch.device
) -> Iterator[slice | torch.Tensor]:
    """Indices of at most `at_once` of the blocks at a time; consecutive ones as a slice, which needs no copy."""
    for begin in range(0, len(block_ids), at_once):
        piece = block_ids[begin : begin + at_once]
        first, last = piece[0], piece[-1]
        if list(piece) == list(range(first, last + 1)):
            yield slice(first, last + 1)
        else:
            yield torch.tensor(piece, device=device)


def finish_writes(device: torch.device) -> None:
    """Waits for what was written to blocks: peers and transports access them outside the device's stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def choose_num_blocks(config: EngineConfig, layout: KvLayout, extra_bytes: int = 0) -> int:
    """The number of blocks by the settings; on cuda one of them is set, see `engine.runner.memory_profile`.

    Each block takes `extra_bytes` beside its own memory. Raises ConfigError if there would be fewer than two.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    budget = config.kv_memory_bytes
    budget = DEFAULT_BYTES if budget is None else budget
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
    # UCX cannot map such memory between processes and falls back to copies through the host, far below the lane's speed
    # (ai-dynamo/nixl#1754).
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").replace(" ", "").lower():
            message = (
                f"{name} must not enable expandable_segments: KV cannot be transferred at speed from there"
            )
            raise ConfigError(message, field=name)


_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
"""Since Linux 5.14. The mmap module has no name for it, and defines the other one on Linux only."""


_PIECE = 2 << 20
"""Bytes that are populated at a time. Other threads cannot map memory meanwhile."""


def host_pages(num_bytes: int) -> mmap.mmap:
    """Zeroed memory, in huge pages where available, populated at once.

    A write into a peer's untouched pages waits until the kernel has allocated and cleared them (12 MB: 66 ms on a
    virtual machine). Pinning small pages costs more than copying them (3.6 against 12 GB/s), and weights are read 5%
    faster from huge ones.
    """
    pages = _huge_pages(num_bytes)
    with suppress(OSError):  # an older kernel
        pages.madvise(_MADV_POPULATE_WRITE)
    return pages


def _huge_pages(num_bytes: int) -> mmap.mmap:
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # an older kernel, or one without huge pages: slower, not wrong
        pages.madvise(_MADV_HUGEPAGE)
    return pages
