"""Receives the ucx transport's control messages: bounded, and in order within a session."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.transports.ucx.binding import Operation, UcxWorker
from kv_transfer.transports.ucx.messages import CONTROL_MASK, MAX_CONTROL_BYTES, Kind, Tag

MAX_PENDING = 1024
"""Most control messages of one session that may be in reception."""


@dataclass(slots=True)
class _Pending:
    buffer: npt.NDArray[np.uint8]
    operation: Operation


class UcxInbox:
    """Receives control messages and discards messages that belong to no known write."""

    def __init__(self, worker: UcxWorker) -> None:
        self._worker = worker
        self._pending: dict[tuple[int, int], deque[_Pending]] = {}
        self._discarding: list[Operation] = []
        self.discarded = 0
        """Number of messages that matched nothing or were too long."""

    def collect(self) -> list[tuple[Tag, bytes]]:
        """(tag, bytes) of completely received control messages. A partial one delays only its own session."""
        while found := self._worker.probe(CONTROL_MASK, CONTROL_MASK):
            value, length = found
            tag = Tag.parse(value)
            queue = self._pending.setdefault((tag.kind, tag.session), deque())
            if (
                length > MAX_CONTROL_BYTES
                or len(queue) >= MAX_PENDING
                or tag.kind not in (Kind.CALL, Kind.REPLY)
            ):
                self.discard(value)
                continue
            buffer = np.zeros(max(1, length), dtype=np.uint8)
            queue.append(_Pending(buffer[:length], self._worker.receive(buffer, value)))
        whole: list[tuple[Tag, bytes]] = []
        for key, queue in list(self._pending.items()):
            while queue and queue[0].operation.done:
                item = queue.popleft()
                if item.operation.problem() is None:
                    whole.append((Tag(*key), item.buffer.tobytes()))
            if not queue:
                del self._pending[key]
        self._discarding = [operation for operation in self._discarding if not operation.done]
        return whole

    def waits_for(self, session: int) -> bool:
        """Whether a control message of this caller is partially received."""
        return (Kind.CALL, session) in self._pending

    def head(self) -> tuple[int, int] | None:
        """(tag, length) of the oldest message without a posted receive, or None."""
        return self._worker.probe(0, 0)

    def discard(self, tag: int) -> None:
        """Drops the oldest message with this tag, of any length; this also completes its send at the sender."""
        self.discarded += 1
        self._discarding.append(self._worker.receive(np.zeros(1, dtype=np.uint8), tag))

    def close(self) -> None:
        """Drops all arrived messages, so that closing the worker waits for none."""
        while found := self._worker.probe(0, 0):
            self.discard(found[0])
        self._pending.clear()
        self._discarding.clear()
