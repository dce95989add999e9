"""One HTTP request and its answer, straight on ASGI: no wrapper stands between a token and the socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Never

from starlette.types import Message, Receive, Scope, Send

from coordinator.credentials import BEARER
from coordinator.openai.errors import Headers, HttpRefusal

BODY_TIMEOUT_S = 60.0
"""From the end of the head to the end of the body."""
LINGER_S = 2.0
LINGER_BYTES = 64 * 2**20
"""How much of a refused body is still read, so that the client gets to read the answer instead of a broken pipe."""
ERROR_WRITE_S = 5.0
"""How long the last words of a failed stream may wait for a client that does not read."""
JSON_TYPE = b"application/json"
EVENTS_TYPE = b"text/event-stream; charset=utf-8"


class ClientGoneError(Exception):
    """The client has closed the connection; nobody is left to answer."""


class Exchange:
    """One request (`header`, `body`) and its answer (`respond`, or `event` until `end_events`)."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.answer_headers: Headers = []
        """Sent with whatever answer is given."""
        self.started = False
        """Whether the answer's status has been sent."""
        self._headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        self._abort: Callable[[], None] | None = scope.get("state", {}).get("abort_connection")
        self._receive, self._send = receive, send

    def header(self, name: bytes) -> str | None:
        """A request header's first value; `name` in lower case."""
        value = self._headers.get(name)
        return None if value is None else value.decode("latin-1")

    @property
    def credential(self) -> str | None:
        """The API key: `Authorization: Bearer KEY`, or else `x-api-key: KEY`."""
        given = self.header(b"authorization") or ""
        if given[: len(BEARER)].lower() == BEARER:
            return given[len(BEARER) :].strip()
        return self.header(b"x-api-key")

    async def body(self, limit_bytes: int) -> bytes:
        """The request's body. Raises HttpRefusal when it is too long or slow, ClientGoneError when it ends early."""
        declared = self.header(b"content-length") or "0"
        length = int(declared) if declared.isdigit() else 0
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                more = True
                if length > limit_bytes:
                    await self._refuse_length(limit_bytes, self.header(b"expect") is None)
                while more:
                    message = await self._receive_body()
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    more = message.get("more_body", False)
                    if size > limit_bytes:
                        await self._refuse_length(limit_bytes, more)
        except TimeoutError:
            text = f"the request's body took longer than {BODY_TIMEOUT_S:g} s"
            raise HttpRefusal(408, text, "BODY_TIMEOUT", [(b"connection", b"close")]) from None
        return b"".join(pieces)

    async def respond(self, status: int, body: bytes, content_type: bytes = JSON_TYPE) -> None:
        """The whole answer at once."""
        self.started = True
        headers = [
            (b"content-type", content_type),
            (b"content-length", b"%d" % len(body)),
            *self.answer_headers,
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def event(self, data: bytes) -> None:
        """Sends rendered server-sent events. Waits while the client does not read what it was sent."""
        if not self.started:
            self.started = True
            headers = [
                (b"content-type", EVENTS_TYPE),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
                *self.answer_headers,
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_events(self, data: bytes = b"") -> None:
        """Ends the stream, after a last piece."""
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def fail_events(self, data: bytes) -> None:
        """Ends the stream with an error; breaks the connection where the client does not read even that."""
        try:
            async with asyncio.timeout(ERROR_WRITE_S):
                await self.end_events(data)
        except TimeoutError:
            if self._abort is not None:
                self._abort()

    @asynccontextmanager
    async def while_connected(self) -> AsyncIterator[None]:
        """Cancels what runs inside as soon as the client is gone, and raises ClientGoneError then.

        The body must have been read before.
        """
        gone = asyncio.timeout(None)  # a timeout without a time, which the watcher sets
        watcher: asyncio.Task[None] | None = None
        try:
            async with gone:
                watcher = asyncio.create_task(self._watch(gone))
                yield
        except TimeoutError:
            if not gone.expired():
                raise
            raise ClientGoneError from None
        finally:
            if watcher is not None:
                watcher.cancel()

    async def _watch(self, gone: asyncio.Timeout) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        with suppress(RuntimeError):  # the answer has ended in the meantime
            gone.reschedule(asyncio.get_running_loop().time())

    async def _receive_body(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        return message

    async def _refuse_length(self, limit_bytes: int, more: bool) -> Never:
        """Reads on for a while (see LINGER_BYTES) if more is to come, then raises."""
        read = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while more and read < LINGER_BYTES:
                    message = await self._receive_body()
                    read += len(message.get("body", b""))
                    more = message.get("more_body", False)
        text = f"the request's body must be at most {limit_bytes} bytes"
        raise HttpRefusal(413, text, "BODY_TOO_LARGE", [(b"connection", b"close")])
