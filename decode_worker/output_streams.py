"""One output stream per coordinator: everything a step produced for it in one message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from splitserve.output_merging import extend_output
from splitserve.v1 import decode_pb2


class OutputStream:
    """Outputs waiting to be sent to one coordinator.

    What the engine produced since the last send goes out together, what belongs to one request as one output, so a
    slow reader costs fewer messages and fewer pieces. Memory is bounded by the `max_tokens` of the requests that are
    alive.
    """

    def __init__(self) -> None:
        self._pending: list[decode_pb2.SequenceOutput] = []
        self._latest: dict[str, decode_pb2.SequenceOutput] = {}
        """The last pending output of each request."""
        self._wake = asyncio.Event()
        self._closed = False

    def put(self, outputs: list[decode_pb2.SequenceOutput]) -> None:
        """Queues outputs; dropped once the stream is closed, for nobody will read them."""
        if self._closed:
            return
        for output in outputs:
            before = self._latest.get(output.request_id)
            if before is None or not extend_output(before, output):
                self._pending.append(output)
                self._latest[output.request_id] = output
        self._wake.set()

    def close(self) -> None:
        """Ends iteration, what is pending included."""
        self._closed = True
        self._pending.clear()
        self._wake.set()

    async def batches(self) -> AsyncIterator[list[decode_pb2.SequenceOutput]]:
        """Yields what has gathered, until closed."""
        while not self._closed:
            await self._wake.wait()
            self._wake.clear()
            if self._pending:
                batch, self._pending = self._pending, []
                self._latest.clear()
                yield batch


class OutputStreams:
    """The open streams, by coordinator id."""

    def __init__(self, on_lost: Callable[[str], None]) -> None:
        self._streams: dict[str, OutputStream] = {}
        self._on_lost = on_lost

    def open(self, coordinator_id: str) -> OutputStream:
        """Opens a stream, replacing an older one of the same coordinator."""
        if older := self._streams.pop(coordinator_id, None):
            older.close()
            self._on_lost(coordinator_id)
        stream = self._streams[coordinator_id] = OutputStream()
        return stream

    def release(self, coordinator_id: str, stream: OutputStream) -> None:
        """Forgets a stream that broke, unless it was replaced already."""
        stream.close()
        if self._streams.get(coordinator_id) is stream:
            del self._streams[coordinator_id]
            self._on_lost(coordinator_id)

    def is_open(self, coordinator_id: str) -> bool:
        """Whether output can reach this coordinator."""
        return coordinator_id in self._streams

    def deliver(self, outputs: dict[str, list[decode_pb2.SequenceOutput]]) -> None:
        """Hands one step's outputs, grouped by coordinator id, to their streams."""
        for coordinator_id, batch in outputs.items():
            if stream := self._streams.get(coordinator_id):
                stream.put(batch)

    def close_all(self) -> None:
        """Ends every stream."""
        for stream in self._streams.values():
            stream.close()
