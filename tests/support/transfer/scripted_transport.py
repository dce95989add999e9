"""A transport whose writes end when, and how, the test says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.transports.regions import KvMemoryRegion, merge_runs
from kv_transfer.transports.transport import PollResult, TransferEndpoint, Transport, WriteResult
from splitserve.errors import TransferError


@dataclass(frozen=True, slots=True)
class PostedWrite:
    """What was given to `write`."""

    agent_id: str
    local: tuple[int, ...]
    remote: tuple[int, ...]
    notification: bytes | None


class ScriptedTransport(Transport):
    """Records what is posted. `end` lets a write end; the next `poll` reports it."""

    kind = "scripted"

    def __init__(self, *peers: str) -> None:
        self.peers = set(peers)
        self.refused: set[str] = set()
        self.writes: dict[int, PostedWrite] = {}
        self.open: set[int] = set()
        self.sent: list[tuple[str, bytes]] = []
        self.refuse_writes: str | None = None
        self._result = PollResult()

    def end(self, handle: int, error: str | None = None, *, in_doubt: bool = False) -> None:
        """Ends an open write; its notification counts as sent when there is no error."""
        self.open.remove(handle)
        self._result.writes.append(WriteResult(handle, error, in_doubt))
        write = self.writes[handle]
        if error is None and write.notification is not None:
            self.sent.append((write.agent_id, write.notification))

    def end_all(self) -> None:
        """Ends every open write well."""
        for handle in sorted(self.open):
            self.end(handle)

    def register_memory(self, pool: KvMemoryRegion) -> TransferEndpoint:
        return TransferEndpoint("self", self.kind, b"", pool)

    def connect(self, endpoint: TransferEndpoint) -> None:
        self.peers.add(endpoint.agent_id)

    def disconnect(self, agent_id: str) -> None:
        self.peers.discard(agent_id)
        for handle in [h for h in self.open if self.writes[h].agent_id == agent_id]:
            self.end(handle, "disconnected", in_doubt=True)

    def refuse(self, agent_id: str) -> None:
        self.refused.add(agent_id)

    def connected(self) -> frozenset[str]:
        return frozenset(self.peers)

    def write(
        self,
        agent_id: str,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
        notification: bytes | None = None,
        group_blocks: Sequence[int] = (),
    ) -> int:
        if self.refuse_writes is not None:
            raise TransferError(self.refuse_writes)
        handle = len(self.writes) + 1
        self.writes[handle] = PostedWrite(agent_id, tuple(local_blocks), tuple(remote_blocks), notification)
        self.open.add(handle)
        self.descriptors_posted += len(merge_runs(local_blocks, remote_blocks))
        return handle

    def notify(self, agent_id: str, notification: bytes) -> None:
        if agent_id not in self.peers:
            raise TransferError(f"{agent_id} is unknown")
        self.sent.append((agent_id, notification))

    def poll(self) -> PollResult:
        result, self._result = self._result, PollResult()
        return result

    def close(self) -> None:
        self.peers.clear()
