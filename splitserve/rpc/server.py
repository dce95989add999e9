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
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2
from typing_extensions import override

from splitserve.errors import InvalidArgumentError, UnavailableError
from splitserve.logs import log_event
from splitserve.rpc.channel import (
    DEFAULT_MAX_MESSAGE_BYTES,
    KEEPALIVE_TIME_MS,
    LONG_LIVED_METHODS,
    Options,
    common_options,
)
from splitserve.rpc.message_bounds import UNCOUNTED_BYTES, check_fields
from splitserve.rpc.status import abort_with
from splitserve.runtime.call_thread import ParserThread
from splitserve.runtime.process import connections_that_fit
from splitserve.security.authorizer import ALLOW_ALL, RpcAuthorizer
from splitserve.security.tls import ServerTls

_KINDS = health_pb2.HealthCheckResponse
REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"


class Health(health_pb2_grpc.HealthServicer):
    """Health of the services that `set` has named; "" is the server as a whole."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {"": _KINDS.SERVING}
        self._changed = asyncio.Event()

    def set(self, names: Iterable[str], *, serving: bool) -> None:
        """Sets the status of services, and wakes their watchers."""
        self._statuses |= dict.fromkeys(names, _KINDS.SERVING if serving else _KINDS.NOT_SERVING)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @override
    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        """Answers with the present status; NOT_FOUND for an unknown service."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=status)

    @override
    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """Sends the status, and each change of it, until the caller leaves; SERVICE_UNKNOWN for an unknown service."""
        last = None
        while True:
            changed, status = self._changed, self._statuses.get(request.service, _KINDS.SERVICE_UNKNOWN)
            if status != last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
            await changed.wait()


DEFAULT_MAX_CONNECTIONS = 10_000
LISTENERS = 3
"""Listeners that share a process's open files: a gRPC port, one for the cluster, one for HTTP."""
STOP_S = 10.0
"""How long a server may take to stop beyond its grace."""
IDLE_CONNECTION_MS = 600_000
"""A connection without calls is closed after this time; clients reconnect at their next call."""


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
        self.none_open = asyncio.Event()
        """Set while the count is 0: each handler has handed its status to gRPC."""
        self.none_open.set()

    @contextmanager
    def track(self, method: str) -> Iterator[None]:
        """Counts a handler while it runs. `method` is the full name, "/package.Service/Method"."""
        counted = 0 if method in LONG_LIVED_METHODS or method.startswith("/grpc.") else 1
        self._add(counted)
        try:
            yield
        finally:
            self._add(-counted)

    def _add(self, count: int) -> None:
        self.count += count
        if self.count:
            self.none_open.clear()
        else:
            self.none_open.set()


