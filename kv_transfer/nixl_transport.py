"""NIXL over UCX: one-sided writes between workers' pools, over shared memory, NVLink, RDMA or TCP.

What was seen with NIXL 1.5.1, UCX 1.23 and main memory between two processes of one host:

* Lane: `cma` (process_vm_writev) for the bytes where the kernel allows it, shared memory for
  notifications and acknowledgements. 8-13 GB/s at 0.4-1.5 MB, 12 GB/s at 12-190 MB between pools of huge
  pages, and 4 GB/s with small ones, whose pinning costs more than the copy; 0.05 ms from post to done for
  one block of 0.4 MB. Bytes are there, and the notification is posted, when `write` returns.
  Without cma (other container, no ptrace right) bytes go over TCP: 8 GB/s at 1 MiB,
  6 GB/s at 16 MiB with an idle receiver; a busy receiver must poll to take them in.
* Preparing per-block lists once and writing by index costs the same as building merged descriptors for
  each write (256 neighbours of 4 KiB: 75 against 55 us; 256 scattered: 570 against 480 us; one block:
  10 against 13 us), and NIXL merges by itself: its own count of descriptors equals `merge_runs`.
* Peer killed (SIGKILL), before or during a write, over cma and over TCP: the post or the next poll
  reports it within milliseconds; nothing crashes or hangs; other peers are served on.
* Peer stopped (SIGSTOP): over cma with shared memory the write ends and its notification waits for the
  peer. Over TCP it is not over until the peer runs again or is disconnected here; its request can be
  released at any time.
* Peer that has closed its transport while its process lives on: noticed over TCP only. Over cma a write
  ends well as long as the memory is mapped; nobody reads its notification. The coordinator, who sees the
  worker go, makes this side disconnect.
* The connection is made with the first message, which takes some polls on both sides. So `connect` sends
  one at once, which `poll` swallows on the other side.
* Metadata that names an agent but is cut short makes NIXL refuse that agent's good metadata afterwards;
  the agent needs a new id, that is, a restart.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kv_transfer.nixl_binding import NixlAgent, PeerLostError
from kv_transfer.peer_checks import check_blocks, check_endpoint, check_notification, check_pool
from kv_transfer.runs import merge_runs
from kv_transfer.transport import PollResult, PoolMemory, TransferEndpoint, Transport, WriteResult
from splitserve.errors import FailedPreconditionError, TransferError

_log = logging.getLogger(__name__)

_HELLO = b"\0splitserve.hello"
_MAX_FENCED = 4096


@dataclass(frozen=True, slots=True)
class _Peer:
    num_blocks: int
    blocks: int
    """NIXL's list of the peer's blocks."""


@dataclass(frozen=True, slots=True)
class _Flight:
    agent_id: str
    request: int


class NixlTransport(Transport):
    """A NIXL agent whose name is a UUID made here. Needs a receiver that polls now and then."""

    kind = "nixl"

    def __init__(self) -> None:
        self._agent_id = str(uuid.uuid4())
        self._agent: NixlAgent | None = NixlAgent(self._agent_id)
        self._endpoint: TransferEndpoint | None = None
        self._regions: object = None
        self._blocks = 0
        self._peers: dict[str, _Peer] = {}
        self._fenced: dict[str, None] = {}
        self._flights: dict[int, _Flight] = {}
        self._over: list[WriteResult] = []
        self._next_handle = 1
        self._descriptors = 0

    def register_pool(self, pool: PoolMemory) -> TransferEndpoint:
        """See `Transport`."""
        if self._endpoint is not None:
            raise FailedPreconditionError("the pool is registered already")
        check_pool(pool)
        agent, size = self._require_agent(), pool.layout.block_bytes
        address, device, kind = pool.base_address, pool.device_index, pool.memory_kind
        self._regions = agent.register(address, pool.num_blocks * size, device, kind)
        self._blocks = agent.prepare_blocks(None, address, size, pool.num_blocks, device, kind)
        self._endpoint = TransferEndpoint(self._agent_id, self.kind, agent.metadata(), pool)
        return self._endpoint

    def connect(self, endpoint: TransferEndpoint) -> None:
        """See `Transport`. Loads the peer's metadata; the peer need not run yet."""
        peer_id, pool = endpoint.agent_id, endpoint.pool
        if peer_id in self._peers:
            return
        check_endpoint(self._require_endpoint(), endpoint)
        agent = self._require_agent()
        named = agent.add_peer(endpoint.metadata)
        try:
            if named != peer_id:
                raise TransferError(f"the metadata of agent {peer_id} is another agent's")
            size = pool.layout.block_bytes
            blocks = agent.prepare_blocks(
                peer_id, pool.base_address, size, pool.num_blocks, pool.device_index, pool.memory_kind
            )
            agent.send(peer_id, _HELLO)
        except TransferError:
            if named not in self._peers:
                agent.remove_peer(named)
            raise
        self._fenced.pop(peer_id, None)
        self._peers[peer_id] = _Peer(pool.num_blocks, blocks)

    def disconnect(self, agent_id: str) -> None:
        """See `Transport`.

        Closes this side's connection: own writes end, later notifications of the peer are dropped. It
        cannot stop a peer from writing over cma; see `ReservationTable` for what protects the blocks.
        """
        self._fenced[agent_id] = None
        while len(self._fenced) > _MAX_FENCED:
            del self._fenced[next(iter(self._fenced))]
        self._drop_peer(agent_id, f"agent {agent_id} was disconnected")

    def connected(self) -> frozenset[str]:
        """See `Transport`. A peer whose connection broke is gone from it."""
        return frozenset(self._peers)

    def write(
        self,
        agent_id: str,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
        notification: bytes | None = None,
    ) -> int:
        """See `Transport`. Over cma the bytes are copied before this returns."""
        peer, mine, agent = self._require_peer(agent_id), self._require_endpoint(), self._require_agent()
        check_blocks(local_blocks, mine.pool.num_blocks, remote_blocks, peer.num_blocks)
        check_notification(notification)
        local, remote = np.array(local_blocks, dtype=np.int32), np.array(remote_blocks, dtype=np.int32)
        request = agent.make_write(self._blocks, local, peer.blocks, remote, notification or b"")
        try:
            over = agent.post(request)
        except TransferError as error:
            self._end(agent_id, request, error)
            raise
        handle = self._next_handle
        self._next_handle += 1
        self._descriptors += len(merge_runs(local_blocks, remote_blocks))
        if over:
            self._release(request)
            self._over.append(WriteResult(handle))
        else:
            self._flights[handle] = _Flight(agent_id, request)
        return handle

    def notify(self, agent_id: str, notification: bytes) -> None:
        """See `Transport`."""
        self._require_peer(agent_id)
        check_notification(notification)
        try:
            self._require_agent().send(agent_id, notification)
        except PeerLostError as error:
            self._drop_peer(agent_id, error.message)
            raise

    def poll(self) -> PollResult:
        """See `Transport`. Also drives NIXL's progress."""
        if self._agent is None:
            return PollResult()
        for handle, flight in list(self._flights.items()):
            if handle in self._flights:  # not ended meanwhile with its lost peer
                self._check(handle, flight)
        arrived = self._agent.notifications()
        result = PollResult(writes=self._over)
        self._over = []
        for sender, messages in arrived.items():
            if sender not in self._fenced:
                result.notifications += [(sender, message) for message in messages if message != _HELLO]
        return result

    def close(self) -> None:
        """See `Transport`."""
        agent = self._agent
        if agent is None:
            return
        for agent_id in list(self._peers):
            self._drop_peer(agent_id, "the transport was closed")
        self._over.clear()
        self._agent = None
        try:
            if self._endpoint is not None:
                agent.release_blocks(self._blocks)
                agent.deregister(self._regions)
        except TransferError as error:
            _log.warning("transport.close_incomplete: %s", error)

    @property
    def descriptors_posted(self) -> int:
        """See `Transport`."""
        return self._descriptors

    def _check(self, handle: int, flight: _Flight) -> None:
        problem: TransferError | None = None
        try:
            if not self._require_agent().check(flight.request):
                return
        except TransferError as error:
            problem = error
        del self._flights[handle]
        self._over.append(WriteResult(handle, None if problem is None else problem.message))
        self._end(flight.agent_id, flight.request, problem)

    def _end(self, agent_id: str, request: int, problem: TransferError | None) -> None:
        self._release(request)
        if isinstance(problem, PeerLostError):
            self._drop_peer(agent_id, problem.message)

    def _drop_peer(self, agent_id: str, why: str) -> None:
        """Ends a peer's writes and forgets it. What it had sent before is still delivered."""
        peer = self._peers.pop(agent_id, None)
        if peer is None:
            return
        for handle in [handle for handle, flight in self._flights.items() if flight.agent_id == agent_id]:
            self._release(self._flights.pop(handle).request)
            self._over.append(WriteResult(handle, why))
        agent = self._require_agent()
        try:
            agent.release_blocks(peer.blocks)
            agent.remove_peer(agent_id)
        except TransferError as error:
            _log.warning("transport.peer_not_removed: agent_id=%s %s", agent_id, error)

    def _release(self, request: int) -> None:
        try:
            self._require_agent().release(request)
        except TransferError as error:
            _log.warning("transport.request_not_released: %s", error)

    def _require_agent(self) -> NixlAgent:
        if self._agent is None:
            raise TransferError("the transport is closed")
        return self._agent

    def _require_endpoint(self) -> TransferEndpoint:
        if self._endpoint is None:
            raise FailedPreconditionError("no pool is registered")
        return self._endpoint

    def _require_peer(self, agent_id: str) -> _Peer:
        try:
            return self._peers[agent_id]
        except KeyError:
            raise TransferError(f"agent {agent_id} is not connected", reason="UNKNOWN_PEER") from None
