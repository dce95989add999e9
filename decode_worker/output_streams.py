"""The output streams, one per coordinator: all outputs of a step for one coordinator in one message.

A stream that breaks leaves the coordinator's requests running; their output is kept for the next stream. When none has
come by the end of the lease, the coordinator counts as lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence

from splitserve.errors import FailedPreconditionError
from splitserve.generation.output_delta import News, TokenDelta, output_of, rows_of
from splitserve.logs import log_event
from splitserve.v1 import decode_pb2, generation_pb2

MAX_MESSAGE_BYTES = 2**20
"""Most bytes of a message, unless it has one output only."""
ROW_BYTES, TOKEN_BYTES = 250, 36
"""Memory of a row beside its id, text and tokens, and of a token, until it is sent; a message has fewer bytes."""


Row = tuple[str, News]
"""A request's id, and its progress."""


class KeptOutputs:
    """Outputs in order, as messages that are kept until they are acknowledged.

    Everything since the last message is sent together, and the deltas of one request are merged. So a slow reader gets
    fewer, larger messages, and what waits is bounded by the `max_tokens` of the live requests. A sent message is not
    changed any more, so what a coordinator has received always ends where an output ends.
    """

    def __init__(self) -> None:
        self.sent_bytes = 0
        """At least the size of the messages that are sent and not acknowledged."""
        self._pending: list[Row] = []
        self._latest: dict[str, News] = {}
        """The last pending progress of each request."""
        self._repeated: set[str] = set()
        """Requests with several pending rows, whose order columns would not show."""
        self._sent: deque[tuple[decode_pb2.StreamOutputsResponse, int]] = deque()
        self._acknowledged = 0
        """Messages of the present stream that are no longer kept."""

    @property
    def total_bytes(self) -> int:
        """About the memory of all that is kept. Costs O(pending)."""
        return self.sent_bytes + sum(map(size_of, self._pending))

    def put(self, rows: Iterable[Row]) -> None:
        """Adds progress, and takes it over."""
        latest = self._latest
        for row in rows:
            name, news = row
            if (before := latest.get(name)) is not None:
                if isinstance(before, TokenDelta) and isinstance(news, TokenDelta) and before.extend(news):
                    continue
                self._repeated.add(name)
            self._pending.append(row)
            latest[name] = news

    def take(self) -> decode_pb2.StreamOutputsResponse | None:
        """The next message to send; None if there is none. It is kept until it is acknowledged."""
        if not self._pending:
            return None
        pending, repeated = self._pending, self._repeated
        self._pending, self._latest, self._repeated = [], {}, set()
        size, count = 0, 0
        for row in pending:
            row_bytes = size_of(row)
            if count and size + row_bytes > MAX_MESSAGE_BYTES:
                self.put(pending[count:])
                break
            size += row_bytes
            count += 1
        message = message_of(pending[:count], repeated)
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
        rows = [row for message, _ in self._sent for row in rows_of(message)]
        rows += self._pending
        self.clear()
        wanted = [row for row in rows if _is_wanted(row, positions)]
        self.put(wanted)
        ended = {name for name, news in wanted if _delta_of(news).finish_reason}
        return [name for name in positions if name not in live and name not in ended]

    def clear(self) -> None:
        """Forgets everything."""
        self._pending, self._latest, self._repeated = [], {}, set()
        self._sent.clear()
        self.sent_bytes = self._acknowledged = 0


def size_of(row: Row) -> int:
    """About the memory that a row takes, bytes."""
    name, news = row
    if not isinstance(news, TokenDelta) or news.logprobs or news.prompt_logprobs is not None:
        return len(name) + (news.to_proto() if isinstance(news, TokenDelta) else news).ByteSize()
    text = news.text
    text_bytes = len(text) if text.isascii() else len(text.encode())
    return ROW_BYTES + len(name) + text_bytes + TOKEN_BYTES * len(news.token_ids)


def message_of(rows: Sequence[Row], repeated: Collection[str] = ()) -> decode_pb2.StreamOutputsResponse:
    """Rows as one message: what is tokens and nothing else in columns. `repeated`: the requests that may have several
    rows."""
    outputs: list[decode_pb2.SequenceOutput] = []
    names, positions, counts, texts = list[str](), list[int](), list[int](), list[str]()
    token_ids: list[int] = []
    for name, news in rows:
        if not isinstance(news, TokenDelta):
            outputs.append(news)
        elif name in repeated or not news.is_plain:
            outputs.append(output_of(name, news))
        else:
            names.append(name)
            positions.append(news.first_position)
            counts.append(len(news.token_ids))
            token_ids += news.token_ids
            texts.append(news.text)
    if not names:
        return decode_pb2.StreamOutputsResponse(outputs=outputs)
    tokens = decode_pb2.StepTokens(
        request_ids=names,
        first_positions=positions,
        counts=counts if counts.count(1) < len(counts) else (),
        token_ids=token_ids,
        texts=texts,
    )
    return decode_pb2.StreamOutputsResponse(outputs=outputs, tokens=tokens)


def _delta_of(news: News) -> TokenDelta | generation_pb2.OutputDelta:
    return news if isinstance(news, TokenDelta) else news.delta


