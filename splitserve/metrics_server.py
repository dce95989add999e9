"""The HTTP server of the metrics port: few connections at a time, each for a limited time.

`prometheus_client`'s own server starts a thread for each connection, without a bound, and over TLS shakes hands in the
thread that accepts: one client that connects and sends nothing would stop all scrapes, and the process's end.
"""

from __future__ import annotations

import json
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from http import HTTPStatus
from socketserver import ThreadingMixIn
from types import MappingProxyType
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from typing_extensions import override

MAX_CONNECTIONS = 16
"""Further connections are closed at once. A Prometheus server has one."""
Pages = Mapping[str, Callable[[], Mapping[str, Any]]]
"""Further pages by path: a function of the JSON object served there, called for each request on its own thread."""
CONNECTION_S = 10.0
"""A connection is cut this long after its begin. Prometheus gives up after as long by default."""


class _Handler(WSGIRequestHandler):
    @override
    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves a registry on `host` and `port` from the constructor on, until `close`. Raises OSError.

    With `token` the further `pages` need the header `Authorization: Bearer TOKEN`.
    """

    daemon_threads = True

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        tls: ssl.SSLContext | None = None,
        pages: Pages = MappingProxyType({}),
        token: str | None = None,
    ) -> None:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = addresses[0]
        self._tls = tls
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((str(address[0]), port), _Handler)
        self.set_app(_with_pages(make_wsgi_app(registry), pages, token))
        self._thread = threading.Thread(target=self.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the server; open connections end by themselves."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    @override
    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    @override
    def finish_request(self, request: Any, client_address: Any) -> None:
        secured = (
            nullcontext(request)
            if self._tls is None
            else self._tls.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        )
        with secured as connection, _cut_after(connection, CONNECTION_S):
            if isinstance(connection, ssl.SSLSocket):
                connection.do_handshake()
            super().finish_request(connection, client_address)

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Does nothing for a connection that broke, was cut or has no valid certificate."""


def _with_pages(metrics: Any, pages: Pages, token: str | None) -> Callable[[Any, Any], Iterable[bytes]]:
    def serve(environ: Any, start_response: Any) -> Iterable[bytes]:
        page = pages.get(environ["PATH_INFO"])
        if page is None:
            answer: Iterable[bytes] = metrics(environ, start_response)
            return answer
        given = environ.get("HTTP_AUTHORIZATION", "").encode(errors="replace")
        if token is not None and not secrets.compare_digest(given, f"Bearer {token}".encode()):
            status, body = HTTPStatus.UNAUTHORIZED, b'{"error": "the cluster token is needed"}'
        else:
            status, body = HTTPStatus.OK, json.dumps(page()).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        start_response(f"{status.value} {status.phrase}", headers)
        return [body]

    return serve


@contextmanager
def _cut_after(connection: socket.socket, limit_s: float) -> Iterator[None]:
    def cut() -> None:
        with suppress(OSError):
            socket.socket.shutdown(connection, socket.SHUT_RDWR)  # reads and writes in progress get an error

    timer = threading.Timer(limit_s, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
