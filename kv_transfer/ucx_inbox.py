"""Receiving the ucx transport's control messages: bounded, and in order within a session."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.ucx_binding import Operation, UcxWorker
from kv_transfer.ucx_messages import CONTROL_MASK, MAX_CONTROL_BYTES, Kind, Tag

MAX_PENDING = 1024
"""Control messages of one session that are being received."""


@dataclass(slots=True)
class _Pending:
    buffer: npt.NDArray[np.uint8]
    operation: Operation


class UcxInbox:
    """Everything that has arrived and is not the bytes of a known write."""

    def __init__(self, worker: UcxWorker) -> None:
        self._worker = worker
        self._pending: dict[tuple[int, int], deque[_Pending]] = {}
        self._scrap: list[Operation] = []
        self.discarded = 0
        """Messages that belonged to nothing, or were too long."""

    def collect(self) -> list[tuple[Tag, bytes]]:
        """Control messages that are here whole: (tag, bytes). One half-sent holds up its own session only."""
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
            while queue and queue[0].operation.over:
                item = queue.popleft()
                if item.operation.problem() is None:
                    whole.append((Tag(*key), item.buffer.tobytes()))
            if not queue:
                del self._pending[key]
        self._scrap = [operation for operation in self._scrap if not operation.over]
        return whole

    def waits_for(self, session: int) -> bool:
        """Whether a caller's control message is only half here."""
        return (Kind.CALL, session) in self._pending

    def head(self) -> tuple[int, int] | None:
        """(tag, length) of the oldest message that nobody has received yet."""
        return self._worker.probe(0, 0)

    def discard(self, tag: int) -> None:
        """Drops the first message of this tag, of any length; its sender is done with it then."""
        self.discarded += 1
        self._scrap.append(self._worker.receive(np.zeros(1, dtype=np.uint8), tag))

    def close(self) -> None:
        """Drops everything that is here, so that nothing is waited for when the worker ends."""
        while found := self._worker.probe(0, 0):
            self.discard(found[0])
        self._pending.clear()
        self._scrap.clear()
