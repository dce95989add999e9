"""Registered memory of KV blocks, as each transport addresses it: blocks, and runs of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.layout import KvLayout
from splitserve.errors import InvalidArgumentError

DRAM, VRAM = "DRAM", "VRAM"
MEMORY_KINDS = (DRAM, VRAM)
_MAX_BLOCKS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class KvMemoryRegion:
    """One registered range of memory that holds a worker's KV blocks.

    A block is one contiguous piece with all its layers, and block b begins at `base_address + b * block_bytes`.

    `base_address` is a byte address in this process's (or device's) address space; `memory_kind` is "DRAM" or
    "VRAM"; `device_index` is 0 for DRAM. The last `probe_blocks` of the `num_blocks` are never given to requests:
    peers write to them to measure lanes.
    """

    base_address: int
    num_blocks: int
    layout: KvLayout
    memory_kind: str = DRAM
    device_index: int = 0
    probe_blocks: int = 0

    @property
    def request_blocks(self) -> int:
        """Blocks that requests may own, from index 0 on."""
        return self.num_blocks - self.probe_blocks


def check_memory(memory: KvMemoryRegion) -> None:
    """Raises InvalidArgumentError naming the first field that no transport supports."""
    if memory.base_address <= 0:
        raise InvalidArgumentError("base_address must not be 0", field="base_address")
    if not 1 <= memory.num_blocks <= _MAX_BLOCKS:
        raise InvalidArgumentError(f"num_blocks must be 1..{_MAX_BLOCKS}", field="num_blocks")
    if not 0 <= memory.probe_blocks < memory.num_blocks:
        raise InvalidArgumentError(
            "probe_blocks must be 0 or more and below num_blocks", field="probe_blocks"
        )
    if memory.memory_kind not in MEMORY_KINDS:
        raise InvalidArgumentError(f"memory_kind must be one of {MEMORY_KINDS}", field="memory_kind")


def check_blocks(local: Sequence[int], local_count: int, remote: Sequence[int], remote_count: int) -> None:
    """Raises InvalidArgumentError unless both have equal length >= 1 and all indices are in range."""
    if not local or len(local) != len(remote):
        raise InvalidArgumentError(
            f"a write takes as many local as remote blocks, at least one: {len(local)}, {len(remote)}",
            field="remote_blocks" if local else "local_blocks",
        )
    sides = (("local_blocks", local, local_count), ("remote_blocks", remote, remote_count))
    for name, blocks, count in sides:
        if min(blocks) < 0 or max(blocks) >= count:
            raise InvalidArgumentError(f"{name} must be 0..{count - 1}", field=name)


@dataclass(frozen=True, slots=True)
class Run:
    """`length` blocks that are contiguous on both sides, from index `local` here and `remote` there."""

    local: int
    remote: int
    length: int


def merge_runs(local_blocks: Sequence[int], remote_blocks: Sequence[int]) -> list[Run]:
    """Splits pairs of blocks into maximal runs that are contiguous on both sides, in order; one descriptor each.

    Raises ValueError if the sequences differ in length.
    """
    runs: list[Run] = []
    local_start = remote_start = length = 0
    for local, remote in zip(local_blocks, remote_blocks, strict=True):
        if length and local == local_start + length and remote == remote_start + length:
            length += 1
            continue
        if length:
            runs.append(Run(local_start, remote_start, length))
        local_start, remote_start, length = local, remote, 1
    if length:
        runs.append(Run(local_start, remote_start, length))
    return runs
