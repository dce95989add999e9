"""Where everything that workers say about one attempt comes together, in order of arrival."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from coordinator.pools import WorkerKey
from splitserve.errors import SplitserveError
from splitserve.v1 import decode_pb2, prefill_pb2


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker gave the attempt up, or is gone."""

    worker: WorkerKey
    error: SplitserveError


WorkerEvent = prefill_pb2.FirstToken | prefill_pb2.HandoffDone | decode_pb2.SequenceOutput | WorkerFailed


class Inbox:
    """An unbounded queue that cannot grow without bound: a token is in it once at most, so it holds no
    more than the request's `max_tokens`. A bound below that would let one slow client block the output
    stream that it shares with everybody else."""

    def __init__(self) -> None:
        self._events: list[WorkerEvent] = []
        self._wake = asyncio.Event()

    def put(self, event: WorkerEvent) -> None:
        """Adds an event; never blocks."""
        self._events.append(event)
        self._wake.set()

    def take_all(self) -> list[WorkerEvent]:
        """Everything that has come since the last time, oldest first."""
        events, self._events = self._events, []
        self._wake.clear()
        return events

    async def wait(self) -> None:
        """Returns as soon as there is something to take."""
        await self._wake.wait()