def _is_wanted(row: Row, positions: Mapping[str, int]) -> bool:
    """Whether the coordinator wants a row. One without tokens may be repeated: it is the first or the last."""
    position, delta = positions.get(row[0]), _delta_of(row[1])
    if position is None:
        return False
    return not delta.token_ids or delta.first_position >= position


MAX_KEPT_BYTES = 64 * 2**20
"""Most output that is kept: in total for all coordinators whose streams are broken, and for each coordinator with an
open stream what was sent to it and is not acknowledged. A coordinator that exceeds it counts as lost at once."""


class Attachment:
    """Whether a coordinator reads its outputs, and how long its requests go on if it does not. Pure; times in seconds
    on the caller's clock.

    Coordinators number their streams upwards, from 1. Messages of two connections may overtake each other, so a number
    that is not above the last one is an older stream that arrives late, and a reservation under another number than the
    present one belongs to a stream that is gone.
    """

    def __init__(self, lease_s: float) -> None:
        self.number = 0
        """Number of the latest stream."""
        self._lease_s = lease_s
        self._detached_s: float | None = float("-inf")
        """Since when no stream is open; None while one is."""

    @property
    def is_open(self) -> bool:
        """Whether a stream is open."""
        return self._detached_s is None

    def open(self, number: int) -> None:
        """Opens a stream in place of the present one.

        Raises FailedPreconditionError (STALE_ATTACHMENT) if a newer one was opened before.
        """
        if number <= self.number:
            raise FailedPreconditionError(
                f"attachment {self.number} was opened before attachment {number}", reason="STALE_ATTACHMENT"
            )
        self.number = number
        self._detached_s = None

    def close(self, number: int, now: float) -> bool:
        """The stream has ended. False if it had been replaced, or had ended before."""
        if not self.takes(number):
            return False
        self._detached_s = now
        return True

    def takes(self, number: int) -> bool:
        """Whether this is the number of the open stream."""
        return self.is_open and number == self.number

    @property
    def lease_end_s(self) -> float:
        """When the requests end if no stream is opened before; infinity while one is open."""
        return float("inf") if self._detached_s is None else self._detached_s + self._lease_s


class OutputStream:
    """One stream of one coordinator. Read `messages` after `rewind`."""

    def __init__(self, outputs: _CoordinatorOutputs, number: int) -> None:
        """Opens the stream in place of an older one. Raises FailedPreconditionError (STALE_ATTACHMENT)."""
        self.outputs = outputs
        outputs.attachment.open(number)
        self._number = number
        self._wake = asyncio.Event()
        self._closed = False

    def rewind(self, positions: Mapping[str, int], live: Collection[str]) -> list[str]:
        """Has kept outputs sent again from `positions` on; returns the requests that are lost. Does nothing once
        closed."""
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
        return self.outputs.attachment.close(self._number, now)

    async def messages(self) -> AsyncIterator[decode_pb2.StreamOutputsResponse]:
        """Yields messages whenever there is output, until the stream is closed."""
        while not self._closed:
            while not self._closed and (message := self.outputs.kept.take()) is not None:
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

    def put(self, batch: list[Row]) -> None:
        if self.reader is None:
            self.detached_bytes += sum(map(size_of, batch))
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
        outputs.reader, outputs.detached_bytes = None, outputs.kept.total_bytes
        outputs.lease = loop.call_at(outputs.attachment.lease_end_s, self._lose, outputs)
        log_event("outputs.detached", coordinator_id=outputs.coordinator_id, lease_s=self._lease_s)

    def takes(self, coordinator_id: str, number: int) -> bool:
        """Whether a request of this coordinator may begin whose output goes to this stream."""
        outputs = self._coordinators.get(coordinator_id)
        return outputs is not None and outputs.attachment.takes(number)

    def deliver(self, outputs: Mapping[str, list[Row]]) -> None:
        """Adds one step's outputs, by coordinator id."""
        for coordinator_id, batch in outputs.items():
            if (coordinator := self._coordinators.get(coordinator_id)) is None:
                continue
            coordinator.put(batch)
            kept_bytes = coordinator.kept.sent_bytes
            if coordinator.reader is None:
                kept_bytes = sum(other.detached_bytes for other in self._coordinators.values())
            if kept_bytes > MAX_KEPT_BYTES:
                self._lose(coordinator)

    def acknowledge(self, coordinator_id: str, number: int, messages: int) -> None:
        """Drops kept outputs that the coordinator says it has."""
        outputs = self._coordinators.get(coordinator_id)
        if outputs is not None and outputs.attachment.takes(number):
            outputs.kept.acknowledge(messages)

    def close_all(self) -> None:
        """Ends all streams and leases; the process ends."""
        for outputs in self._coordinators.values():
            outputs.stop()
        self._coordinators.clear()

    def _lose(self, outputs: _CoordinatorOutputs) -> None:
        outputs.stop()
        del self._coordinators[outputs.coordinator_id]
        log_event("coordinator.lost", coordinator_id=outputs.coordinator_id)
        self._on_lost(outputs.coordinator_id)