class RpcServer:
    """A gRPC server with error boundary, health and reflection.

    Add servicers to `grpc_server`, then call `start`. Health covers "" and every service named there.
    """

    def __init__(
        self,
        *,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        open_rpcs: OpenRpcs | None = None,
        authorizer: RpcAuthorizer = ALLOW_ALL,
        limit_of: LimitOf = lambda method: None,
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
    ) -> None:
        """`open_rpcs` counts the running handlers; `authorizer` checks their callers; `limit_of` returns the most bytes
        of a method's request, None where only `max_message_bytes` limits it; `max_connections` is lowered to what the
        limit of open files leaves."""
        self.open_rpcs = open_rpcs or OpenRpcs()
        self._decoder = RequestDecoder(limit_of)
        self.grpc_server = grpc.aio.server(
            interceptors=[_Boundary(self.open_rpcs, authorizer, self._decoder)],
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
        self._reflect((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME))
        bound = self.listen(host, port, tls, mutual=mutual)
        await self.grpc_server.start()
        await self.set_serving(True)
        return bound

    def _reflect(self, service_names: Sequence[str]) -> None:
        """Serves reflection in both versions: `v1` has the messages of `v1alpha`, the only one in the package."""
        reflection.enable_server_reflection(service_names, self.grpc_server)
        servicer = reflection.aio.ReflectionServicer(service_names)
        handler = grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        methods = grpc.method_handlers_generic_handler(REFLECTION_V1, {"ServerReflectionInfo": handler})
        self.grpc_server.add_generic_rpc_handlers((methods,))

    async def set_serving(self, serving: bool) -> None:
        """Sets the status of health checks; waits for nobody."""
        self._health.set(self._names, serving=serving)

    async def stop(self, grace_s: float | None = None) -> None:
        """Refuses new calls, waits up to `grace_s` seconds for open ones, then cancels them. May be called again.

        Returns at most STOP_S later. A gRPC server that has not stopped by then ends with the process."""
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

    @override
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
                except NotImplementedError:  # by a generated servicer, for a method that ours leaves out
                    await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not served here")
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
            return parsed(decode, data)
        limit = self._limit_of(method)
        if limit is not None and len(data) > limit:
            text = f"the request has {len(data)} bytes; requests here have at most {limit}"
            raise InvalidArgumentError(text, reason="REQUEST_TOO_LARGE")
        return await self._thread.run(len(data), _checked, method, decode, data)

    def close(self) -> None:
        """Lets the thread end."""
        self._thread.close()


def _checked(method: str, decode: Any, data: bytes) -> Any:
    descriptor = descriptor_pool.Default().FindMethodByName(method[1:].replace("/", "."))
    check_fields(data, descriptor.input_type)
    return parsed(decode, data)


def parsed(decode: Any, data: bytes) -> Any:
    """The message that `decode` makes of `data`. Raises InvalidArgumentError (MALFORMED_MESSAGE)."""
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


WRITE_GRACE_S = 1.0
"""Time that a begun write has to end after its call was cancelled, or its messages were to settle."""


async def write_whole(stream: grpc.aio.ServicerContext[Any, Any] | StreamWriter, message: Any) -> None:
    """Completes the write even when cancelled: gRPC accepts no status while a write is in progress."""
    write = asyncio.ensure_future(stream.write(message))
    try:
        await asyncio.shield(write)
    except asyncio.CancelledError:
        write.add_done_callback(_given_up)
        await asyncio.wait([write], timeout=WRITE_GRACE_S)
        raise


def _given_up(write: asyncio.Future[Any]) -> None:
    """Retrieves and logs the error of a write whose waiter was cancelled: asyncio would report it as never
    retrieved."""
    error = None if write.cancelled() else write.exception()
    if error is not None:
        log_event("rpc.write_given_up", level=logging.DEBUG, error=f"{type(error).__name__}: {error}")


class StreamWriter:
    """Writes the messages of one stream, one at a time, with or without a task that waits for it."""

    def __init__(
        self, write: Callable[[Any], Awaitable[None]], on_written: Callable[[], None] = lambda: None
    ) -> None:
        """`write`: the method of the call, or of its context. `on_written` is called after each write without a
        task."""
        self._write = write
        self._on_written = on_written
        self._begun: Generator[Any, None, None] | None = None
        """The write without a task that is in progress."""
        self._over: asyncio.Future[None] | None = None
        """Set when that write is over; exists only while something waits for it."""
        self._error: BaseException | None = None
        """The error of a write without a task; the next write with a task raises it."""

    @property
    def is_ready(self) -> bool:
        """Whether `begin` may be called: no write is in progress, and none has failed."""
        return self._begun is None and self._error is None

    @property
    def has_failed(self) -> bool:
        """Whether a write without a task has failed; nothing can be written any more."""
        return self._error is not None

    async def write(self, message: Any) -> None:
        """Writes a message, after the one in progress. Raises gRPC's errors, also those of a write by `begin`."""
        await self._written()
        if self._error is not None:
            raise self._error
        await self._write(message)

    def begin(self, message: Any) -> None:
        """Begins to write a message, without waiting; only while `is_ready`. gRPC takes the message at once, and tells
        later that another one may follow."""
        self._begun = self._write(message).__await__()
        self._go_on()

    async def settle(self) -> None:
        """Waits for the write in progress, up to WRITE_GRACE_S: a client may not read."""
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
