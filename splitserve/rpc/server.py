"""gRPC servers with health, reflection, authorization and an error boundary around handlers.

Servicers raise `SplitserveError`; an interceptor of `RpcServer` converts it to a gRPC status for every handler.
Clients convert a failed call back with `error_from_rpc`.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import logging
import socket
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from splitserve.errors import InvalidArgumentError, UnavailableError
from splitserve.logs import log_event
from splitserve.rpc.channel import (
    DEFAULT_MAX_MESSAGE_BYTES,
    KEEPALIVE_TIME_MS,
    LONG_LIVED_METHODS,
    Options,
    common_options,
)
from splitserve.rpc.health import Health
from splitserve.rpc.message_bounds import UNCOUNTED_BYTES, check_fields
from splitserve.rpc.status import abort_with
from splitserve.runtime.calls.parser_thread import ParserThread
from splitserve.runtime.process import connections_that_fit
from splitserve.security.authorizer import ALLOW_ALL, RpcAuthorizer
from splitserve.security.server_tls import ServerTls

DEFAULT_MAX_CONNECTIONS = 10_000
LISTENERS = 3
"""Listeners that share a process's open files: a gRPC port, one for the cluster, one for HTTP."""
STOP_S = 10.0
"""How long a server may take to stop beyond its grace."""
IDLE_CONNECTION_MS = 600_000
"""After so long without a call a connection is closed; clients reconnect at their next call."""


def server_options(
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES, max_connections: int = DEFAULT_MAX_CONNECTIONS
) -> Options:
    """Server options: limits of messages and connections, keepalive compatible with the clients', no shared ports."""
    return [
        *common_options(max_message_bytes),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_connection_idle_ms", IDLE_CONNECTION_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        # With port sharing, two processes on one port would silently split the traffic.
        ("grpc.so_reuseport", 0),
    ]


class OpenRpcs:
    """Number of running handlers, without health, reflection and `LONG_LIVED_METHODS`."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def track(self, method: str) -> Iterator[None]:
        """Counts a handler while it runs. `method` is the full name, "/package.Service/Method"."""
        counted = 0 if method in LONG_LIVED_METHODS or method.startswith("/grpc.") else 1
        self.count += counted
        try:
            yield
        finally:
            self.count -= counted


class RpcServer:
    """A gRPC server with error boundary, health and reflection.

    Add servicers to `grpc_server`, then call `start`. Health covers "" and every service named there.
    """

    def __init__(
        self,
        max_message_bytes: int,
        open_rpcs: OpenRpcs,
        authorizer: RpcAuthorizer = ALLOW_ALL,
        limit_of: LimitOf = lambda method: None,
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
    ) -> None:
        self.open_rpcs = open_rpcs
        self._decoder = RequestDecoder(limit_of)
        self.grpc_server = grpc.aio.server(
            interceptors=[_Boundary(open_rpcs, authorizer, self._decoder)],
            options=server_options(max_message_bytes, connections_that_fit(max_connections, LISTENERS)),
        )
        self._health = Health()
        self._names: Sequence[str] = ()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc_server)

    async def start(
        self,
        host: str,
        port: int,
        service_names: Sequence[str],
        *,
        tls: ServerTls | None = None,
        mutual: bool = True,
    ) -> int:
        """Binds, starts and reports SERVING; returns the bound port (`port` 0 takes a free one).

        `mutual`: with TLS, callers must present a certificate. Raises UnavailableError (PORT_IN_USE or BIND_FAILED)
        with a one-line message.
        """
        self._names = ("", *service_names)
        shown = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(shown, self.grpc_server)
        bound = self.listen(host, port, tls, mutual=mutual)
        await self.grpc_server.start()
        await self.set_serving(True)
        return bound

    async def set_serving(self, serving: bool) -> None:
        """Sets the status of health checks; waits for nobody."""
        self._health.set(self._names, serving=serving)

    async def stop(self, grace_s: float | None = None) -> None:
        """Refuses new calls, waits up to `grace_s` seconds for open ones, then cancels them. May be called again.

        Returns at most STOP_S later: a server of gRPC that does not end by then is left to the end of the process."""
        await self.set_serving(False)
        # Not cancelled when the time is over: gRPC's server would then answer each further `stop` with CancelledError.
        stopping = asyncio.create_task(self.grpc_server.stop(grace_s))
        done, _ = await asyncio.wait([stopping], timeout=(grace_s or 0.0) + STOP_S)
        self._decoder.close()
        if done:
            stopping.result()
        else:
            log_event("server.stop_overdue", level=logging.ERROR, seconds=(grace_s or 0.0) + STOP_S)

    def listen(self, host: str, port: int, tls: ServerTls | None, *, mutual: bool) -> int:
        """Binds an additional port before `start`; arguments and errors as there."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if tls is None:
                return self.grpc_server.add_insecure_port(address)
            return self.grpc_server.add_secure_port(address, tls.grpc_credentials(mutual=mutual))
        except RuntimeError:  # gRPC gives no cause; `_bind_error` determines it
            raise _bind_error(host, port) from None


