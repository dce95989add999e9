"""The transport of a worker whose vLLM moves KV: its ranks write, this side says what and hears how it ended."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from typing_extensions import override

from engine.vllm.links import VllmEndedError
from engine.vllm.processes import VllmProcesses
from kv_transfer.transports.regions import KvMemoryRegion
from kv_transfer.transports.transport import (
    PollResult,
    TransferEndpoint,
    Transport,
    WriteResult,
    check_agent,
    check_notification,
    unknown_peer,
)
from splitserve.errors import InvalidArgumentError
from splitserve.logs import log_event
from splitserve.v1 import vllm_pb2 as pb

POST_S = 1.0
"""A rank that was stopped for longer posts nothing of what it was told before. Writes begin before their ticket's
deadline, so none is posted later than this after it; what frees blocks counts on far more (`WRITE_GRACE_S`)."""
MAX_RANKS = 64
POLL_INTERVAL_S = 0.05


@dataclass(slots=True)
class _Write:
    """A write, of which each rank does its part."""

    engine_id: str
    notification: bytes
    """What the peer is told when all parts have ended well; empty: it rides on the only part."""
    parts: int
    error: str = ""
    in_doubt: bool = False


@dataclass(eq=False, slots=True)
class _Connect:
    """A peer that the ranks were told to connect to."""

    agent_id: str
    peer: pb.VllmConnect
    awaited: int
    """Ranks that have not answered."""
    problem: str = ""
    wanted: bool = True
    """Whether it was not disconnected since."""


class VllmTransport(Transport):
    """Blocks are vLLM's, group by group of layers; which rank writes what to which is vLLM's to know.

    `memory` describes the pool to peers; its address is the first rank's. Any method raises VllmEndedError, which ends
    the engine, when a process of vLLM's is gone.
    """

    kind = "nixl"

    def __init__(
        self, processes: VllmProcesses, engine_id: str, tensor_parallel_size: int, memory: KvMemoryRegion
    ) -> None:
        self._processes = processes
        ranks = processes.ranks
        connect = pb.VllmConnect(
            engine_id=engine_id,
            tensor_parallel_size=tensor_parallel_size,
            handshakes=[rank.handshake for rank in ranks],
        )
        self.endpoint = TransferEndpoint(ranks[0].agent_id, self.kind, connect.SerializeToString(), memory)
        self._events: queue.SimpleQueue[tuple[int, pb.VllmEvent | None]] = queue.SimpleQueue()
        """What the ranks have told, each with its index, until the engine thread takes it. None: a rank has ended."""
        self._connects: list[deque[_Connect]] = [deque() for _ in ranks]
        """Of each rank those that it has not answered, in order."""
        self._peers: dict[str, pb.VllmConnect] = {}
        self._refused: set[str] = set()
        self._writes: dict[int, _Write] = {}
        self._failed: list[WriteResult] = []
        self._last_handle = self._descriptors = 0
        self.on_scheduler: Callable[[pb.VllmEvent], None] = lambda event: None
        """Takes the events of vLLM's scheduler, on the engine thread, within `poll`."""

    def listen(self, wake: Callable[[], None]) -> None:
        """Starts to take events. `wake` is called on any thread when there is something to poll."""

        def take(index: int, event: pb.VllmEvent | None) -> None:
            self._events.put((index, event))
            wake()

        self._processes.listen(take)

    @override
    def register_memory(self, memory: KvMemoryRegion) -> TransferEndpoint:
        """The endpoint of what the ranks have registered by themselves."""
        return self.endpoint

    @override
    def connect(self, endpoint: TransferEndpoint) -> None:
        """The peer counts as connected once all ranks have answered; one that refuses leaves it unconnected."""
        under_way = any(c.agent_id == endpoint.agent_id and c.wanted for c in self._unanswered())
        if under_way or endpoint.agent_id in self._peers:
            return
        check_agent(self.endpoint, endpoint)
        self.endpoint.memory.layout.require_fits(endpoint.memory.layout, who=f"agent {endpoint.agent_id}")
        peer = _peer_of(endpoint)
        self._processes.command(pb.VllmCommand(connect=peer))
        connect = _Connect(endpoint.agent_id, peer, len(self._connects))
        for unanswered in self._connects:
            unanswered.append(connect)
        self._refused.discard(endpoint.agent_id)

    @override
    def disconnect(self, agent_id: str) -> None:
        for connect in self._unanswered():
            if connect.agent_id == agent_id:
                connect.wanted = False
        peer = self._peers.pop(agent_id, None)
        if peer is None:
            return
        self._processes.command(pb.VllmCommand(disconnect=peer.engine_id))
        for handle, write in list(self._writes.items()):
            if write.engine_id == peer.engine_id:
                del self._writes[handle]
                self._failed.append(WriteResult(handle, "the peer was disconnected", in_doubt=True))

    @override
    def refuse(self, agent_id: str) -> None:
        """Drops its notifications; its writes are one-sided."""
        self._refused.add(agent_id)

    @override
    def connected(self) -> frozenset[str]:
        return frozenset(self._peers)

    @override
    def write(
        self,
        agent_id: str,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
        notification: bytes | None = None,
    ) -> int:
        return self.write_groups(agent_id, local_blocks, remote_blocks, (), notification)

    @override
    def write_groups(
        self,
        agent_id: str,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
        group_blocks: Sequence[int],
        notification: bytes | None = None,
    ) -> int:
        """Posted by each rank within `POST_S`, or not at all."""
        peer = self._peers.get(agent_id)
        if peer is None:
            raise unknown_peer(agent_id)
        check_notification(notification)
        ranks = len(self._processes.ranks)
        # What rides on a write arrives behind its bytes alone: with several parts it is sent after the last of them.
        rides = ranks == 1 and len(peer.handshakes) == 1
        self._last_handle += 1
        told = notification or b""
        self._processes.command(
            pb.VllmCommand(
                write=pb.VllmWrite(
                    handle=self._last_handle,
                    engine_id=peer.engine_id,
                    local_blocks=local_blocks,
                    remote_blocks=remote_blocks,
                    group_blocks=group_blocks or (len(local_blocks),),
                    notification=told if rides else b"",
                    post_before_ns=time.monotonic_ns() + int(POST_S * 1e9),
                )
            )
        )
        self._writes[self._last_handle] = _Write(peer.engine_id, b"" if rides else told, ranks)
        self._descriptors += len(local_blocks)
        return self._last_handle

    @override
    def notify(self, agent_id: str, notification: bytes) -> None:
        peer = self._peers.get(agent_id)
        if peer is None:
            raise unknown_peer(agent_id)
        told = pb.VllmNotify(engine_id=peer.engine_id, notification=notification)
        self._processes.command(pb.VllmCommand(notify=told), rank=0)

    @override
    def poll(self) -> PollResult:
        writes, self._failed = self._failed, []
        polled = PollResult(writes)
        while not self._events.empty():
            rank, event = self._events.get()
            if event is None:
                raise VllmEndedError("a process of vLLM has ended")
            match event.WhichOneof("kind"):
                case "reply":
                    self._answered(rank, event.reply)
                case "write_ended":
                    if (ended := self._part_ended(event.write_ended)) is not None:
                        polled.writes.append(ended)
                case "notified":
                    told = event.notified
                    if told.agent_id not in self._refused:
                        polled.notifications.append((told.agent_id, told.notification))
                case _:
                    self.on_scheduler(event)
        return polled

    @override
    def close(self) -> None:
        """The connections end with vLLM; see `VllmProcesses`."""

    @property
    @override
    def descriptors_posted(self) -> int:
        """Blocks, of which vLLM makes descriptors by itself."""
        return self._descriptors

    @property
    @override
    def poll_interval_s(self) -> float:
        """Long: the reader threads wake the engine thread when there is something to poll."""
        return POLL_INTERVAL_S

    def _unanswered(self) -> set[_Connect]:
        return {connect for of_rank in self._connects for connect in of_rank}

    def _answered(self, rank: int, reply: pb.VllmReply) -> None:
        """A rank has answered the earliest of its connects."""
        connect = self._connects[rank].popleft()
        connect.awaited -= 1
        connect.problem = connect.problem or reply.error
        if connect.awaited:
            return
        if connect.problem:
            log_event("peer.refused", agent_id=connect.agent_id, reason="CONNECT", error=connect.problem)
        if connect.problem or not connect.wanted:
            self._processes.command(pb.VllmCommand(disconnect=connect.peer.engine_id))
        else:
            self._peers[connect.agent_id] = connect.peer

    def _part_ended(self, ended: pb.VllmWriteEnded) -> WriteResult | None:
        """A part of a write has ended: the result of the write if it was the last one."""
        write = self._writes.get(ended.handle)
        if write is None:
            return None
        write.parts -= 1
        write.error, write.in_doubt = write.error or ended.error, write.in_doubt or ended.in_doubt
        if write.parts:
            return None
        del self._writes[ended.handle]
        if not write.error and write.notification:
            told = pb.VllmNotify(engine_id=write.engine_id, notification=write.notification)
            self._processes.command(pb.VllmCommand(notify=told), rank=0)
        return WriteResult(ended.handle, write.error or None, write.in_doubt)


def _peer_of(endpoint: TransferEndpoint) -> pb.VllmConnect:
    """How a peer's ranks are reached. Raises InvalidArgumentError for what no correct peer says."""
    try:
        peer = pb.VllmConnect.FromString(endpoint.metadata)
    except DecodeError as error:
        raise InvalidArgumentError(f"metadata is not an engine's: {error}", field="metadata") from None
    size = peer.tensor_parallel_size
    ranks = len(peer.handshakes)
    if not (1 <= size <= ranks <= MAX_RANKS and ranks % size == 0 and peer.engine_id):
        message = f"metadata must name an engine with one handshake for each of its 1..{MAX_RANKS} ranks"
        raise InvalidArgumentError(message, field="metadata")
    return peer
