"""A transport of a worker whose KV, or whose peers' KV, lies in several tensor-parallel ranks.

`shard_map` says which rank writes which KV heads to which rank of a peer. All ranks of a worker have the
same blocks, so a ticket's indices are common to them, and tickets, reservations and pushes know nothing of ranks. Each
pair of ranks writes its heads. Only when the parts of all pairs were reported done, which proves that they have
arrived, does the worker's own agent send the notification.
docs/internals/design-notes/ranks-below-the-transport.md has the
reasons.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from kv_transfer.layout import MAX_RANKS, KvLayout, Shard, shard_map
from kv_transfer.transports.regions import KvMemoryRegion
from kv_transfer.transports.transport import (
    PollResult,
    TransferEndpoint,
    Transport,
    WriteResult,
    check_agent,
    check_notification,
    registered,
)
from splitserve.errors import FailedPreconditionError, InvalidArgumentError, TransferError


@dataclass(slots=True)
class JoinedWrite:
    """One write, of which each pair of a writing and a receiving rank does a part."""

    handle: int
    agent_id: str
    notification: bytes | None
    """What the peer is told when all parts have ended well."""
    parts: set[tuple[int, int]]
    """The (rank, its handle) of parts that have not ended."""
    error: str | None = None
    in_doubt: bool = False

    @property
    def result(self) -> WriteResult:
        """How it ended, once no part is left."""
        return WriteResult(self.handle, self.error, self.in_doubt)


class JoinedWrites:
    """The joined writes of one worker that have not ended. Their handles are negative: no transport's own are."""

    def __init__(self) -> None:
        self._write_of_part: dict[tuple[int, int], JoinedWrite] = {}
        self._last_handle = 0

    def begin(
        self, agent_id: str, parts: Iterable[tuple[int, int]], notification: bytes | None, error: str | None
    ) -> int:
        """Joins posted parts, at least one, each a (rank, its handle); returns the handle of the whole.

        `error`: why a further part was not posted; the write then fails when those that were posted have ended.
        """
        self._last_handle -= 1
        write = JoinedWrite(self._last_handle, agent_id, notification, set(parts), error)
        self._write_of_part.update(dict.fromkeys(write.parts, write))
        return write.handle

    def end(self, rank: int, part: WriteResult) -> JoinedWrite | None:
        """A part has ended: the whole write if it was the last one. None also for what is no part, or ended before.

        A write fails with the error of the first part that failed, and is in doubt if any part of it is.
        """
        key = rank, part.handle
        write = self._write_of_part.pop(key, None)
        if write is None:
            return None
        write.parts.discard(key)
        write.error = write.error or part.error
        write.in_doubt = write.in_doubt or part.in_doubt
        return None if write.parts else write

    def holds(self, rank: int, handle: int) -> bool:
        """Whether a rank's write is a part that has not ended."""
        return (rank, handle) in self._write_of_part


_MAILBOX = KvLayout("", "uint8", block_size_tokens=1, num_layers=1, num_kv_heads=1, head_dim=64)
"""What the agent of a worker with ranks registers: it holds no KV, but an agent has some memory."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank here writes to: a rank of a peer."""

    rank: int
    agent_id: str


