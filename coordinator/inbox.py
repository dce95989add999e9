"""Where everything that workers say about one attempt comes together, in order of arrival."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.pools import WorkerKey
from coordinator.pulse import Pulse
from splitserve.errors import SplitserveError
from splitserve.output_merging import extend_output
from splitserve.v1 import decode_pb2, prefill_pb2

MERGE_FROM = 16
"""Events that may wait unread before output is merged: a client that lags gets it in one piece anyway."""


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """A worker gave the attempt up, or is gone."""

    worker: WorkerKey
    error: SplitserveError


WorkerEvent = prefill_pb2.FirstToken | prefill_pb2.HandoffDone | decode_pb2.SequenceOutput | WorkerFailed


class Inbox:
    """An unbounded queue that cannot grow without bound: a token is in it once at most, so it holds no more than the
    request's `max_tokens`, and what a lagging client leaves unread is merged, so that a token takes little more than
    its text. A bound below that would let one slow client block the output stream that it shares with everybody else.
    """

    def __init__(self, on_finished: Callable[[], None] = lambda: None) -> None:
        self._events: list[WorkerEvent] = []
        self._is_shown = False
        """Whether what has come may be taken."""
        self._waiter: asyncio.Future[None] | None = None
        self._on_finished = on_finished

    def put(self, event: WorkerEvent, pulse: Pulse | None = None) -> None:
        """Adds an event; never blocks. Calls `on_finished` with the last output of a decode worker.

        Plain output between the first and the last may wait for the next beat of `pulse`.
        """
        if isinstance(event, decode_pb2.SequenceOutput):
            if not self._merged(event):
                self._events.append(event)
            if event.delta.finish_reason:
                self._on_finished()
        else:
            self._events.append(event)
        if pulse is not None and isinstance(event, decode_pb2.SequenceOutput) and _is_plain(event):
            pulse.wake(self._show)
        else:
            self._show()

    def _merged(self, event: decode_pb2.SequenceOutput) -> bool:
        if len(self._events) < MERGE_FROM:
            return False
        last = self._events[-1]
        return isinstance(last, decode_pb2.SequenceOutput) and extend_output(last, event)

    def take_all(self) -> list[WorkerEvent]:
        """Everything that has come since the last time, oldest first; nothing while it is held for the next beat."""
        if not self._is_shown:
            return []
        events, self._events = self._events, []
        self._is_shown = False
        return events

    async def wait(self) -> None:
        """Returns as soon as there is something to take. One task may wait at a time."""
        if not self._is_shown:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _show(self) -> None:
        self._is_shown = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _is_plain(event: decode_pb2.SequenceOutput) -> bool:
    """Neither the end nor the first token of an answer."""
    return not event.delta.finish_reason and event.delta.first_position > 0
