"""The transport interface, and its rules of memory ownership.

Rules that every transport keeps and that the contract suite (tests/contract/transports) checks:

* The local memory is registered once, before its endpoint is handed out, and stays valid until `close`.
* From `write` until `poll` reports its handle, the local source blocks must not change and the remote
  blocks belong to this writer. A write in flight cannot be cancelled (NIXL has no such operation).
* A write that ended with an error is in doubt unless the transport knows that none of its bytes can arrive
  any more: of several descriptors some may be on their way. Nothing may be concluded from the end of such a
  write; docs/handoff.md says which lanes can prove what.
* The notification of a `write` is delivered only after all bytes of *that* write are readable at the peer.
  Writes are not ordered among each other: to notify after several writes, post the last one with its
  notification once the handles of all earlier ones were reported done.
* All methods are called from one thread, the one that created the transport. None blocks on a peer for
  longer than connection setup.
* A peer is identified by its agent id, which is new on each boot. The two directions end apart: `disconnect` ends
  this side's writes to it, and their handles are reported as failed, while what it sends still arrives; `refuse`
  fences it: afterwards no notification of it is delivered, while writes to it go on. `connect` undoes both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kv_transfer.layout import KvLayout
from splitserve.errors import FailedPreconditionError
from splitserve.v1 import kv_transfer_pb2 as pb

DRAM, VRAM = "DRAM", "VRAM"


@dataclass(frozen=True, slots=True)
class KvMemoryRegion:
    """One registered range of memory that holds a worker's KV blocks.

    A block is one contiguous piece with all its layers, or, with `layer_stride`, one piece for each layer of the
    layout: the pieces of one layer lie behind each other in a row of `num_blocks`, and row l begins at
    `base_address + l * layer_stride`, in bytes.

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
    layer_stride: int = 0
    piece_stride: int = 0
    """Bytes between the starts of two pieces of a row. 0: they touch."""
    sub_block_tokens: int = 0
    """Tokens in a sub-block, which peers with smaller blocks write or are written. 0: blocks are not divided."""

    @property
    def rows(self) -> tuple[int, ...]:
        """The addresses of the rows of pieces: one row of whole blocks, or one for each layer.

        In a divided region each is as many rows as a piece has keys or values of a head, times `divisions`: first those
        of one head's keys.
        """
        count = self.layout.num_layers if self.layer_stride else 1
        rows = tuple(self.base_address + row * self.layer_stride for row in range(count))
        if not self.sub_block_tokens:
            return rows
        offsets = range(0, self.layout.block_bytes // count, self.piece_bytes)
        return tuple(row + offset for row in rows for offset in offsets)

    @property
    def piece_bytes(self) -> int:
        """Bytes of a block, or of a sub-block, in one row."""
        if self.sub_block_tokens:
            return self.sub_block_tokens * self.layout.token_bytes
        return self.layout.block_bytes // (self.layout.num_layers if self.layer_stride else 1)

    @property
    def divisions(self) -> int:
        """Sub-blocks of a block: sub-block s is number s % divisions of those in block s // divisions."""
        return self.layout.block_size_tokens // self.sub_block_tokens if self.sub_block_tokens else 1

    @property
    def num_sub_blocks(self) -> int:
        """Sub-blocks of the region; blocks where they are not divided."""
        return self.num_blocks * self.divisions

    def divided(self, tokens: int) -> KvMemoryRegion:
        """The same memory in sub-blocks of `tokens`, which divides the block size; see `KvLayout.require_fits`."""
        return replace(self, piece_stride=self.stride, sub_block_tokens=tokens)

    def by_layers(self) -> KvMemoryRegion:
        """The same memory as rows of layers' pieces, as they lie in whole blocks; itself where it has such rows."""
        if self.layer_stride:
            return self
        piece = self.layout.block_bytes // self.layout.num_layers
        return replace(self, layer_stride=piece, piece_stride=self.layout.block_bytes)

    @property
    def stride(self) -> int:
        """Bytes between the starts of two pieces of a row."""
        return self.piece_stride or self.piece_bytes

    @property
    def span_bytes(self) -> int:
        """Bytes from `base_address` to the end of the last row."""
        return self.rows[-1] - self.base_address + (self.num_blocks - 1) * self.stride + self.piece_bytes

    def heads(self, first: int, count: int) -> KvMemoryRegion:
        """The part that holds `count` KV heads of each piece from `first` on. Heads must be outermost in a piece."""
        head_bytes = self.piece_bytes // self.layout.num_kv_heads
        return replace(
            self,
            base_address=self.base_address + first * head_bytes,
            layout=replace(self.layout, num_kv_heads=count),
            piece_stride=self.stride,
        )

    @property
    def request_blocks(self) -> int:
        """Blocks that requests may own, from index 0 on."""
        return self.num_blocks - self.probe_blocks


@dataclass(frozen=True, slots=True)
class TransferEndpoint:
    """How peers reach a worker's memory; see `TransferEndpoint` in the protos."""

    agent_id: str
    transport: str
    metadata: bytes
    memory: KvMemoryRegion
    """The whole pool. With `ranks` it has no address."""
    host_id: str = ""
    ranks: tuple[TransferEndpoint, ...] = ()
    """The parts of a pool that several tensor-parallel ranks hold, in order of rank. Each is its rank's alone."""

    def to_proto(self) -> pb.TransferEndpoint:
        """The wire form."""
        return pb.TransferEndpoint(
            agent_id=self.agent_id,
            transport=self.transport,
            metadata=self.metadata,
            base_address=self.memory.base_address,
            block_bytes=self.memory.layout.block_bytes,
            num_blocks=self.memory.num_blocks,
            memory_kind=self.memory.memory_kind,
            device_index=self.memory.device_index,
            layout=self.memory.layout.to_proto(),
            probe_blocks=self.memory.probe_blocks,
            host_id=self.host_id,
            layer_stride=self.memory.layer_stride,
            ranks=[rank.to_rank_proto() for rank in self.ranks],
        )

    def to_rank_proto(self) -> pb.RankEndpoint:
        """The wire form of one of the `ranks` of an endpoint."""
        return pb.RankEndpoint(
            agent_id=self.agent_id,
            metadata=self.metadata,
            base_address=self.memory.base_address,
            layer_stride=self.memory.layer_stride,
            device_index=self.memory.device_index,
        )

    @classmethod
    def from_proto(cls, message: pb.TransferEndpoint) -> TransferEndpoint:
        """The inverse of `to_proto`."""
        memory = KvMemoryRegion(
            base_address=message.base_address,
            num_blocks=message.num_blocks,
            layout=KvLayout.from_proto(message.layout),
            memory_kind=message.memory_kind,
            device_index=message.device_index,
            probe_blocks=message.probe_blocks,
            layer_stride=message.layer_stride,
        )
        ranks = tuple(
            cls(
                rank.agent_id,
                message.transport,
                rank.metadata,
                replace(
                    memory,
                    layout=memory.layout.rank,
                    base_address=rank.base_address,
                    layer_stride=rank.layer_stride,
                    device_index=rank.device_index,
                ),
                message.host_id,
            )
            for rank in message.ranks
        )
        return cls(message.agent_id, message.transport, message.metadata, memory, message.host_id, ranks)


@dataclass(frozen=True, slots=True)
class WriteResult:
    """A write that has ended. `error` is None if all bytes were delivered.

    `in_doubt`: it failed, and bytes of it may still arrive.
    """

    handle: int
    error: str | None = None
    in_doubt: bool = False


@dataclass(slots=True)
class PollResult:
    """Writes that ended and notifications that arrived since the last poll, each in order."""

    writes: list[WriteResult] = field(default_factory=list)
    notifications: list[tuple[str, bytes]] = field(default_factory=list)
    """(agent id of the sender, message) pairs."""


class Transport(ABC):
    """Moves KV blocks between workers' memories. The module docstring has the rules."""

    kind: str
    """Name in the configuration and in `TransferEndpoint.transport`."""

    @abstractmethod
    def register_memory(self, memory: KvMemoryRegion) -> TransferEndpoint:
        """Registers the local memory and returns the endpoint for peers. Call it once."""

    @abstractmethod
    def connect(self, endpoint: TransferEndpoint) -> None:
        """Makes a peer's memory writable, and takes what it sends. Idempotent for the same agent id.

        Raises FailedPreconditionError for a different transport or layout, TransferError if the peer cannot be
        reached.
        """

    def connect_part(self, endpoint: TransferEndpoint, own: KvMemoryRegion | None) -> None:
        """Makes a peer's memory writable from `own` alone, a part of the registered memory with the same blocks.

        `endpoint.memory` is a part of the same shape of the peer's. None: the peer takes notifications only. Otherwise
        as `connect`. Raises FailedPreconditionError where the transport writes whole blocks only.
        """
        raise FailedPreconditionError(f"transport {self.kind} writes whole blocks only", field="ranks")

    @abstractmethod
    def disconnect(self, agent_id: str) -> None:
        """Ends this side's writes to a peer, and posts no more. Unknown ids are ignored."""

    @abstractmethod
    def refuse(self, agent_id: str) -> None:
        """Fences a peer: delivers nothing of it any more, not even what has arrived and was not polled. Its bytes are
        refused, too, where the owner takes part in a write; one-sided writes cannot be (see docs/handoff.md). Ids that
        are not known yet count."""

    @abstractmethod
    def connected(self) -> frozenset[str]:
        """Agent ids that `write` and `notify` accept."""

    @abstractmethod
    def write(
        self,
        agent_id: str,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
        notification: bytes | None = None,
    ) -> int:
        """Posts a write of local blocks into a peer's blocks, pairwise; returns a handle for `poll`.

        Both sequences are block indices and have equal length >= 1; for a peer of another block size they are indices
        of sub-blocks, which have the smaller size. Raises InvalidArgumentError for indices out of range, TransferError
        for an unknown peer; nothing was posted then. A post that fails is reported by `poll`, in doubt.
        """

    @abstractmethod
    def notify(self, agent_id: str, notification: bytes) -> None:
        """Sends a notification without a write. Raises TransferError for an unknown peer."""

    @abstractmethod
    def poll(self) -> PollResult:
        """Collects finished writes and arrived notifications. Never blocks."""

    @abstractmethod
    def close(self) -> None:
        """Releases handles, registrations and peers. Idempotent."""

    @property
    @abstractmethod
    def descriptors_posted(self) -> int:
        """Number of write descriptors posted so far, after merging runs that are contiguous on both sides."""

    @property
    def needs_poll(self) -> bool:
        """Whether polls are needed although no write is in flight, for example for a delayed notification."""
        return False
