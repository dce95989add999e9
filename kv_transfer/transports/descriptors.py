"""Checks that every transport makes before it accesses a peer's memory, and merging of block runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kv_transfer.layout import SAME
from kv_transfer.transports.transport import KvMemoryRegion, TransferEndpoint
from splitserve.errors import FailedPreconditionError, InvalidArgumentError, TransferError

P = TypeVar("P")

MAX_METADATA_BYTES = 2**20
MEMORY_KINDS = ("DRAM", "VRAM")
_MAX_BLOCKS = 2**31 - 1
MAX_PARTS = 2**20
"""Pieces that a block is divided into for a peer of another block size: one a sub-block, layer, head, key and value."""


def registered(endpoint: TransferEndpoint | None) -> TransferEndpoint:
    """The endpoint of the registered memory. Raises FailedPreconditionError where there is none."""
    if endpoint is None:
        raise FailedPreconditionError("no memory is registered")
    return endpoint


def connected_peer(peers: Mapping[str, P], agent_id: str) -> P:
    """What is known of a connected peer. Raises TransferError (UNKNOWN_PEER) for any other agent."""
    try:
        return peers[agent_id]
    except KeyError:
        raise unknown_peer(agent_id) from None


def unknown_peer(agent_id: str) -> TransferError:
    """The error of a write or notification to an agent that is not connected (UNKNOWN_PEER)."""
    return TransferError(f"agent {agent_id} is not connected", reason="UNKNOWN_PEER")


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
    row = memory.num_blocks * memory.stride
    if memory.layer_stride and (
        memory.layer_stride < row or memory.layout.block_bytes % memory.layout.num_layers
    ):
        raise InvalidArgumentError(
            f"layer_stride must be 0, or at least {row} with layers of equal size", field="layer_stride"
        )
    if memory.memory_kind not in MEMORY_KINDS:
        raise InvalidArgumentError(f"memory_kind must be one of {MEMORY_KINDS}", field="memory_kind")


def check_endpoint(mine: TransferEndpoint, theirs: TransferEndpoint) -> None:
    """Refuses a peer that this side must not write to.

    Raises FailedPreconditionError for a different transport or layout (naming the field) and
    InvalidArgumentError for values that no correct peer sends.
    """
    check_agent(mine, theirs)
    mine.memory.layout.require_fits(theirs.memory.layout, who=f"agent {theirs.agent_id}")
    if theirs.ranks or theirs.memory.layout.tensor_parallel_size != 1:
        raise FailedPreconditionError(
            f"the KV of agent {theirs.agent_id} lies in several ranks, here in one piece",
            reason="LAYOUT_MISMATCH",
            field="ranks",
        )
    sides = mine.memory, theirs.memory
    whole = [side for side in sides if not side.layer_stride]
    # Blocks can be seen layer by layer unless they hold scales ahead of all layers, or are parts of blocks.
    if len(whole) == 1 and (whole[0].piece_stride or whole[0].layout.wire_dtype != SAME):
        raise FailedPreconditionError(
            f"blocks of agent {theirs.agent_id} are not divided into layers as those here are",
            reason="LAYOUT_MISMATCH",
            field="layer_stride",
        )
    check_memory(theirs.memory)


def check_whole_blocks(mine: TransferEndpoint, theirs: TransferEndpoint) -> None:
    """For transports that write whole blocks only. Raises FailedPreconditionError (LAYOUT_MISMATCH)."""
    if theirs.memory.layer_stride:
        raise FailedPreconditionError(
            f"transport {mine.transport} writes whole blocks only: those of agent {theirs.agent_id} lie layer by "
            "layer; use nixl",
            reason="LAYOUT_MISMATCH",
            field="layer_stride",
        )
    here, there = mine.memory.layout.block_size_tokens, theirs.memory.layout.block_size_tokens
    if here != there:
        raise FailedPreconditionError(
            f"transport {mine.transport} writes whole blocks only: block_size_tokens is {here} here and {there} at "
            f"agent {theirs.agent_id}; use nixl",
            reason="LAYOUT_MISMATCH",
            field="block_size_tokens",
        )


def check_agent(mine: TransferEndpoint, theirs: TransferEndpoint) -> None:
    """Refuses an agent that this side must not talk to, whatever its memory. Raises like `check_endpoint`."""
    if theirs.transport != mine.transport:
        raise FailedPreconditionError(
            f"agent {theirs.agent_id} uses transport {theirs.transport!r}, this side {mine.transport!r}",
            reason="TRANSPORT_MISMATCH",
            field="transport",
        )
    if not theirs.agent_id or theirs.agent_id == mine.agent_id:
        raise InvalidArgumentError("agent_id must name another agent", field="agent_id")
    if len(theirs.metadata) > MAX_METADATA_BYTES:
        raise InvalidArgumentError(f"metadata must be at most {MAX_METADATA_BYTES} bytes", field="metadata")


def in_common(mine: KvMemoryRegion, theirs: KvMemoryRegion) -> tuple[KvMemoryRegion, KvMemoryRegion]:
    """Two regions whose layouts fit, in sub-blocks of the smaller block size; as they are where the sizes are equal.

    Where one has its blocks layer by layer, the other is seen so as well: a block is then a descriptor a layer.
    Raises FailedPreconditionError (LAYOUT_MISMATCH) where a block has more than MAX_PARTS parts then, or all blocks
    more than can be numbered.
    """
    if mine.layer_stride or theirs.layer_stride:
        mine, theirs = mine.by_layers(), theirs.by_layers()
    sizes = mine.layout.block_size_tokens, theirs.layout.block_size_tokens
    if sizes[0] == sizes[1]:
        return mine, theirs
    tokens = min(sizes)
    sides = mine.divided(tokens), theirs.divided(tokens)
    for side in sides:
        parts = side.layout.block_bytes // side.piece_bytes
        if parts > MAX_PARTS or parts * side.num_blocks > _MAX_BLOCKS:
            raise FailedPreconditionError(
                f"block_size_tokens is {sizes[0]} here and {sizes[1]} there: a block has {parts} parts of {tokens} "
                f"tokens, at most {min(MAX_PARTS, _MAX_BLOCKS // side.num_blocks)} are written",
                reason="LAYOUT_MISMATCH",
                field="block_size_tokens",
            )
    return sides


def pieces_touch(mine: KvMemoryRegion, theirs: KvMemoryRegion) -> bool:
    """Whether neighbouring blocks are contiguous on both sides."""
    return mine.stride == mine.piece_bytes and theirs.stride == theirs.piece_bytes


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


def check_notification(notification: bytes | None) -> None:
    """Raises InvalidArgumentError for an empty notification, which NIXL silently drops."""
    if notification is not None and not notification:
        raise InvalidArgumentError("a notification must not be empty", field="notification")


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


def count_descriptors(
    local_blocks: Sequence[int], remote_blocks: Sequence[int], rows: int, *, touching: bool
) -> int:
    """Descriptors of a write of `rows` rows: one a run and row, or one a block and row unless blocks are `touching`."""
    return rows * (len(merge_runs(local_blocks, remote_blocks)) if touching else len(local_blocks))
