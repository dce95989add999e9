"""Writing to a stream of gRPC, of a server or of a client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

import grpc

from splitserve.logs import log_event

WRITE_GRACE_S = 1.0
BATCH_BYTES, BATCH_ITEMS = 48 * 2**10, 4096
"""A message of a batch is begun anew above this size, so that it is parsed on the reader's event loop."""


async def write_whole(context: grpc.aio.ServicerContext[Any, Any], message: Any) -> None:
    """Completes the write even when cancelled: gRPC accepts no status while a write is in progress."""
    write = asyncio.ensure_future(context.write(message))
    try:
        await asyncio.shield(write)
    except asyncio.CancelledError:
        write.add_done_callback(_given_up)
        await asyncio.wait([write], timeout=WRITE_GRACE_S)
        raise


def _given_up(write: asyncio.Future[Any]) -> None:
    """Takes what a write raised after its waiter was cancelled: `shield` forgets it, and asyncio would report an error
    that nobody has seen. That the client has gone is known by then; anything else is worth a line."""
    error = None if write.cancelled() else write.exception()
    if error is not None:
        log_event("rpc.write_given_up", level=logging.DEBUG, error=f"{type(error).__name__}: {error}")


class StreamWriter:
    """Writes the messages of one stream, one at a time, with or without a task that waits for it."""

    def __init__(
        self, write: Callable[[Any], Awaitable[None]], on_written: Callable[[], None] = lambda: None
    ) -> None:
        """`write` is that of the call, or of its context. `on_written` is called after each write without a task."""
        self._write = write
        self._on_written = on_written
        self._begun: Generator[Any, None, None] | None = None
        """A write without a task that is in progress."""
        self._over: asyncio.Future[None] | None = None
        """Set when that write is over; made where something waits for it."""
        self._error: BaseException | None = None
        """What a write without a task has raised; the next one with a task raises it."""

    @property
    def is_ready(self) -> bool:
        """Whether `begin` may be called: no write is in progress, and none has failed."""
        return self._begun is None and self._error is None

    @property
    def has_failed(self) -> bool:
        """Whether a write without a task has failed; nothing can be written any more."""
        return self._error is not None

    async def write(self, message: Any) -> None:
        """Writes a message, after the one in progress. Raises what gRPC raises, also of a write that `begin` began."""
        await self._written()
        if self._error is not None:
            raise self._error
        await self._write(message)

    def begin(self, message: Any) -> None:
        """Writes a message without a wait; only while `is_ready`. gRPC takes it at once, and tells later that another
        one may follow."""
        self._begun = self._write(message).__await__()
        self._go_on()

    async def settle(self) -> None:
        """Waits for a write in progress before the call ends, up to WRITE_GRACE_S: a client may not read."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WRITE_GRACE_S):
                await self._written()

    async def _written(self) -> None:
        if self._begun is not None:
            if self._over is None:
                self._over = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._over)  # others may wait for it, too

    def _go_on(self, _waited: asyncio.Future[Any] | None = None) -> None:
        begun = self._begun
        assert begun is not None
        try:
            next(begun).add_done_callback(self._go_on)
            return
        except StopIteration:
            pass
        except (Exception, asyncio.CancelledError) as error:  # the latter where the client has gone
            self._error = error
        self._begun = None
        if self._over is not None:
            self._over.set_result(None)
            self._over = None
        self._on_written()


class Sized(Protocol):
    """What goes into a batch: a protobuf message."""

    def ByteSize(self) -> int:
        """Its serialized size, bytes."""
        ...


M = TypeVar("M", bound=Sized)


class BatchWriter(Generic[M]):
    """Writes small messages of many senders to one stream: what is put in one turn of the loop, while a write is in
    progress, or within the wait that it is told of, leaves in one message. Holds whatever is put: senders look at
    `held`."""

    def __init__(
        self,
        write: Callable[[Any], Awaitable[None]],
        message_of: Callable[[list[M]], Any],
        wait_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`write`: see StreamWriter. `message_of` makes the message of a batch; `wait_s` says for how many seconds the
        first one waits for others now."""
        self._writer = StreamWriter(write, self._written)
        self._message_of, self._wait_s = message_of, wait_s
        self._items: list[M] = []
        self._flushing = self._left_over = False

    def put(self, item: M) -> None:
        """Adds a message; never blocks. After a failed write it is dropped."""
        if self._writer.has_failed:
            self._items.clear()
            return
        self._items.append(item)
        if not self._flushing:
            self._flushing = True
            self._flush_later()

    @property
    def held(self) -> int:
        """Messages that wait to be written."""
        return len(self._items)

    @property
    def has_failed(self) -> bool:
        """Whether a write has failed; nothing is written any more."""
        return self._writer.has_failed

    async def settle(self) -> None:
        """Waits until all that was put is written, up to WRITE_GRACE_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WRITE_GRACE_S):
                while self._flushing and not self._writer.has_failed:
                    await self._writer.settle()
                    await asyncio.sleep(0)

    def _flush_later(self) -> None:
        loop, wait_s = asyncio.get_running_loop(), self._wait_s()
        if wait_s:
            loop.call_later(wait_s, self._flush)
        else:
            loop.call_soon(self._flush)

    def _written(self) -> None:
        if not self._items or not self._writer.is_ready:
            self._flushing = self._writer.has_failed
        elif self._left_over or not self._wait_s():
            self._flush()  # what a batch had no room for has waited
        else:
            self._flush_later()

    def _flush(self) -> None:
        if not self._items:  # dropped
            self._flushing = False
            return
        size = count = 0
        for item in self._items:
            size += item.ByteSize()
            if (size > BATCH_BYTES and count) or count == BATCH_ITEMS:
                break
            count += 1
        batch, self._items = self._items[:count], self._items[count:]
        self._left_over = bool(self._items)
        self._writer.begin(self._message_of(batch))
