"""Runs uvicorn inside the coordinator's event loop, with bounds that uvicorn lacks.

The bounds are on connections, on bytes parsed at once, and on size and duration of a request's head. A request that
offers another protocol is served in HTTP/1.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.types import ASGIApp
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from coordinator.entrypoints.http.exchange import HttpError, error_response
from splitserve.addresses import join_address
from splitserve.errors import UnavailableError
from splitserve.runtime.cancellation import end_tasks
from splitserve.security.tls import ServerTls

MAX_HEAD_BYTES = 64 * 2**10
"""Most bytes of request line and headers. A head is refused after the slice that exceeds the bound."""
SLICE_BYTES = 8 * 2**10
"""Bytes that are parsed before the event loop goes on. A read of the socket has up to 256 KiB: thousands of headers,
chunks or pipelined requests, each with callbacks in Python."""
HEAD_TIMEOUT_S = 20.0
"""Longest time from the start of a connection, or the first byte of a request, to the end of the head."""
_OFFER = frozenset((b"upgrade", b"http2-settings"))
"""Headers, and options of the header Connection, that offer another protocol."""
REFUSAL_S = 1.0
"""How long a refused connection has to take its response."""
CLOSE_TIMEOUT_S = 60.0
"""How long the client may take to read the last response of a connection."""
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=:%\[\]-]*")
"""The characters of a host with a port; it may be empty."""


class _UnchunkedCycle(RequestResponseCycle):
    """A response to HTTP/1.0, which has no chunks: the end of the connection ends a body without a length."""

    @override
    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.body" and self.chunked_encoding is False:
            self.expected_content_length = max(self.expected_content_length, len(message.get("body", b"")))
        elif all(name != b"content-length" for name, _ in message.get("headers", ())):
            self.chunked_encoding = False  # uvicorn would send `transfer-encoding: chunked`
        await super().send(message)


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. It is closed if too many are open, or if a head is too long or too slow. Malformed HTTP gets an
    error response like any other."""

    max_connections = 10_000
    """Open connections of the server, this one included."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._ended_message = False
        self._declines_upgrade = False
        """Whether the head offers another protocol. The head is then parsed again without the offer."""
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._on_lost: Callable[[], None] | None = None
        self._unparsed = b""
        """Bytes of the last read that are not parsed yet. Until they are, the socket is not read."""

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            message = f"{self.max_connections} connections are open, which is the limit"
            headers = [(b"retry-after", b"1"), (b"retry-after-ms", b"1000")]
            self._refuse(HttpError(503, message, "TOO_MANY_CONNECTIONS", headers))
            self._head_timer = self.loop.call_later(REFUSAL_S, transport.abort)
            return
        self._await_head()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._head_over()
        self._unparsed = b""
        super().connection_lost(exc)
        if self._on_lost is not None:
            self._on_lost()
            self._on_lost = None

    @override
    def data_received(self, data: bytes) -> None:
        if self._unparsed:  # uvicorn has resumed reading meanwhile
            self._unparsed += data
            self.transport.pause_reading()
        elif len(data) <= SLICE_BYTES:
            self._parse(data)
        else:
            self._unparsed = data
            self.transport.pause_reading()
            self._parse_slice()

    def _parse_slice(self) -> None:
        piece, self._unparsed = self._unparsed[:SLICE_BYTES], self._unparsed[SLICE_BYTES:]
        self._parse(piece)
        if self.transport.is_closing():
            self._unparsed = b""
        elif self._unparsed:
            self.loop.call_soon(self._parse_slice)
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def _parse(self, data: bytes) -> None:
        if self.transport.is_closing() or self.parser is None:
            return
        self._ended_message = False
        self._feed(data)
        if not self._in_head or self._ended_message:
            return
        # Empty lines begin no message, but they reset uvicorn's keep-alive timer.
        self._await_head()
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            message = f"request line and headers must be at most {MAX_HEAD_BYTES} bytes"
            self._refuse(HttpError(431, message, "HEAD_TOO_LARGE"))

    def _feed(self, data: bytes) -> None:
        """Parses like uvicorn's `data_received`, but keeps the body of a request that offers another protocol, which
        httptools takes for data of that protocol. Java's HttpClient and `curl --http2` offer h2c at first."""
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
                return
            except HttpParserError:
                self.send_400_response("")
                return
            except HttpParserUpgrade as upgrade:
                if not self._declines_upgrade:  # a CONNECT, which has been refused already
                    return
                self._declines_upgrade = False
                data = self._head_without_offer() + data[upgrade.args[0] :]
                self.parser = HttpRequestParser(self)
                # uvicorn creates its own parser with this leniency.
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                options = (option.strip() for option in value.split(b","))
                kept = b",".join(option for option in options if option.lower() not in _OFFER)
                lines.append(b"connection: %b" % kept)
            elif name not in _OFFER:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        # `HttpExchange` aborts a connection whose client does not read, and writes to one without a wait while it does.
        self.scope["state"] |= {
            "abort_connection": self.transport.abort,
            "is_writable": self._is_writable,
            "write_chunk": self._write_chunk,
            "when_lost": self._when_lost,
        }
        self._await_head()

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if not self._in_head:  # a trailer, after the body
            self._head_bytes += len(name) + len(value)
            if self._head_bytes > 2 * MAX_HEAD_BYTES:
                self.transport.abort()

    @override
    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        self._check_host(version)
        self._in_head = False
        self._head_over()
        self._declines_upgrade = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._declines_upgrade:
            self._in_head = True  # the head is parsed again: its headers are no trailers
            return
        if version == "1.0":
            self.scope["state"]["write_chunk"] = self.transport.write
        super().on_headers_complete()
        if version == "1.0":
            self.cycle.__class__ = _UnchunkedCycle

    def _check_host(self, version: str) -> None:
        """Refuses a request with several hosts, an invalid host, or none in HTTP/1.1 (RFC 9112, section 3.2)."""
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (version != "1.0" and not hosts) or not all(map(_HOST.fullmatch, hosts)):
            self._refuse(HttpError(400, "the header Host must be given once, with a host", "MALFORMED_HTTP"))
            raise ValueError("no valid Host")  # ends the parsing of this connection

    @override
    def on_message_complete(self) -> None:
        if self._declines_upgrade:
            return
        super().on_message_complete()
        self._in_head, self._ended_message, self._head_bytes = True, True, 0

    @override
    def on_response_complete(self) -> None:
        """Bounds the time that the client may take to read the last response."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._head_over()
            self._head_timer = self.loop.call_later(CLOSE_TIMEOUT_S, self.transport.abort)

    @override
    def timeout_keep_alive_handler(self) -> None:
        """Aborts the connection: closing it would wait for a client that has not read its last response."""
        self.transport.abort()

    @override
    def send_400_response(self, msg: str) -> None:
        """Responds to requests that never reach the application."""
        self._refuse(HttpError(400, "this is no valid HTTP request", "MALFORMED_HTTP"))

    def _refuse(self, refusal: HttpError) -> None:
        if self.transport.is_closing():
            return
        if self._answering and (self._in_head or self.cycle.response_started):
            # Another response is in progress or comes first; nothing may be mixed into it.
            self.transport.abort()
            return
        response = error_response(refusal)
        lines = [
            *(b"%s: %s" % header for header in self.server_state.default_headers),
            b"content-type: application/json",
            b"content-length: %d" % len(response.body),
            b"connection: close",
            *(b"%s: %s" % header for header in response.headers),
        ]
        self.transport.write(STATUS_LINE[response.status] + b"\r\n".join([*lines, b"", response.body]))
        self.transport.close()

    def _is_writable(self) -> bool:
        return not self.flow.write_paused and not self.transport.is_closing()

    def _when_lost(self, on_lost: Callable[[], None] | None) -> None:
        """Calls `on_lost` when the connection is lost. Replaces the earlier callback: a connection serves one request
        at a time. Resumes reading, because only a read shows that the client has closed the connection."""
        self._on_lost = on_lost
        if on_lost is None:
            return
        if self.parser is None:
            self.loop.call_soon(on_lost)
        else:
            self.flow.resume_reading()

    def _write_chunk(self, data: bytes) -> None:
        """Writes a chunk of a chunked response, without the coroutine and the message of uvicorn's `send`. Call it only
        while writable, between the response's begin and end. `data` must not be empty: an empty chunk is the end."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

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
            self._await_head()  # the next request may wait until this response ends
        elif not self.transport.is_closing():
            self.transport.close()


