"""A transport within one process, for tests and simulated clusters. Deterministic.

Bytes are copied between the registered addresses. It keeps every rule of `Transport`, and its fence is
stricter than that of hardware: once an owner refuses a writer, no write of it arrives.
"""

from __future__ import annotations

import ctypes
import threading
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kv_transfer.transports.descriptors import (
    Run,
    check_agent,
    check_blocks,
    check_endpoint,
    check_memory,
    check_notification,
    connected_peer,
    in_common,
    merge_runs,
    pieces_touch,
    registered,
)
from kv_transfer.transports.transport import (
    KvMemoryRegion,
    PollResult,
    TransferEndpoint,
    Transport,
    WriteResult,
)
from splitserve.errors import FailedPreconditionError, TransferError


@dataclass(slots=True)
class _Member:
    """The hub's state of one agent."""

    memory: KvMemoryRegion
    inbox: deque[tuple[str, bytes]] = field(default_factory=deque)
    fenced: set[str] = field(default_factory=set)


class MemoryHub:
    """Connects the memory transports of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: dict[str, _Member] = {}

    def join(self, agent_id: str, memory: KvMemoryRegion) -> None:
        """Makes an agent's memory reachable."""
        with self._lock:
            self._members[agent_id] = _Member(memory)

    def leave(self, agent_id: str) -> None:
        """Removes an agent; later writes to it fail. Unknown ids are ignored."""
        with self._lock:
            self._members.pop(agent_id, None)

    def present(self, agent_id: str) -> bool:
        """Whether the agent can be reached."""
        with self._lock:
            return agent_id in self._members

    def set_fence(self, owner: str, writer: str, *, closed: bool) -> None:
        """Blocks writes and notifications from `writer` to `owner`, or allows them again."""
        with self._lock:
            if member := self._members.get(owner):
                (member.fenced.add if closed else member.fenced.discard)(writer)

    def deliver(
        self,
        sender: str,
        to: str,
        runs: Sequence[Run],
        notification: bytes | None,
        parts: tuple[KvMemoryRegion, KvMemoryRegion] | None = None,
    ) -> str | None:
        """Copies runs of blocks, then queues the notification. Returns the problem, or None on success.

        `parts`: what of the two memories is meant, the sender's first; all by default. Runs longer than a block need
        blocks that touch.
        """
        with self._lock:
            source, target = self._members.get(sender), self._members.get(to)
            if source is None or target is None or sender in target.fenced:
                return f"agent {to} is gone"
            mine, theirs = parts or (source.memory, target.memory)
            for run in runs:
                _copy(mine, theirs, run)
            if notification is not None:
                target.inbox.append((sender, notification))
            return None

    def collect(self, agent_id: str) -> list[tuple[str, bytes]]:
        """Takes an agent's notifications, without those of fenced senders."""
        with self._lock:
            member = self._members.get(agent_id)
            if member is None:
                return []
            arrived = [item for item in member.inbox if item[0] not in member.fenced]
            member.inbox.clear()
            return arrived


def _copy(mine: KvMemoryRegion, theirs: KvMemoryRegion, run: Run) -> None:
    """Copies a run in all rows."""
    here, local = divmod(run.local, mine.divisions)
    there, remote = divmod(run.remote, theirs.divisions)
    sources, targets = mine.rows[local :: mine.divisions], theirs.rows[remote :: theirs.divisions]
    size = run.length * theirs.piece_bytes
    for source, target in zip(sources, targets, strict=True):
        ctypes.memmove(target + there * theirs.stride, source + here * mine.stride, size)


@dataclass(frozen=True, slots=True)
class _PendingWrite:
    handle: int
    agent_id: str
    runs: list[Run]
    notification: bytes | None
    parts: tuple[KvMemoryRegion, KvMemoryRegion] | None


