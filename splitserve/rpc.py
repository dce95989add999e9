"""Common gRPC settings: channels, servers with health and reflection, and the error boundary around handlers.

Services are plain servicers that raise `SplitserveError`; `RpcServer` puts the boundary around each of them,
so none can forget it. Clients turn a failed call into the same errors with `error_from_rpc`.
"""

from __future__ import annotations

import errno
import inspect
import socket
from collections.abc import AsyncIterable, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from splitserve.call_guard import OPEN_GUARD, CallGuard
from splitserve.errors import InvalidArgumentError, UnavailableError
from splitserve.rpc_errors import abort_with, error_from_rpc
from splitserve.tls import Role, TlsFiles, channel_credentials, role_name, server_credentials

__all__ = [
    "OpenRpcs",
    "RpcServer",
    "abort_with",
    "channel_options",
    "error_from_rpc",
    "make_channel",
    "make_server",
    "server_options",
]

DEFAULT_MAX_MESSAGE_BYTES = 16 * 2**20
KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
LONG_LIVED_METHODS = frozenset(
    {"/splitserve.v1.RegistryService/Report", "/splitserve.v1.DecodeService/StreamOutputs"}
)
"""Streams that live as long as their peer; `OpenRpcs` leaves them out."""

Options = list[tuple[str, Any]]