def make_server(
    *,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    open_rpcs: OpenRpcs | None = None,
    authorizer: RpcAuthorizer = ALLOW_ALL,
    limit_of: LimitOf = lambda method: None,
    max_connections: int = DEFAULT_MAX_CONNECTIONS,
) -> RpcServer:
    """A server without services. `open_rpcs` counts its running handlers; `authorizer` checks their callers; `limit_of`
    gives the most bytes of a method's request, None where `max_message_bytes` is all; `max_connections` is lowered to
    what the limit of open files leaves."""
    return RpcServer(max_message_bytes, open_rpcs or OpenRpcs(), authorizer, limit_of, max_connections)


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
    """Counts handlers, authorizes callers, converts errors to status and closes response generators."""

    def __init__(self, open_rpcs: OpenRpcs, authorizer: RpcAuthorizer, decoder: RequestDecoder) -> None:
        self._open_rpcs = open_rpcs
        self._authorizer = authorizer
        self._decoder = decoder

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Wraps the handler of one call; gRPC's own services are not wrapped."""
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        if handler is None or method.startswith("/grpc."):
            return handler
        inner = handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary
        # Requests are parsed inside the boundary, as gRPC reports malformed ones as INTERNAL.
        decode: Any = partial(self._decoder.decoded, method, handler.request_deserializer)
        if handler.request_streaming:
            decode = partial(_decoded_stream, decode)
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
                    self._authorizer.check(service, context)
                    message = decode(request)
                    result = inner(await message if inspect.isawaitable(message) else message, context)
                    if not inspect.isasyncgen(result):
                        return await result
                    # Closes the generator at once when the call is cancelled in a write.
                    async with aclosing(result) as responses:
                        async for response in responses:
                            await context.write(response)
                except grpc.aio.AbortError:
                    raise
                except Exception as error:
                    await abort_with(context, error)

        return call


LimitOf = Callable[[str], int | None]
"""The most bytes of a request, by the method's full name; None: no limit of its own."""


class RequestDecoder:
    """Parses requests: large ones after their bounds were checked, on a thread of its own."""

    def __init__(self, limit_of: LimitOf) -> None:
        self._limit_of = limit_of
        self._thread = ParserThread()

    async def decoded(self, method: str, decode: Any, data: bytes) -> Any:
        """The message. Raises InvalidArgumentError if it is too large, has too many fields or cannot be parsed."""
        if len(data) <= UNCOUNTED_BYTES:
            return _parsed(decode, data)
        limit = self._limit_of(method)
        if limit is not None and len(data) > limit:
            text = f"the request has {len(data)} bytes; requests here have at most {limit}"
            raise InvalidArgumentError(text, reason="REQUEST_TOO_LARGE")
        return await self._thread.run(len(data), _checked, method, decode, data)

    def close(self) -> None:
        """Lets the thread end."""
        self._thread.close()


def _checked(method: str, decode: Any, data: bytes) -> Any:
    known = descriptor_pool.Default().FindMethodByName(method[1:].replace("/", "."))
    check_fields(data, known.input_type)
    return _parsed(decode, data)


def _parsed(decode: Any, data: bytes) -> Any:
    try:
        return decode(data)
    except DecodeError as error:
        # The parser's message names the field in some cases, for example invalid UTF-8.
        raise InvalidArgumentError(f"message cannot be parsed: {error}", reason="MALFORMED_MESSAGE") from None


async def _decoded_stream(decode: Any, requests: AsyncIterable[bytes]) -> AsyncIterator[Any]:
    async for data in requests:
        yield await decode(data)


_HANDLER_MAKERS: dict[tuple[bool, bool], Any] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
