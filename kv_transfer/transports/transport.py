"""The transport interface, and its rules of memory ownership.

Rules that every transport keeps and that the contract suite (tests/contract/transports) checks:

* The local memory is registered once, before its endpoint is handed out, and stays valid until `close`.
* From `write` until `poll` reports its handle, the local source blocks must not change and the remote
  blocks belong to this writer. A write in flight cannot be cancelled (NIXL has no such operation).
* A write that ended with an error is in doubt unless the transport knows that none of its bytes can arrive
  any more: of several descriptors some may be on their way. Nothing may be concluded from the end of such a
  write; docs/internals/handoff.md says which lanes can prove what.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kv_transfer.layout import KvLayout
from kv_transfer.transports.regions import KvMemoryRegion, check_memory
from splitserve.errors import FailedPreconditionError, InvalidArgumentError, TransferError
from splitserve.v1 import kv_transfer_pb2 as pb

P = TypeVar("P")

MAX_METADATA_BYTES = 2**20
POLL_INTERVAL_S = 0.0002


@dataclass(frozen=True, slots=True)
class TransferEndpoint:
    """How peers reach a worker's memory; see `TransferEndpoint` in the protos."""

    agent_id: str
    transport: str
    metadata: bytes
    memory: KvMemoryRegion
    host_id: str = ""

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
        )
        return cls(message.agent_id, message.transport, message.metadata, memory, message.host_id)


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
    descriptors_posted = 0
    """Number of write descriptors posted so far, after merging runs that are contiguous on both sides."""

    @abstractmethod
    def register_memory(self, memory: KvMemoryRegion) -> TransferEndpoint:
        """Registers the local memory and returns the endpoint for peers. Call it once."""

    @abstractmethod
    def connect(self, endpoint: TransferEndpoint) -> None:
        """Makes a peer's memory writable, and takes what it sends. Idempotent for the same agent id.

        Raises FailedPreconditionError for a different transport or layout, TransferError if the peer cannot be
        reached.
        """

    @abstractmethod
    def disconnect(self, agent_id: str) -> None:
        """Ends this side's writes to a peer, and posts no more. Unknown ids are ignored."""

    @abstractmethod
    def refuse(self, agent_id: str) -> None:
        """Fences a peer, also an unknown one: its notifications are not delivered any more, even those already arrived.

        Its bytes are refused, too, if the owner takes part in a write. One-sided writes cannot be refused; see
        docs/internals/handoff.md.
        """

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
        group_blocks: Sequence[int] = (),
    ) -> int:
        """Posts a write of local blocks into a peer's blocks, pairwise; returns a handle for `poll`.

        Both sequences are block indices and have equal length >= 1. `group_blocks`: for an engine whose groups of
        layers have blocks of their own, the number of blocks of each group, one group after the other.

        Raises InvalidArgumentError for indices out of range, TransferError for an unknown peer; nothing was posted
        then. A post that fails is reported by `poll`, in doubt.
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
    def poll_interval_s(self) -> float:
        """Longest time in seconds between two polls while a write or a notification is awaited."""
        return POLL_INTERVAL_S

    @property
    def needs_poll(self) -> bool:
        """Whether polls are needed although no write is in flight, for example for a delayed notification."""
        return False


def registered(endpoint: TransferEndpoint | None) -> TransferEndpoint:
    """The endpoint of the registered memory. Raises FailedPreconditionError where there is none."""
    if endpoint is None:
        raise FailedPreconditionError("no memory is registered")
    return endpoint


def connected_peer(peers: Mapping[str, P], agent_id: str) -> P:
    """The record of a connected peer. Raises TransferError (UNKNOWN_PEER) for any other agent."""
    try:
        return peers[agent_id]
    except KeyError:
        raise unknown_peer(agent_id) from None


def unknown_peer(agent_id: str) -> TransferError:
    """The error of a write or notification to an agent that is not connected (UNKNOWN_PEER)."""
    return TransferError(f"agent {agent_id} is not connected", reason="UNKNOWN_PEER")


def check_endpoint(mine: TransferEndpoint, theirs: TransferEndpoint) -> None:
    """Refuses a peer that this side must not write to.

    Raises FailedPreconditionError for a different transport or layout (naming the field) and
    InvalidArgumentError for values that no correct peer sends.
    """
    check_agent(mine, theirs)
    mine.memory.layout.require_fits(theirs.memory.layout, who=f"agent {theirs.agent_id}")
    check_memory(theirs.memory)


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


def check_notification(notification: bytes | None) -> None:
    """Raises InvalidArgumentError for an empty notification, which NIXL silently drops."""
    if notification is not None and not notification:
        raise InvalidArgumentError("a notification must not be empty", field="notification")