class ShardedTransport(Transport):
    """Joins the transports of a worker's ranks.

    `own` is the worker's own agent: it takes and sends notifications. Without `ranks` the KV is its memory, and it also
    writes; peers of one rank are then served by it alone. `ranks` are transports with registered memory and
    `rank_endpoints` their endpoints, in order of rank.
    """

    def __init__(
        self, own: Transport, ranks: Sequence[Transport] = (), rank_endpoints: Sequence[TransferEndpoint] = ()
    ) -> None:
        self.kind = own.kind
        self._own = own
        self._ranks = tuple(ranks) or (own,)
        self._rank_endpoints = tuple(rank_endpoints)
        self._endpoint: TransferEndpoint | None = None
        self._mailbox = ctypes.create_string_buffer(_MAILBOX.block_bytes)
        self._peers: dict[str, tuple[_Part, ...]] = {}
        """The parts of peers that are not served by `own` alone."""
        self._writes = JoinedWrites()

    @override
    def register_memory(self, memory: KvMemoryRegion) -> TransferEndpoint:
        """With ranks, `memory` is the whole pool, which has no address."""
        if self._endpoint is not None:
            raise FailedPreconditionError("the memory is registered already")
        if not self._rank_endpoints:
            self._endpoint = self._own.register_memory(memory)
            return self._endpoint
        mailbox = self._own.register_memory(KvMemoryRegion(ctypes.addressof(self._mailbox), 1, _MAILBOX))
        self._endpoint = replace(mailbox, memory=memory, ranks=self._rank_endpoints)
        return self._endpoint

    @override
    def connect(self, endpoint: TransferEndpoint) -> None:
        """Connects each pair of ranks that has heads in common, and the agents of both workers."""
        mine = registered(self._endpoint)
        if not (mine.ranks or endpoint.ranks):
            self._own.connect(endpoint)
            return
        if endpoint.agent_id in self._peers:
            if endpoint.agent_id in self.connected():
                return
            self.disconnect(endpoint.agent_id)  # a connection between two ranks broke
        shards = _checked_shards(mine, endpoint)
        sources, targets = mine.ranks or (mine,), endpoint.ranks or (endpoint,)
        self._peers[endpoint.agent_id] = tuple(
            _Part(shard.writer, targets[shard.reader].agent_id) for shard in shards
        )
        try:
            self._own.connect_part(endpoint, None)
            for shard in shards:
                target = targets[shard.reader]
                there = target.memory.heads(shard.reader_head, shard.heads)
                here = sources[shard.writer].memory.heads(shard.writer_head, shard.heads)
                self._ranks[shard.writer].connect_part(replace(target, memory=there, ranks=()), here)
        except BaseException:
            self.disconnect(endpoint.agent_id)
            raise

    @override
    def disconnect(self, agent_id: str) -> None:
        self._own.disconnect(agent_id)
        for part in self._peers.pop(agent_id, ()):
            self._ranks[part.rank].disconnect(part.agent_id)

    @override
    def refuse(self, agent_id: str) -> None:
        """Only the worker's own agent is sent notifications."""
        self._own.refuse(agent_id)

    @override
    def connected(self) -> frozenset[str]:
        """Excludes peers to a rank of which a connection broke."""
        connected = self._own.connected()
        if not self._peers:
            return connected
        of_ranks = [rank.connected() for rank in self._ranks]
        parts = {part.agent_id for peer in self._peers.values() for part in peer}
        broken = {
            agent_id
            for agent_id, peer in self._peers.items()
            if any(part.agent_id not in of_ranks[part.rank] for part in peer)
        }
        return connected - (parts - self._peers.keys()) - broken

    @override
    def write(
        self,
        agent_id: str,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
        notification: bytes | None = None,
    ) -> int:
        peer = self._peers.get(agent_id)
        if peer is None:
            return self._own.write(agent_id, local_blocks, remote_blocks, notification)
        check_notification(notification)
        posted: list[tuple[int, int]] = []
        problem: str | None = None
        for part in peer:
            try:
                handle = self._ranks[part.rank].write(part.agent_id, local_blocks, remote_blocks)
            except TransferError as error:
                if not posted:
                    raise
                problem = error.message
                break
            posted.append((part.rank, handle))
        return self._writes.begin(agent_id, posted, notification, problem)

    @override
    def notify(self, agent_id: str, notification: bytes) -> None:
        self._own.notify(agent_id, notification)

    @override
    def poll(self) -> PollResult:
        polled = self._own.poll()
        if not self._peers and not self._rank_endpoints:
            return polled
        writes: list[WriteResult] = []
        for rank, transport in enumerate(self._ranks):
            ended = polled.writes if transport is self._own else transport.poll().writes
            for part in ended:
                if not self._writes.holds(rank, part.handle):
                    writes.append(part)
                elif (write := self._writes.end(rank, part)) is not None:
                    writes.append(self._notified(write.result, write.agent_id, write.notification))
        return PollResult(writes, polled.notifications)

    @override
    def close(self) -> None:
        for transport in {self._own, *self._ranks}:
            transport.close()

    @property
    @override
    def descriptors_posted(self) -> int:
        return sum(transport.descriptors_posted for transport in self._ranks)

    @property
    @override
    def needs_poll(self) -> bool:
        return self._own.needs_poll or any(transport.needs_poll for transport in self._ranks)

    def _notified(self, result: WriteResult, agent_id: str, notification: bytes | None) -> WriteResult:
        """The result of a write whose parts have all ended, after its notification."""
        if result.error is not None or notification is None:
            return result
        try:
            self._own.notify(agent_id, notification)
        except TransferError as error:
            return replace(result, error=error.message)  # the bytes have arrived: nothing is in doubt
        return result


def _checked_shards(mine: TransferEndpoint, theirs: TransferEndpoint) -> tuple[Shard, ...]:
    """Who writes what to a peer.

    Raises FailedPreconditionError for a peer whose KV does not fit, and InvalidArgumentError for values that no correct
    peer sends.
    """
    check_agent(mine, theirs)
    here, there = mine.memory.layout, theirs.memory.layout
    here.require_fits(there, who=f"agent {theirs.agent_id}")
    if not 1 <= there.tensor_parallel_size <= MAX_RANKS or max(1, len(theirs.ranks)) != (
        there.tensor_parallel_size
    ):
        raise InvalidArgumentError(
            f"ranks must be one for each of tensor_parallel_size, at most {MAX_RANKS}", field="ranks"
        )
    for rank in theirs.ranks:
        check_agent(mine, rank)
    shards = shard_map(here.tensor_parallel_size, there.tensor_parallel_size, here.num_kv_heads)
    pools = [rank.memory for side in (mine, theirs) for rank in side.ranks or (side,)]
    if here.tensor_parallel_size != there.tensor_parallel_size and not all(
        pool.layer_stride for pool in pools
    ):
        raise FailedPreconditionError(
            f"blocks of agent {theirs.agent_id}, or those here, are not divided into layers",
            reason="LAYOUT_MISMATCH",
            field="layer_stride",
        )
    return shards
