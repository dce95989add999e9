"""Collects what both workers send for one attempt, in order of arrival."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.workers.output_coalescer import OutputCoalescer
from coordinator.workers.snapshot import WorkerKey
from splitserve.errors import SplitserveError
from splitserve.generation.output_delta import extend_output
from splitserve.v1 import decode_pb2, generation_pb2, prefill_pb2

MERGE_FROM = 16
"""Unread events from which on output is merged: a slow client gets it in one message anyway."""


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker failed the attempt, or was lost."""

    worker: WorkerKey
    error: SplitserveError


WorkerEvent = prefill_pb2.FirstToken | prefill_pb2.HandoffDone | decode_pb2.SequenceOutput | WorkerFailed


class OutputCollector:
    """A queue with one reader. It has no explicit bound, yet cannot grow without limit: it holds each token once, at
    most the request's `max_tokens`, and merges what a slow client leaves unread, so that a token takes little more
    than its text. A lower bound would let one slow client block the output stream that all requests share.
    """

    def __init__(self, on_finished: Callable[[], None] = lambda: None) -> None:
        self._events: list[WorkerEvent] = []
        self._readable = False
        """Whether the events may be taken now."""
        self._waiter: asyncio.Future[None] | None = None
        self._on_finished = on_finished
        self.next_position = 0
        """Position after the last token that has come from the decode worker; 0 before the first."""
        self.ended = False
        """Whether the decode worker's last output has come."""

    def put(self, event: WorkerEvent, coalescer: OutputCoalescer | None = None) -> None:
        """Adds an event; never blocks. Calls `on_finished` on the decode worker's last output.

        Output that has come before is dropped. Output between the first and the last may be held back by `coalescer`.
        """
        if isinstance(event, decode_pb2.SequenceOutput):
            if not self._is_new(event.delta):
                return
            if not self._merged(event):
                self._events.append(event)
            if event.delta.finish_reason:
                self._on_finished()
        else:
            self._events.append(event)
        if coalescer is not None and isinstance(event, decode_pb2.SequenceOutput) and _is_plain(event):
            coalescer.schedule(self._release)
        else:
            self._release()

    def _is_new(self, delta: generation_pb2.OutputDelta) -> bool:
        if self.ended:
            return False
        if count := len(delta.token_ids):
            if delta.first_position < self.next_position:
                return False
            self.next_position = delta.first_position + count
        self.ended = bool(delta.finish_reason)
        return True

    def _merged(self, event: decode_pb2.SequenceOutput) -> bool:
        if len(self._events) < MERGE_FROM:
            return False
        last = self._events[-1]
        return isinstance(last, decode_pb2.SequenceOutput) and extend_output(last, event)

    def take_all(self) -> list[WorkerEvent]:
        """All events since the last call, oldest first; none while the coalescer holds them back."""
        if not self._readable:
            return []
        events, self._events = self._events, []
        self._readable = False
        return events

    async def wait(self) -> None:
        """Returns once there are events to take. Only one task may wait at a time."""
        if not self._readable:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _release(self) -> None:
        self._readable = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _is_plain(event: decode_pb2.SequenceOutput) -> bool:
    """Whether the output is neither the first nor the last of an answer."""
    return not event.delta.finish_reason and event.delta.first_position > 0
