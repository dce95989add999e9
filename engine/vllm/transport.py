"""The transport of a worker with engine `vllm`: it commands the ranks of vLLM, which write the KV."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from typing_extensions import override

from engine.vllm.links import VllmEndedError
from engine.vllm.options import MAX_RANKS
from engine.vllm.processes import VllmProcesses
from kv_transfer.transports.regions import KvMemoryRegion
from kv_transfer.transports.transport import (
    PollResult,
    TransferEndpoint,
    Transport,
    WriteResult,
    check_agent,
    check_notification,
    connected_peer,
)
from splitserve.errors import InvalidArgumentError
from splitserve.logs import log_event
from splitserve.v1 import vllm_pb2 as pb

POST_S = 1.0
"""Seconds after a command in which a rank may post the write. The worker sends the command before the ticket's
deadline, so no rank posts later than this after the deadline. The decode worker allows far more (`WRITE_GRACE_S`)."""
POLL_INTERVAL_S = 0.05


@dataclass(slots=True)
class _Write:
    """A write that has not ended. Each rank writes a part."""

    engine_id: str
    notification: bytes
    """What to send to the peer after the last part; empty: nothing, or NIXL delivers it with the only part."""
    parts: int
    """Ranks that have not reported the end of their part."""
    error: str = ""
    in_doubt: bool = False


@dataclass(eq=False, slots=True)
class _Connect:
    """A peer to which the ranks are connecting."""

    agent_id: str
    peer: pb.VllmConnect
    unanswered: set[int]
    """Indices of the ranks that have not answered."""
    error: str = ""
    wanted: bool = True
    """False once the peer was disconnected."""


class VllmTransport(Transport):
    """Writes vLLM's blocks to peers that run vLLM. vLLM decides which rank writes which bytes to which rank.

    `memory` describes the pool to peers; its address is that of the first rank. Every method raises VllmEndedError when
    a process of vLLM has ended, and the worker ends.
    """

    kind = "nixl"

    def __init__(
        self,
        processes: VllmProcesses,
        engine_id: str,
        tensor_parallel_size: int,
        memory: KvMemoryRegion,
        agent_id: str = "",
    ) -> None:
        """`agent_id`: of a vLLM whose processes have not joined; else the first rank has one."""
        self._processes = processes
        ranks = processes.ranks
        connect = pb.VllmConnect(
            engine_id=engine_id,
            tensor_parallel_size=tensor_parallel_size,
            handshakes=[rank.handshake for rank in ranks],
        )
        self.endpoint = TransferEndpoint(
            agent_id or ranks[0].agent_id, self.kind, connect.SerializeToString(), memory
        )
        self._connects: list[_Connect] = []
        """Connects that some rank has not answered, the earliest first. A rank answers them in order."""
        self._peers: dict[str, pb.VllmConnect] = {}
        self._refused: set[str] = set()
        self._writes: dict[int, _Write] = {}
        self._failed: list[WriteResult] = []
        self._last_handle = 0
        self.on_scheduler: Callable[[pb.VllmEvent], None] = lambda event: None
        """`poll` calls it with the events of vLLM's scheduler."""

    @override
    def register_memory(self, memory: KvMemoryRegion) -> TransferEndpoint:
        """Returns the endpoint. The ranks have registered their memory."""
        return self.endpoint

    @override
    def connect(self, endpoint: TransferEndpoint) -> None:
        """Starts to connect. `connected` has the peer once all ranks have connected to it."""
        connecting = any(c.agent_id == endpoint.agent_id and c.wanted for c in self._connects)
        if connecting or endpoint.agent_id in self._peers:
            return
        check_agent(self.endpoint, endpoint)
        self.endpoint.memory.layout.require_fits(endpoint.memory.layout, who=f"agent {endpoint.agent_id}")
        peer = _peer_of(endpoint)
        self._processes.command(pb.VllmCommand(connect=peer))
        self._connects.append(_Connect(endpoint.agent_id, peer, set(range(len(self._processes.ranks)))))
        self._refused.discard(endpoint.agent_id)

    @override
    def disconnect(self, agent_id: str) -> None:
        for connect in self._connects:
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
        """Drops the peer's notifications. Its writes are one-sided and cannot be refused."""
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
        group_blocks: Sequence[int] = (),
    ) -> int:
        """Has every rank post its part within `POST_S`, or not at all."""
        peer = connected_peer(self._peers, agent_id)
        check_notification(notification)
        ranks = len(self._processes.ranks)
        # 1. One rank writes to one: NIXL delivers the notification after the bytes of this only part.
        # 2. Several parts: NIXL does not order them, so the notification is sent after the last one has ended.
        single = ranks == 1 and len(peer.handshakes) == 1
        with_part, after_parts = (notification or b"", b"") if single else (b"", notification or b"")
        self._last_handle += 1
        self._processes.command(
            pb.VllmCommand(
                write=pb.VllmWrite(
                    handle=self._last_handle,
                    engine_id=peer.engine_id,
                    local_blocks=local_blocks,
                    remote_blocks=remote_blocks,
                    group_blocks=group_blocks or (len(local_blocks),),
                    notification=with_part,
                    post_before_ns=time.monotonic_ns() + int(POST_S * 1e9),
                )
            )
        )
        self._writes[self._last_handle] = _Write(peer.engine_id, after_parts, ranks)
        # vLLM does not say how many descriptors it makes of the blocks.
        self.descriptors_posted += len(local_blocks)
        return self._last_handle

    @override
    def notify(self, agent_id: str, notification: bytes) -> None:
        self._notify(connected_peer(self._peers, agent_id).engine_id, notification)

    @override
    def poll(self) -> PollResult:
        writes, self._failed = self._failed, []
        polled = PollResult(writes)
        while not self._processes.events.empty():
            rank, event = self._processes.events.get()
            if event is None:
                raise VllmEndedError("a process of vLLM has ended")
            match event.WhichOneof("kind"):
                case "reply":
                    self._answered(rank, event.reply)
                case "write_ended":
                    if (result := self._part_ended(event.write_ended)) is not None:
                        polled.writes.append(result)
                case "notified":
                    notified = event.notified
                    if notified.agent_id not in self._refused:
                        polled.notifications.append((notified.agent_id, notified.notification))
                case _:
                    self.on_scheduler(event)
        return polled

    @override
    def close(self) -> None:
        """Does nothing: `VllmProcesses.close` ends the connections."""

    @property
    @override
    def poll_interval_s(self) -> float:
        """Long, because the threads of `VllmProcesses` wake the engine thread when there is something to poll."""
        return POLL_INTERVAL_S

    def _notify(self, engine_id: str, notification: bytes) -> None:
        notify = pb.VllmNotify(engine_id=engine_id, notification=notification)
        self._processes.command(pb.VllmCommand(notify=notify), rank=0)

    def _answered(self, rank: int, reply: pb.VllmReply) -> None:
        """Applies a rank's answer to its earliest connect."""
        connect = next(connect for connect in self._connects if rank in connect.unanswered)
        connect.unanswered.discard(rank)
        connect.error = connect.error or reply.error
        if connect.unanswered:
            return
        self._connects.remove(connect)
        if connect.error:
            log_event("peer.refused", agent_id=connect.agent_id, reason="CONNECT", error=connect.error)
        if connect.error or not connect.wanted:
            self._processes.command(pb.VllmCommand(disconnect=connect.peer.engine_id))
        else:
            self._peers[connect.agent_id] = connect.peer

    def _part_ended(self, ended: pb.VllmWriteEnded) -> WriteResult | None:
        """Applies the end of a rank's part of a write. Returns the write's result after the last part, else None."""
        write = self._writes.get(ended.handle)
        if write is None:
            return None
        write.parts -= 1
        write.error, write.in_doubt = write.error or ended.error, write.in_doubt or ended.in_doubt
        if write.parts:
            return None
        del self._writes[ended.handle]
        if not write.error and write.notification:
            self._notify(write.engine_id, write.notification)
        return WriteResult(ended.handle, write.error or None, write.in_doubt)


def _peer_of(endpoint: TransferEndpoint) -> pb.VllmConnect:
    """Parses how to reach a peer's ranks. Raises InvalidArgumentError (field `metadata`)."""
    try:
        peer = pb.VllmConnect.FromString(endpoint.metadata)
    except DecodeError as error:
        raise InvalidArgumentError(f"metadata is not an engine's: {error}", field="metadata") from None
    size, ranks = peer.tensor_parallel_size, len(peer.handshakes)
    if not (1 <= size <= ranks <= MAX_RANKS and ranks % size == 0 and peer.engine_id):
        message = f"metadata must name an engine with one handshake for each of its 1..{MAX_RANKS} ranks"
        raise InvalidArgumentError(message, field="metadata")
    return peer
