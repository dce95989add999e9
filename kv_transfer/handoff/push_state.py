"""State of one push and its terminal events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_transfer.block_sizes import BlockSizes
from kv_transfer.handoff.ticket import KvTicket
from splitserve.errors import SplitserveError


@dataclass(frozen=True, slots=True)
class PushDone:
    """All bytes and the completion are delivered.

    `transfer_s` is the time in seconds from the last chunk's progress report to the last write's acknowledgement.
    """

    request_id: str
    written_bytes: int
    descriptors: int
    contiguous_runs: int
    """Contiguous runs of the whole handoff; fewer than `descriptors` where a chunk boundary splits a run."""
    transfer_s: float


@dataclass(frozen=True, slots=True)
class PushFailed:
    """The handoff failed. The decode worker has been notified if it is reachable and no write is in doubt."""

    request_id: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PushDrained:
    """An aborted handoff posts nothing more; all its writes were reported."""

    request_id: str


PushEvent = PushDone | PushFailed | PushDrained


@dataclass(slots=True)
class BlockWrite:
    """When one write was posted and when it was seen to have ended, in seconds; 0: it has not."""

    began_s: float
    blocks: int
    """Blocks of the smaller of the two sizes."""
    descriptors: int
    ended_s: float = 0.0


@dataclass(slots=True)
class Push:
    """One handoff from its ticket to its terminal event. Used by the pusher only."""

    request_id: str
    ticket: KvTicket
    sizes: BlockSizes
    targets: Sequence[int]
    """The owner's sub-blocks under the ticket."""
    block_table: Sequence[int] = ()
    """Local sub-blocks, paired by position with `targets`; grows with each chunk."""
    ready_blocks: int = 0
    """Leading sub-blocks of `block_table` whose KV is final."""
    posted_blocks: int = 0
    """Leading sub-blocks of `block_table` whose writes were posted."""
    digests: list[int] = field(default_factory=list)
    """Checksums of the verified sub-blocks that are final."""
    descriptors: int = 0
    writes: set[int] = field(default_factory=set)
    """Handles of the writes in flight."""
    first_token: int | None = None
    last_chunk_s: float | None = None
    """When the last chunk was reported; None until then."""
    completing: bool = False
    """The completion was posted."""
    aborted: bool = False
    failure: SplitserveError | None = None
    peer_order: str = ""
    """The owner's `axis_order` where it is not the writer's."""
    observed: dict[int, BlockWrite] | None = None
    """All its writes by handle, for whom it may concern; None: for nobody."""
    in_doubt: bool = False
    """A write of it failed, and bytes of it may still arrive: its owner must not be told otherwise."""

    @property
    def stopped(self) -> bool:
        """Whether no further write may be posted."""
        return self.aborted or self.failure is not None

    @property
    def idle(self) -> bool:
        """Whether it waits for the next chunk or its deadline, so that polling it has no effect."""
        awaits_chunk = self.last_chunk_s is None and self.posted_blocks == self.ready_blocks
        return awaits_chunk and not self.writes and not self.stopped
