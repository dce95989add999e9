"""The output for one coordinator that it has not acknowledged: waiting to be sent, or sent and perhaps lost. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping

from splitserve.generation.output_delta import extend_output
from splitserve.v1 import decode_pb2

MAX_MESSAGE_BYTES = 2**20
"""Outputs that have accumulated leave in messages of this size, or of one output."""


class KeptOutputs:
    """Outputs in order, as messages that are kept until they are acknowledged.

    Everything since the last message is sent together, and the outputs of one request are merged. So a slow reader gets
    fewer, larger messages, and what waits is bounded by the `max_tokens` of the live requests. A sent message is not
    changed any more, so what a coordinator has received always ends where an output ends.
    """

    def __init__(self) -> None:
        self.sent_bytes = 0
        """Size of the messages that are sent and not acknowledged."""
        self._pending: list[decode_pb2.SequenceOutput] = []
        self._latest: dict[str, decode_pb2.SequenceOutput] = {}
        """The last pending output of each request."""
        self._sent: deque[tuple[decode_pb2.StreamOutputsResponse, int]] = deque()
        self._acknowledged = 0
        """Messages of the present stream that are no longer kept."""

    @property
    def total_bytes(self) -> int:
        """Size of all that is kept. Costs O(pending)."""
        return self.sent_bytes + sum(output.ByteSize() for output in self._pending)

    def put(self, outputs: Iterable[decode_pb2.SequenceOutput]) -> None:
        """Adds outputs, and takes them over."""
        for output in outputs:
            before = self._latest.get(output.request_id)
            if before is None or not extend_output(before, output):
                self._pending.append(output)
                self._latest[output.request_id] = output

    def take(self, *, keep: bool = True) -> decode_pb2.StreamOutputsResponse | None:
        """The next message to send; None if there is none. It is kept until it is acknowledged, unless not `keep`."""
        if not self._pending:
            return None
        message = decode_pb2.StreamOutputsResponse(outputs=self._pending)
        rest: list[decode_pb2.SequenceOutput] = []
        size = message.ByteSize()
        if size > MAX_MESSAGE_BYTES and len(self._pending) > 1:
            count = _fitting(self._pending)
            rest = self._pending[count:]
            message = decode_pb2.StreamOutputsResponse(outputs=self._pending[:count])
            size = message.ByteSize()
        self._pending = []
        self._latest.clear()
        self.put(rest)
        if keep:
            self._sent.append((message, size))
            self.sent_bytes += size
        return message

    def acknowledge(self, messages: int) -> None:
        """The coordinator has received so many messages of the present stream. Idempotent, in any order."""
        while self._sent and self._acknowledged < messages:
            self.sent_bytes -= self._sent.popleft()[1]
            self._acknowledged += 1

    def rewind(self, positions: Mapping[str, int], live: Collection[str]) -> list[str]:
        """Begins the next stream: what was sent and not received is to be sent again, before what waits.

        `positions` has the requests that the coordinator still wants, each with the position after the last token that
        it has received. Returns those that are neither `live` nor have their last output here: they are lost.
        """
        outputs = [output for message, _ in self._sent for output in message.outputs]
        outputs += self._pending
        self.clear()
        wanted = [output for output in outputs if _is_wanted(output, positions)]
        self.put(wanted)
        ended = {output.request_id for output in wanted if output.delta.finish_reason}
        return [name for name in positions if name not in live and name not in ended]

    def clear(self) -> None:
        """Forgets everything."""
        self._pending = []
        self._latest.clear()
        self._sent.clear()
        self.sent_bytes = self._acknowledged = 0


def _fitting(outputs: list[decode_pb2.SequenceOutput]) -> int:
    """How many of the first outputs fit in a message; at least one."""
    size = 0
    for count, output in enumerate(outputs):
        size += output.ByteSize()
        if size > MAX_MESSAGE_BYTES and count:
            return count
    return len(outputs)


def _is_wanted(output: decode_pb2.SequenceOutput, positions: Mapping[str, int]) -> bool:
    """Whether the coordinator wants an output. One without tokens may be repeated: it is the first or the last."""
    position = positions.get(output.request_id)
    if position is None:
        return False
    return not output.delta.token_ids or output.delta.first_position >= position
