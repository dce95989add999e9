"""A transport that can be polled in the middle of a step: what arrives waits for the next `poll`."""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.transports.transport import KvMemoryRegion, PollResult, TransferEndpoint, Transport


class BufferedTransport(Transport):
    """Wraps a transport that has no progress thread. Used on one thread, as every transport."""

    def __init__(self, inner: Transport) -> None:
        self.kind = inner.kind
        self._inner = inner
        self._kept = PollResult()

    def progress(self) -> None:
        """Lets transfers go on; keeps what ended and arrived for `poll`."""
        found = self._inner.poll()
        self._kept.writes += found.writes
        self._kept.notifications += found.notifications

    def poll(self) -> PollResult:
        """See `Transport`. What was kept comes first."""
        self.progress()
        found, self._kept = self._kept, PollResult()
        return found

    def disconnect(self, agent_id: str) -> None:
        """See `Transport`."""
        self._inner.disconnect(agent_id)

    def refuse(self, agent_id: str) -> None:
        """See `Transport`. Notifications of the peer that were kept are dropped, too."""
        self._inner.refuse(agent_id)
        self._kept.notifications = [kept for kept in self._kept.notifications if kept[0] != agent_id]

    def register_memory(self, memory: KvMemoryRegion) -> TransferEndpoint:
        """See `Transport`."""
        return self._inner.register_memory(memory)

    def connect(self, endpoint: TransferEndpoint) -> None:
        """See `Transport`."""
        self._inner.connect(endpoint)

    def connected(self) -> frozenset[str]:
        """See `Transport`."""
        return self._inner.connected()

    def write(
        self,
        agent_id: str,
        local_blocks: Sequence[int],
        remote_blocks: Sequence[int],
        notification: bytes | None = None,
    ) -> int:
        """See `Transport`."""
        return self._inner.write(agent_id, local_blocks, remote_blocks, notification)

    def notify(self, agent_id: str, notification: bytes) -> None:
        """See `Transport`."""
        self._inner.notify(agent_id, notification)

    def close(self) -> None:
        """See `Transport`."""
        self._inner.close()

    @property
    def descriptors_posted(self) -> int:
        """See `Transport`."""
        return self._inner.descriptors_posted

    @property
    def needs_poll(self) -> bool:
        """See `Transport`."""
        return bool(self._kept.writes or self._kept.notifications) or self._inner.needs_poll
