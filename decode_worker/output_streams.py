"""The output streams, one per coordinator: all outputs of a step for one coordinator in one message.

A stream that breaks leaves the coordinator's requests running; their output is kept for the next stream. When none has
come by the end of the lease, the coordinator counts as lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping

from decode_worker.attachment import Attachment
from decode_worker.kept_outputs import KeptOutputs
from splitserve.logs import log_event
from splitserve.v1 import decode_pb2

MAX_KEPT_BYTES = 64 * 2**20
"""Most output that is kept: for all coordinators whose streams are broken, and of what one has been sent and does not
acknowledge. A coordinator that exceeds it counts as lost at once."""


class OutputStream:
    """One stream of one coordinator. Read `messages` after `rewind`."""

    def __init__(self, outputs: _CoordinatorOutputs, number: int) -> None:
        """Opens it in place of an older one. Raises FailedPreconditionError (STALE_ATTACHMENT)."""
        self.outputs = outputs
        self._stream = outputs.attachment.open(number)
        self._wake = asyncio.Event()
        self._closed = False

    def rewind(self, positions: Mapping[str, int], live: Collection[str]) -> list[str]:
        """See `KeptOutputs.rewind`. Does nothing once the stream is closed."""
        return [] if self._closed else self.outputs.kept.rewind(positions, live)

    def wake(self) -> None:
        """Tells the reader that there is output."""
        self._wake.set()

    def close(self) -> None:
        """Ends the iteration; what is kept stays."""
        self._closed = True
        self._wake.set()

    def end(self, now: float) -> bool:
        """The stream has broken. False if it had been replaced before."""
        self.close()
        return self.outputs.attachment.close(self._stream, now)

    async def messages(self) -> AsyncIterator[decode_pb2.StreamOutputsResponse]:
        """Yields messages whenever there is output, until the stream is closed."""
        keep = self.outputs.attachment.resumes
        while not self._closed:
            while not self._closed and (message := self.outputs.kept.take(keep=keep)) is not None:
                yield message
            await self._wake.wait()
            self._wake.clear()


class _CoordinatorOutputs:
    """What belongs to one coordinator from its first stream until it is lost."""

    def __init__(self, coordinator_id: str, lease_s: float) -> None:
        self.coordinator_id = coordinator_id
        self.attachment = Attachment(lease_s)
        self.kept = KeptOutputs()
        self.reader: OutputStream | None = None
        """The open stream."""
        self.lease: asyncio.TimerHandle | None = None
        self.detached_bytes = 0
        """Size of what is kept while no stream is open."""

    def attach(self, number: int) -> OutputStream:
        stream = OutputStream(self, number)
        self.stop()
        self.reader, self.detached_bytes = stream, 0
        return stream

    def stop(self) -> None:
        """Ends the stream or the lease, whichever there is."""
        if self.lease is not None:
            self.lease.cancel()
        if self.reader is not None:
            self.reader.close()
        self.lease = self.reader = None

    def put(self, batch: list[decode_pb2.SequenceOutput]) -> None:
        if self.reader is None:
            self.detached_bytes += sum(output.ByteSize() for output in batch)
        self.kept.put(batch)
        if self.reader is not None:
            self.reader.wake()


class OutputStreams:
    """The streams of all coordinators. `on_lost` is called with the id of each coordinator that is lost."""

    def __init__(self, on_lost: Callable[[str], None], lease_s: float) -> None:
        self._on_lost = on_lost
        self._lease_s = lease_s
        self._coordinators: dict[str, _CoordinatorOutputs] = {}

    def open(self, coordinator_id: str, number: int) -> OutputStream:
        """Opens a stream; an older one of the same coordinator ends.

        Raises FailedPreconditionError (STALE_ATTACHMENT) if a newer one was opened before.
        """
        outputs = self._coordinators.get(coordinator_id)
        if outputs is None:
            outputs = self._coordinators[coordinator_id] = _CoordinatorOutputs(coordinator_id, self._lease_s)
        return outputs.attach(number)

    def release(self, stream: OutputStream) -> None:
        """A stream has broken: the coordinator's lease begins, unless the stream has been replaced."""
        outputs, loop = stream.outputs, asyncio.get_running_loop()
        if not stream.end(loop.time()) or self._coordinators.get(outputs.coordinator_id) is not outputs:
            return
        if not outputs.attachment.resumes:
            self._lose(outputs)
            return
        outputs.reader, outputs.detached_bytes = None, outputs.kept.total_bytes
        outputs.lease = loop.call_at(outputs.attachment.lease_end_s, self._lose, outputs)
        log_event("outputs.detached", coordinator_id=outputs.coordinator_id, lease_s=self._lease_s)

    def takes(self, coordinator_id: str, number: int) -> bool:
        """Whether a request of this coordinator may begin whose output goes to this stream."""
        outputs = self._coordinators.get(coordinator_id)
        return outputs is not None and outputs.attachment.takes(number)

    def deliver(self, outputs: dict[str, list[decode_pb2.SequenceOutput]]) -> None:
        """Adds one step's outputs, by coordinator id."""
        for coordinator_id, batch in outputs.items():
            if (coordinator := self._coordinators.get(coordinator_id)) is None:
                continue
            coordinator.put(batch)
            kept = self._detached_bytes() if coordinator.reader is None else coordinator.kept.sent_bytes
            if kept > MAX_KEPT_BYTES:
                self._lose(coordinator)

    def acknowledge(self, coordinator_id: str, number: int, messages: int) -> None:
        """See DecodeService.AcknowledgeOutputs in the proto."""
        outputs = self._coordinators.get(coordinator_id)
        if outputs is not None and outputs.attachment.takes(number):
            outputs.kept.acknowledge(messages)

    def close_all(self) -> None:
        """Ends all streams and leases; the process ends."""
        for outputs in self._coordinators.values():
            outputs.stop()
        self._coordinators.clear()

    def _detached_bytes(self) -> int:
        return sum(outputs.detached_bytes for outputs in self._coordinators.values())

    def _lose(self, outputs: _CoordinatorOutputs) -> None:
        outputs.stop()
        del self._coordinators[outputs.coordinator_id]
        log_event("coordinator.lost", coordinator_id=outputs.coordinator_id)
        self._on_lost(outputs.coordinator_id)
