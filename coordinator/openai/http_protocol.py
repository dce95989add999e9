"""Bounds that uvicorn's HTTP parser leaves out: size and duration of a request's head."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from coordinator.openai.errors import HttpRefusal, error_answer

MAX_HEAD_BYTES = 64 * 2**10
"""Request line and headers. One read of the socket may go beyond it before it is noticed."""
HEAD_TIMEOUT_S = 20.0
"""From a connection's start, or a request's first byte, to the end of the head."""

CLOSE_TIMEOUT_S = 60.0
"""How long the last answer of a connection may take to be read."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. A head that is too long or too slow ends it; what is no HTTP is answered as all errors are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._ended_message = False
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._head_over()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        if self.transport.is_closing():
            return
        self._ended_message = False
        super().data_received(data)
        if not self._in_head or self._ended_message:
            return
        # Also after line ends alone, which begin no message but hold up the keep-alive timer.
        self._await_head()
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            message = f"request line and headers must be at most {MAX_HEAD_BYTES} bytes"
            self._refuse(HttpRefusal(431, message, "HEAD_TOO_LARGE"))

    def on_message_begin(self) -> None:
        """See httptools."""
        super().on_message_begin()
        # How the application breaks a connection whose client does not read.
        self.scope["state"]["abort_connection"] = self.transport.abort
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools."""
        super().on_header(name, value)
        if not self._in_head:  # a trailer, after the body
            self._head_bytes += len(name) + len(value)
            if self._head_bytes > 2 * MAX_HEAD_BYTES:
                self.transport.abort()

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._in_head = False
        self._head_over()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """See httptools."""
        super().on_message_complete()
        self._in_head, self._ended_message, self._head_bytes = True, True, 0

    def on_response_complete(self) -> None:
        """See uvicorn: an answer is written, though perhaps not read yet."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._head_over()
            self._head_timer = self.loop.call_later(CLOSE_TIMEOUT_S, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        """See uvicorn. Closing would wait for a client that has not read its last answer."""
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """What is sent where no application can be asked."""
        self._refuse(HttpRefusal(400, "this is no valid HTTP request", "MALFORMED_HTTP"))

    def _refuse(self, refusal: HttpRefusal) -> None:
        if self.transport.is_closing():
            return
        if self._answering and (self._in_head or self.cycle.response_started):
            # The answer that is under way, or due first; nothing may be mixed into it.
            self.transport.abort()
            return
        answer = error_answer(refusal)
        lines = [
            b"content-type: application/json",
            b"content-length: %d" % len(answer.body),
            b"connection: close",
        ]
        self.transport.write(STATUS_LINE[answer.status] + b"\r\n".join([*lines, b"", answer.body]))
        self.transport.close()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._too_slow)

    def _head_over(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if self._answering:
            self._await_head()  # the next request may wait for the end of this one's answer
        elif not self.transport.is_closing():
            self.transport.close()
