"""Writing to a stream of a gRPC server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from typing import Any

import grpc

from splitserve.logs import log_event

WRITE_GRACE_S = 1.0


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
    """Writes the messages of one stream of a gRPC server, one at a time, with or without a task that waits for it."""

    def __init__(self, write: Callable[[Any], Awaitable[None]]) -> None:
        """`write` is that of the call's context."""
        self._write = write
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
