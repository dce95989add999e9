"""Runs uvicorn inside the coordinator's event loop, without its signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

from coordinator.entrypoints.http.head_limits import BoundedHttpProtocol
from splitserve.addresses import join_address
from splitserve.errors import UnavailableError
from splitserve.runtime.cancellation import end_tasks
from splitserve.security.server_tls import ServerTls

KEEP_ALIVE_S = 75
"""How long a connection may idle between requests; longer than most clients' limits, so that clients close first."""
BACKLOG = 2048
END_S = 2
"""How long pending responses may take to be sent at shutdown; requests have been ended before."""
STOP_S = 5
"""How long uvicorn may take to stop beyond that."""


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
