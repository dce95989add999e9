"""A transport within one process. Deterministic.

Bytes are copied between the registered addresses. It keeps every rule of `Transport`, and its fence is
stricter than that of hardware: once an owner refuses a writer, no write of it arrives.
"""

from __future__ import annotations

import ctypes
import threading
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from typing_extensions import override

from kv_transfer.transports.regions import KvMemoryRegion, Run, check_blocks, check_memory, merge_runs
from kv_transfer.transports.transport import (
    PollResult,
    TransferEndpoint,
    Transport,
    WriteResult,
    check_endpoint,
    check_notification,
    connected_peer,
    registered,
)
from splitserve.errors import FailedPreconditionError, TransferError

_Sides: TypeAlias = tuple[KvMemoryRegion, KvMemoryRegion]
"""What is written, and where to."""


@dataclass(slots=True)
class _Member:
    """The hub's state of one agent."""

    inbox: deque[tuple[str, bytes]] = field(default_factory=deque)
    fenced: set[str] = field(default_factory=set)


class MemoryHub:
    """Connects the memory transports of one process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: dict[str, _Member] = {}

    def join(self, agent_id: str) -> None:
        """Makes an agent reachable."""
        with self._lock:
            self._members[agent_id] = _Member()

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
        self, sender: str, to: str, runs: Sequence[Run], notification: bytes | None, sides: _Sides
    ) -> str | None:
        """Copies runs of blocks, then queues the notification. Returns the problem, or None on success."""
        with self._lock:
            target = self._members.get(to)
            if sender not in self._members or target is None or sender in target.fenced:
                return f"agent {to} is gone"
            for run in runs:
                _copy(*sides, run)
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
    size = theirs.layout.block_bytes
    target, source = theirs.base_address + run.remote * size, mine.base_address + run.local * size
    ctypes.memmove(target, source, run.length * size)


@dataclass(frozen=True, slots=True)
class _PendingWrite:
    handle: int
    agent_id: str
    runs: list[Run]
    notification: bytes | None
    sides: _Sides


class MemoryTransport(Transport):
    """One agent of a `MemoryHub`. A write is executed by the writer's next `poll`."""

    kind = "memory"

    def __init__(self, hub: MemoryHub) -> None:
        self._hub = hub
        self._agent_id = str(uuid.uuid4())
        self._endpoint: TransferEndpoint | None = None
        self._peers: dict[str, _Sides] = {}
        self._pending: deque[_PendingWrite] = deque()
        self._failed: list[WriteResult] = []
        self._next_handle = 1

    @override
    def register_memory(self, memory: KvMemoryRegion) -> TransferEndpoint:
        if self._endpoint is not None:
            raise FailedPreconditionError("the memory is registered already")
        check_memory(memory)
        self._hub.join(self._agent_id)
        self._endpoint = TransferEndpoint(self._agent_id, self.kind, b"", memory)
        return self._endpoint

    @override
    def connect(self, endpoint: TransferEndpoint) -> None:
        if endpoint.agent_id not in self._peers:
            mine = registered(self._endpoint)
            check_endpoint(mine, endpoint)
            if not self._hub.present(endpoint.agent_id):
                raise TransferError(f"agent {endpoint.agent_id} cannot be reached")
            self._peers[endpoint.agent_id] = mine.memory, endpoint.memory
        self._hub.set_fence(self._agent_id, endpoint.agent_id, closed=False)

    @override
    def disconnect(self, agent_id: str) -> None:
        self._peers.pop(agent_id, None)
        lost = [write for write in self._pending if write.agent_id == agent_id]
        self._failed += [WriteResult(write.handle, f"agent {agent_id} was disconnected") for write in lost]
        self._pending = deque(write for write in self._pending if write.agent_id != agent_id)

    @override
    def refuse(self, agent_id: str) -> None:
        self._hub.set_fence(self._agent_id, agent_id, closed=True)

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
        own, theirs = connected_peer(self._peers, agent_id)
        check_blocks(local_blocks, own.num_blocks, remote_blocks, theirs.num_blocks)
        check_notification(notification)
        runs = merge_runs(local_blocks, remote_blocks)
        handle = self._next_handle
        self._next_handle += 1
        self.descriptors_posted += len(runs)
        self._pending.append(_PendingWrite(handle, agent_id, runs, notification, (own, theirs)))
        return handle

    @override
    def notify(self, agent_id: str, notification: bytes) -> None:
        sides = connected_peer(self._peers, agent_id)
        check_notification(notification)
        if problem := self._hub.deliver(self._agent_id, agent_id, (), notification, sides):
            self._peers.pop(agent_id, None)
            raise TransferError(problem)

    @override
    def poll(self) -> PollResult:
        result = PollResult(writes=self._failed)
        self._failed = []
        while self._pending:
            write = self._pending.popleft()
            problem = self._hub.deliver(
                self._agent_id, write.agent_id, write.runs, write.notification, write.sides
            )
            if problem is not None:
                self._peers.pop(write.agent_id, None)
            result.writes.append(WriteResult(write.handle, problem))
        result.notifications = self._hub.collect(self._agent_id)
        return result

    @override
    def close(self) -> None:
        self._hub.leave(self._agent_id)
        self._peers.clear()
        self._pending.clear()
        self._failed.clear()