class MemoryTransport(Transport):
    """One agent of a `MemoryHub`. A write is executed by the writer's next `poll`."""

    kind = "memory"

    def __init__(self, hub: MemoryHub) -> None:
        self._hub = hub
        self._agent_id = str(uuid.uuid4())
        self._endpoint: TransferEndpoint | None = None
        self._peers: dict[str, TransferEndpoint] = {}
        self._parts: dict[str, tuple[KvMemoryRegion, KvMemoryRegion]] = {}
        """What is written and where, for peers that get a part."""
        self._pending: deque[_PendingWrite] = deque()
        self._failed: list[WriteResult] = []
        self._next_handle = 1
        self._descriptors = 0

    def register_memory(self, memory: KvMemoryRegion) -> TransferEndpoint:
        """See `Transport`."""
        if self._endpoint is not None:
            raise FailedPreconditionError("the memory is registered already")
        check_memory(memory)
        self._hub.join(self._agent_id, memory)
        self._endpoint = TransferEndpoint(self._agent_id, self.kind, b"", memory)
        return self._endpoint

    def connect(self, endpoint: TransferEndpoint) -> None:
        """See `Transport`."""
        if self._known(endpoint):
            return
        check_endpoint(mine := registered(self._endpoint), endpoint)
        parts = in_common(mine.memory, endpoint.memory)
        self._connect(endpoint)
        if parts != (mine.memory, endpoint.memory):
            self._parts[endpoint.agent_id] = parts

    def connect_part(self, endpoint: TransferEndpoint, own: KvMemoryRegion | None) -> None:
        """See `Transport`."""
        if self._known(endpoint):
            return
        if own is None:
            check_agent(registered(self._endpoint), endpoint)
            self._connect(replace(endpoint, memory=replace(endpoint.memory, num_blocks=0)))
            return
        check_endpoint(replace(registered(self._endpoint), memory=own), endpoint)
        parts = in_common(own, endpoint.memory)
        self._connect(endpoint)
        self._parts[endpoint.agent_id] = parts

    def _known(self, endpoint: TransferEndpoint) -> bool:
        """Whether a peer is connected already; it is refused no longer then."""
        if endpoint.agent_id in self._peers:
            self._hub.set_fence(self._agent_id, endpoint.agent_id, closed=False)
        return endpoint.agent_id in self._peers

    def _connect(self, endpoint: TransferEndpoint) -> None:
        if not self._hub.present(endpoint.agent_id):
            raise TransferError(f"agent {endpoint.agent_id} cannot be reached")
        self._hub.set_fence(self._agent_id, endpoint.agent_id, closed=False)
        self._parts.pop(endpoint.agent_id, None)
        self._peers[endpoint.agent_id] = endpoint

    def disconnect(self, agent_id: str) -> None:
        """See `Transport`."""
        self._peers.pop(agent_id, None)
        lost = [write for write in self._pending if write.agent_id == agent_id]
        self._failed += [WriteResult(write.handle, f"agent {agent_id} was disconnected") for write in lost]
        self._pending = deque(write for write in self._pending if write.agent_id != agent_id)

    def refuse(self, agent_id: str) -> None:
        """See `Transport`."""
        self._hub.set_fence(self._agent_id, agent_id, closed=True)

    def connected(self) -> frozenset[str]:
        """See `Transport`."""
        return frozenset(self._peers)

    def write(
        self,
        agent_id: str,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
        notification: bytes | None = None,
    ) -> int:
        """See `Transport`."""
        peer, mine = connected_peer(self._peers, agent_id), registered(self._endpoint)
        parts = self._parts.get(agent_id)
        own, theirs = parts or (mine.memory, peer.memory)
        check_blocks(local_blocks, own.num_sub_blocks, remote_blocks, theirs.num_sub_blocks)
        check_notification(notification)
        runs = merge_runs(local_blocks, remote_blocks)
        if parts is not None and not pieces_touch(*parts):
            runs = [Run(*pair, 1) for pair in zip(local_blocks, remote_blocks, strict=True)]
        handle = self._next_handle
        self._next_handle += 1
        self._descriptors += len(runs) * (len(own.rows) // own.divisions)
        self._pending.append(_PendingWrite(handle, agent_id, runs, notification, parts))
        return handle

    def notify(self, agent_id: str, notification: bytes) -> None:
        """See `Transport`."""
        connected_peer(self._peers, agent_id)
        check_notification(notification)
        if problem := self._hub.deliver(self._agent_id, agent_id, (), notification):
            self._peers.pop(agent_id, None)
            raise TransferError(problem)

    def poll(self) -> PollResult:
        """See `Transport`."""
        result = PollResult(writes=self._failed)
        self._failed = []
        while self._pending:
            write = self._pending.popleft()
            problem = self._hub.deliver(
                self._agent_id, write.agent_id, write.runs, write.notification, write.parts
            )
            if problem is not None:
                self._peers.pop(write.agent_id, None)
            result.writes.append(WriteResult(write.handle, problem))
        result.notifications = self._hub.collect(self._agent_id)
        return result

    def close(self) -> None:
        """See `Transport`."""
        self._hub.leave(self._agent_id)
        self._peers.clear()
        self._pending.clear()
        self._failed.clear()

    @property
    def descriptors_posted(self) -> int:
        """See `Transport`."""
        return self._descriptors
