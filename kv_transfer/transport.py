"""The transport interface: who may touch which memory when.

Rules that every transport keeps, and that the contract suite checks:

* The local pool is registered once, before the first endpoint is handed out, and lives until `close`.
* From `write` until `poll` reports its handle, the local source blocks must not change and the remote
  blocks belong to this writer. A write in flight cannot be cancelled (NIXL has no such operation).
* A notification given to `write` is delivered to the peer only after all bytes of *that* write can be
  read there. Writes are not ordered among each other: whoever wants "all chunks, then tell" posts the
  last write with its notification after the earlier handles were reported done.
* All methods are called from one thread, the one that made the transport. None of them blocks on a peer
  for longer than a connection's set-up.
* A peer is an agent id, a new one each boot. `disconnect` fences it: afterwards nothing of it is
  delivered and its handles have been reported as failed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_transfer.layout import KvLayout
from splitserve.v1 import kv_transfer_pb2 as pb


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """A worker's KV pool as one registered range of memory.

    `base_address` is in bytes in this process's (or device's) address space; `memory_kind` is "DRAM"
    or "VRAM"; `device_index` is 0 for DRAM. The last `probe_blocks` of the `num_blocks` are never a request's:
    peers write there to measure the lane.
    """

    base_address: int
    num_blocks: int
    layout: KvLayout
    memory_kind: str = "DRAM"
    device_index: int = 0
    probe_blocks: int = 0

    @property
    def request_blocks(self) -> int:
        """Blocks that requests may own, from index 0 on."""
        return self.num_blocks - self.probe_blocks


@dataclass(frozen=True, slots=True)
class TransferEndpoint:
    """Where a pool can be reached; see `TransferEndpoint` in the protos."""

    agent_id: str
    transport: str
    metadata: bytes
    pool: PoolMemory
    host_id: str = ""

    def to_proto(self) -> pb.TransferEndpoint:
        """The wire form."""
        return pb.TransferEndpoint(
            agent_id=self.agent_id,
            transport=self.transport,
            metadata=self.metadata,
            base_address=self.pool.base_address,
            block_bytes=self.pool.layout.block_bytes,
            num_blocks=self.pool.num_blocks,
            memory_kind=self.pool.memory_kind,
            device_index=self.pool.device_index,
            layout=self.pool.layout.to_proto(),
            probe_blocks=self.pool.probe_blocks,
            host_id=self.host_id,
        )

    @classmethod
    def from_proto(cls, message: pb.TransferEndpoint) -> TransferEndpoint:
        """The inverse of `to_proto`."""
        pool = PoolMemory(
            base_address=message.base_address,
            num_blocks=message.num_blocks,
            layout=KvLayout.from_proto(message.layout),
            memory_kind=message.memory_kind,
            device_index=message.device_index,
            probe_blocks=message.probe_blocks,
        )
        return cls(message.agent_id, message.transport, message.metadata, pool, message.host_id)


@dataclass(frozen=True, slots=True)
class WriteResult:
    """A write that is over. `error` is None when every byte has been delivered."""

    handle: int
    error: str | None = None


@dataclass(slots=True)
class PollResult:
    """What has happened since the last poll, in order of arrival."""

    writes: list[WriteResult] = field(default_factory=list)
    notifications: list[tuple[str, bytes]] = field(default_factory=list)
    """(agent id of the sender, message) pairs."""


class Transport(ABC):
    """Moves KV blocks between pools. See the module's text for the rules."""

    kind: str
    """Name used in configuration and in `TransferEndpoint.transport`."""

    @abstractmethod
    def register_pool(self, pool: PoolMemory) -> TransferEndpoint:
        """Registers the local pool (once) and returns the endpoint that peers connect to."""

    @abstractmethod
    def connect(self, endpoint: TransferEndpoint) -> None:
        """Makes a peer's pool writable. Idempotent for the same agent id.

        Raises FailedPreconditionError for another transport or an unequal layout, TransferError when the
        peer cannot be reached.
        """

    @abstractmethod
    def disconnect(self, agent_id: str) -> None:
        """Fences a peer. Unknown ids are ignored."""

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

        Both sequences are pool indices of equal length >= 1. Raises InvalidArgumentError for indices
        outside the pools, TransferError for an unknown peer or a failed post.
        """

    @abstractmethod
    def notify(self, agent_id: str, notification: bytes) -> None:
        """Sends a notification without bytes. Raises TransferError for an unknown peer."""

    @abstractmethod
    def poll(self) -> PollResult:
        """Collects finished writes and arrived notifications. Never blocks."""

    @abstractmethod
    def close(self) -> None:
        """Releases handles, registrations and peers. Idempotent."""

    @property
    @abstractmethod
    def descriptors_posted(self) -> int:
        """Write descriptors posted since the start, after merging runs that are contiguous on both sides."""

    @property
    def needs_poll(self) -> bool:
        """Whether something is on its way that needs polls though no write is open, as a late notification."""
        return False
