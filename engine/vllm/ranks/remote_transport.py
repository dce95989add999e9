"""The transport of a rank's process, as the engine thread sees it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from typing_extensions import override

from engine.vllm.ranks.rank_link import RankEndedError, RankLink
from kv_transfer.transports.regions import KvMemoryRegion, check_blocks, count_descriptors, pieces_touch
from kv_transfer.transports.transport import (
    PollResult,
    TransferEndpoint,
    Transport,
    WriteResult,
    unknown_peer,
)
from splitserve.errors import FailedPreconditionError, TransferError
from splitserve.v1 import ranks_pb2 as pb

POST_S = 1.0
"""A rank that was stopped for longer posts nothing of what it was told before. Writes begin before their ticket's
deadline, so none is posted later than this after it; what frees blocks counts on far more (`WRITE_GRACE_S`)."""
ANSWER_S = 30.0
"""A rank that does not answer for so long is taken for broken."""


class RemoteTransport(Transport):
    """Sends commands to the rank at the other end of `link`. Bytes travel straight from the rank.

    Any method raises RankEndedError, which ends the engine, when the rank is gone.
    """

    def __init__(
        self, link: RankLink, endpoint: TransferEndpoint, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.kind = endpoint.transport
        self.endpoint = endpoint
        """The rank's own KV; its layout has no fingerprint."""
        self._link = link
        self._clock = clock
        self._peers: frozenset[str] = frozenset()
        self._parts: dict[str, tuple[KvMemoryRegion, KvMemoryRegion]] = {}
        self._ended: list[WriteResult] = []
        self._replies: deque[pb.RankReply] = deque()
        self._last_handle = 0
        self._descriptors = 0

    def register_memory(self, memory: KvMemoryRegion) -> TransferEndpoint:
        """Refused: the rank has registered its own."""
        raise FailedPreconditionError("the memory is registered already")

    @override
    def connect(self, endpoint: TransferEndpoint) -> None:
        self.connect_part(endpoint, self.endpoint.memory)

    @override
    def connect_part(self, endpoint: TransferEndpoint, own: KvMemoryRegion | None) -> None:
        if own is None:
            raise FailedPreconditionError("a rank sends no notifications")
        memory = endpoint.memory
        command = pb.RankConnect(
            endpoint=endpoint.to_proto(), piece_stride=memory.stride, own_base_address=own.base_address
        )
        reply = self._ask(pb.RankCommand(connect=command))
        if reply.error:
            raise TransferError(reply.error, reason=reply.reason or None)
        self._parts[endpoint.agent_id] = own, memory

    @override
    def disconnect(self, agent_id: str) -> None:
        """Writes are reported as failed by a later poll."""
        self._peers -= {agent_id}
        self._link.send(pb.RankCommand(disconnect=agent_id))

    @override
    def refuse(self, agent_id: str) -> None:
        """Nobody notifies a rank, and its peers' writes are one-sided: there is nothing to refuse."""

    @override
    def connected(self) -> frozenset[str]:
        return self._peers

    @override
    def write(
        self,
        agent_id: str,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
        notification: bytes | None = None,
    ) -> int:
        """Posted by the rank within `POST_S`, or not at all. Takes no notification."""
        if agent_id not in self._peers:
            raise unknown_peer(agent_id)
        if notification is not None:
            raise FailedPreconditionError("a rank sends no notifications")
        own, theirs = self._parts[agent_id]
        check_blocks(local_blocks, own.num_blocks, remote_blocks, theirs.num_blocks)
        self._last_handle += 1
        write = pb.RankWrite(
            handle=self._last_handle,
            agent_id=agent_id,
            local_blocks=local_blocks,
            remote_blocks=remote_blocks,
            post_before_ns=int((self._clock() + POST_S) * 1e9),
        )
        self._link.send(pb.RankCommand(write=write))
        self._descriptors += count_descriptors(
            local_blocks, remote_blocks, len(own.rows), touching=pieces_touch(own, theirs)
        )
        return self._last_handle

    def notify(self, agent_id: str, notification: bytes) -> None:
        """Refused: the worker's own agent sends notifications."""
        raise FailedPreconditionError("a rank sends no notifications")

    @override
    def poll(self) -> PollResult:
        while self._link.poll():
            self._take(self._link.receive(pb.RankEvent))
        ended, self._ended = self._ended, []
        return PollResult(ended)

    def read_digests(self, block_ids: Sequence[int]) -> list[int]:
        """XXH3-64 of each of the rank's heads in each block, block by block."""
        reply = self._ask(pb.RankCommand(read_digests=pb.RankReadDigests(blocks=block_ids)))
        if reply.error:
            raise TransferError(reply.error)
        return list(reply.digests)

    @override
    def close(self) -> None:
        """The rank ends its writes when it sees the end of the connection."""
        self._link.close()

    @property
    @override
    def descriptors_posted(self) -> int:
        return self._descriptors

    def _ask(self, command: pb.RankCommand) -> pb.RankReply:
        self._link.send(command)
        end_s = self._clock() + ANSWER_S
        while not self._replies:
            if not self._link.poll(max(0.0, end_s - self._clock())):
                raise RankEndedError(f"a rank gave no answer for {ANSWER_S:g} s")
            self._take(self._link.receive(pb.RankEvent))
        return self._replies.popleft()

    def _take(self, event: pb.RankEvent) -> None:
        match event.WhichOneof("kind"):
            case "reply":
                self._replies.append(event.reply)
            case "write_ended":
                ended = event.write_ended
                self._ended.append(WriteResult(ended.handle, ended.error or None, ended.in_doubt))
            case "peers":
                self._peers = frozenset(event.peers.agent_ids)