KEEP_ALIVE_S = 75
"""How long a connection may idle between requests. Most clients close theirs sooner, which avoids races."""
BACKLOG = 2048
END_S = 2
"""How long responses may take to be sent at shutdown, after all requests have been ended."""
STOP_S = 5
"""How much longer uvicorn may take to stop."""


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does nothing: the coordinator handles signals."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


@asynccontextmanager
async def serving_http(
    app: ASGIApp, host: str, port: int, tls: ServerTls | None = None, max_connections: int = 10_000
) -> AsyncIterator[int]:
    """Serves while the context is open; yields the bound port (`port` 0 takes a free one). Connections beyond
    `max_connections` get status 503 and are closed.

    Raises UnavailableError (PORT_IN_USE or BIND_FAILED) naming `http_port`.
    """
    listener = _listener(host, port)
    config = uvicorn.Config(
        app,
        http=type("HttpProtocol", (BoundedHttpProtocol,), {"max_connections": max_connections}),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=END_S,
    )
    config.load()
    config.ssl = tls.ssl_context(mutual=False) if tls else None
    server = _Server(config)
    running = asyncio.create_task(server.serve([listener]))
    listening = asyncio.create_task(server.listening.wait())
    try:
        await asyncio.wait([running, listening], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        bound: int = listener.getsockname()[1]
        yield bound
    finally:
        listening.cancel()
        server.should_exit = True
        await asyncio.wait([running], timeout=END_S + STOP_S)
        await end_tasks([running])
        for connection in list(server.server_state.connections):
            connection.transport.abort()


def _listener(host: str, port: int) -> socket.socket:
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        where, in_use = join_address(host, port), error.errno == errno.EADDRINUSE
        message = f"http_port: cannot listen on {where}: {error.strerror or error}"
        if in_use:
            message += " (choose another with --http-port; 0 takes a free one, off none)"
        reason = "PORT_IN_USE" if in_use else "BIND_FAILED"
        raise UnavailableError(message, reason=reason, field="http_port") from None
    listener.setblocking(False)
    return listener