def channel_options(max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> Options:
    """Client settings: message limit, keepalive, quick reconnection, no proxy and no hidden retries."""
    return [
        *_common_options(max_message_bytes),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        # A restarted peer must not inherit the connection back-off of the channel to its former self.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options(max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> Options:
    """Server settings: message limit, keepalive that permits the clients', no shared ports."""
    return [
        *_common_options(max_message_bytes),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        # Two processes on one port would split the traffic between them without a word.
        ("grpc.so_reuseport", 0),
    ]


def _common_options(max_message_bytes: int) -> Options:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def make_channel(
    address: str,
    *,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    tls: TlsFiles | None = None,
    peer: Role | None = None,
    read_ahead_bytes: int | None = None,
) -> grpc.aio.Channel:
    """A channel to "host:port". It connects at the first call; use it on one event loop only.

    `read_ahead_bytes` bounds what each stream may send before it is read; by default gRPC sizes that by itself.

    With `tls` the server must prove the host's name, or, where `peer` is given, its role in the cluster.
    """
    options = channel_options(max_message_bytes)
    if read_ahead_bytes is not None:
        options += [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", read_ahead_bytes)]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    if peer is not None:
        options.append(("grpc.ssl_target_name_override", role_name(peer)))
    return grpc.aio.secure_channel(address, channel_credentials(tls), options=options)


class OpenRpcs:
    """How many handlers run now, health, reflection and `LONG_LIVED_METHODS` left out."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def track(self, method: str) -> Iterator[None]:
        """Counts a handler of the full method name ("/package.Service/Method") while it runs."""
        counted = 0 if method in LONG_LIVED_METHODS or method.startswith("/grpc.") else 1
        self.count += counted
        try:
            yield
        finally:
            self.count -= counted


class RpcServer:
    """A gRPC server with error boundary, health and reflection.

    Add servicers to `grpc_server`, then `start`. Health answers for "" and for every service named there.
    """

    def __init__(self, max_message_bytes: int, open_rpcs: OpenRpcs, guard: CallGuard = OPEN_GUARD) -> None:
        self.open_rpcs = open_rpcs
        self.grpc_server = grpc.aio.server(
            interceptors=[_Boundary(open_rpcs, guard)], options=server_options(max_message_bytes)
        )
        self._health = health.aio.HealthServicer()
        self._names: Sequence[str] = ()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc_server)

    async def start(
        self,
        host: str,
        port: int,
        service_names: Sequence[str],
        *,
        tls: TlsFiles | None = None,
        mutual: bool = True,
    ) -> int:
        """Binds, starts and reports SERVING; returns the bound port (`port` 0 takes a free one).

        `mutual`: with TLS, callers must show a certificate. Raises UnavailableError (PORT_IN_USE or BIND_FAILED)
        with one line for people.
        """
        self._names = ("", *service_names)
        shown = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(shown, self.grpc_server)
        bound = self.listen(host, port, tls, mutual=mutual)
        await self.grpc_server.start()
        await self.set_serving(True)
        return bound

    async def set_serving(self, serving: bool) -> None:
        """What health checks answer from now on."""
        kind = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._health.set(name, kind.SERVING if serving else kind.NOT_SERVING)

    async def stop(self, grace_s: float | None = None) -> None:
        """Refuses new calls, waits up to `grace_s` for open ones, then cancels them."""
        await self.set_serving(False)
        await self.grpc_server.stop(grace_s)

    def listen(self, host: str, port: int, tls: TlsFiles | None, *, mutual: bool) -> int:
        """Binds one more port, before `start`; see there."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if tls is None:
                return self.grpc_server.add_insecure_port(address)
            return self.grpc_server.add_secure_port(address, server_credentials(tls, mutual=mutual))
        except RuntimeError:  # gRPC says no more than that it failed, so ask the system why
            raise _bind_error(host, port) from None


def make_server(
    *,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    open_rpcs: OpenRpcs | None = None,
    guard: CallGuard = OPEN_GUARD,
) -> RpcServer:
    """A server to add services to. `open_rpcs` counts its running handlers; `guard` says who may call them."""
    return RpcServer(max_message_bytes, open_rpcs or OpenRpcs(), guard)


def _bind_error(host: str, port: int) -> UnavailableError:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return UnavailableError(f"port {port} on {host} is in use", reason="PORT_IN_USE")
        why = error.strerror or str(error)
        return UnavailableError(f"cannot listen on {host} port {port}: {why}", reason="BIND_FAILED")
    return UnavailableError(f"cannot listen on {host} port {port}", reason="BIND_FAILED")


class _Boundary(grpc.aio.ServerInterceptor):
    """Counts handlers, turns strangers away and errors into status, closes generators when they end."""

    def __init__(self, open_rpcs: OpenRpcs, guard: CallGuard) -> None:
        self._open_rpcs = open_rpcs
        self._guard = guard

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Wraps the handler of one call; gRPC's own services pass unchanged."""
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None or method.startswith("/grpc."):
            return handler
        inner = handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary
        # Requests are decoded inside the boundary: left to gRPC, bad bytes end as INTERNAL.
        decode = handler.request_deserializer
        if handler.request_streaming:
            decode = partial(_decoded_stream, decode)
        elif decode is not None:
            decode = partial(_decoded, decode)
        make = _HANDLER_MAKERS[handler.request_streaming, handler.response_streaming]
        return make(
            self._guarded(method, inner, decode),
            request_deserializer=None,
            response_serializer=handler.response_serializer,
        )

    def _guarded(self, method: str, inner: Any, decode: Any) -> Any:
        service = method.split("/")[1]

        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            with self._open_rpcs.track(method):
                try:
                    self._guard.check(service, context)
                    message = decode(request) if decode else request
                    result = inner(message, context)
                    if not inspect.isasyncgen(result):
                        return await result
                    # Closed here, not by the garbage collector, when the call is cancelled in a write.
                    async with aclosing(result) as responses:
                        async for response in responses:
                            await context.write(response)
                except grpc.aio.AbortError:
                    raise
                except Exception as error:
                    await abort_with(context, error)

        return call


def _decoded(decode: Any, data: bytes) -> Any:
    try:
        return decode(data)
    except DecodeError as error:
        # The parser's text names the field where it can, for example one with bad UTF-8.
        raise InvalidArgumentError(f"message cannot be parsed: {error}", reason="MALFORMED_MESSAGE") from None


async def _decoded_stream(decode: Any, requests: AsyncIterable[bytes]) -> AsyncIterator[Any]:
    async for data in requests:
        yield _decoded(decode, data)


_HANDLER_MAKERS: dict[tuple[bool, bool], Any] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
