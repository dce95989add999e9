"""One HTTP request and its response, directly on ASGI: no wrapper between a token and the socket.

`Endpoint` wraps the handler of every path and turns exceptions into error responses: status, OpenAI's error object,
retry headers. OpenAI's clients choose the type of their exception by the status
(https://platform.openai.com/docs/guides/error-codes).
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Never

import grpc
from starlette.types import Message, Receive, Scope, Send

from coordinator.entrypoints.inference_api import InputLimits
from coordinator.request.inference_request import REQUEST_ID, Authenticator, Caller
from coordinator.tenants.access_control import BEARER
from splitserve.errors import InvalidArgumentError, PermissionDeniedError, SplitserveError
from splitserve.logs import log_exception
from splitserve.rpc.status import known_error

Headers = list[tuple[bytes, bytes]]

DEFAULT_RETRY_AFTER_S = 1.0
STATUS: Mapping[grpc.StatusCode, int] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.FAILED_PRECONDITION: 503,
    grpc.StatusCode.CANCELLED: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
"""HTTP status by gRPC code; 500 for all other codes."""
TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
"""Error types by status. Other statuses are "invalid_request_error" below 500 and "server_error" from 500 on."""
CODES: Mapping[str, str | None] = {
    "INVALID_ARGUMENT": "invalid_value",
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "UNAUTHENTICATED": "invalid_api_key",
    "WRONG_API_KEY": "invalid_api_key",
    "RESOURCE_EXHAUSTED": "rate_limit_exceeded",
    "TENANT_QUOTA": "rate_limit_exceeded",
    "TENANT_CONCURRENCY": "rate_limit_exceeded",
}
"""OpenAI's error code by reason. The code of any other reason is the reason in lower case."""
CHALLENGE = (b"www-authenticate", b'Bearer realm="splitserve"')
"""The header that RFC 9110 requires in a response with status 401."""


class HttpError(InvalidArgumentError):
    """An error with an HTTP status of its own, such as 405."""

    def __init__(self, status: int, message: str, reason: str, headers: Headers | None = None) -> None:
        super().__init__(message, reason=reason)
        self.status = status
        self.headers = headers or []


class FieldNames:
    """Maps gRPC field names to those of one HTTP request, so that errors name what the client sent."""

    def __init__(
        self, names: Mapping[str, str] | None = None, parts: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """`names`: HTTP names by prefix of the gRPC name. `parts`: replacements for the first
        such word in a message."""
        self._names = {"sampling.": "", "stop.stop_strings": "stop", "stop.": "", **(names or {})}
        self._parts = parts

    def http_name(self, field: str) -> str:
        """The HTTP name of a gRPC field."""
        for prefix, name in sorted(self._names.items(), key=lambda item: -len(item[0])):
            if field.startswith(prefix):
                return name + field[len(prefix) :]
        return field

    def reworded(self, error: SplitserveError) -> str:
        """The error's message with HTTP field names."""
        if error.field is None:
            return error.message
        message = error.message.replace(error.field, self.http_name(error.field))
        # The first one alone: later words may be the client's own.
        part = next((word for word in re.findall(r"\w+", message) if word in self._parts), None)
        return message if part is None else message.replace(part, self._parts[part], 1)


NO_NAMES = FieldNames()


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """An error as an HTTP response."""

    status: int
    shown: Mapping[str, Any]
    """OpenAI's error object."""
    headers: Headers

    @property
    def body(self) -> bytes:
        """The body in OpenAI's form, `{"error": {...}}`."""
        return json_bytes({"error": self.shown})


ErrorBody = Callable[[ErrorResponse], bytes]
"""The body in an API's own form."""


def json_bytes(value: Any) -> bytes:
    """A value as JSON without spaces; what is no Unicode in it becomes question marks."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def error_response(error: Exception, names: FieldNames = NO_NAMES) -> ErrorResponse:
    """The response for an error. Call it from an `except` block.

    Anything but a SplitserveError becomes status 500 with an incident id, under which the traceback is logged.
    """
    shown = known_error(error)
    if shown is None:
        incident = uuid.uuid4().hex[:12]
        log_exception("http.internal_error", error, incident=incident)
        shown = SplitserveError(f"internal error, incident {incident}")
    if isinstance(shown, HttpError):
        return ErrorResponse(shown.status, _shown(shown.status, shown, names), shown.headers)
    status = STATUS.get(shown.code, 500)
    headers = [CHALLENGE] if status == 401 else _retry_headers(status, shown)
    return ErrorResponse(status, _shown(status, shown, names), headers)


def _shown(status: int, error: SplitserveError, names: FieldNames) -> dict[str, Any]:
    return {
        "message": names.reworded(error),
        "type": TYPES.get(status, "invalid_request_error" if status < 500 else "server_error"),
        "param": names.http_name(error.field) if error.field is not None else None,
        "code": CODES.get(error.reason, error.reason.lower()),
    }


def _retry_headers(status: int, error: SplitserveError) -> Headers:
    """`retry-after` for errors with a hint and for any 503. Waiting does not help after a 429 without a hint."""
    seconds = error.retry_after_s
    if seconds is None:
        if status != 503:
            return []
        seconds = DEFAULT_RETRY_AFTER_S
    return [
        (b"retry-after", b"%d" % max(1, math.ceil(seconds))),
        (b"retry-after-ms", b"%d" % max(1, math.ceil(seconds * 1e3))),
    ]


BODY_TIMEOUT_S = 60.0
"""Longest time from the end of the head to the end of the body."""
LINGER_S, LINGER_BYTES = 2.0, 64 * 2**20
"""How long, and how much of, a refused body is read: a client that still writes would see a broken pipe instead of the
response."""
ERROR_WRITE_S = 5.0
"""Longest time that an error waits for a client that does not read."""
JSON_TYPE = b"application/json"
EVENTS_TYPE = b"text/event-stream; charset=utf-8"
COMPRESSED = frozenset(("gzip", "x-gzip", "deflate", "compress", "x-compress", "br", "zstd"))
"""Content encodings that are refused. Other values have no effect: some clients write their charset there."""
CHOICE_DIGITS = 5
"""Characters of a request id that are left for the index of a choice."""

OnLost = Callable[[], None]


class ClientGoneError(Exception):
    """The client has closed the connection; no response is possible."""


class HttpExchange:
    """One request (`caller`, `header`, `body`) and its response (`respond`, or `event` until `end_events`)."""

    def __init__(
        self, authenticator: Authenticator, limits: InputLimits, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self.method: str = scope.get("method", "")
        self.path_params: dict[str, str] = scope.get("path_params", {})
        self.query: bytes = scope.get("query_string", b"")
        self.field_names: FieldNames = NO_NAMES
        """Field names for errors. Set when the request has been parsed."""
        self.error_body: ErrorBody = lambda response: response.body
        self.error_event: ErrorBody = lambda response: b"data: %s\n\n" % response.body
        """Renders the error that ends a stream."""
        self.response_headers: Headers = []
        """Sent with any response."""
        self.started = False
        """Whether the status has been sent."""
        self._beginning = asyncio.Lock()
        self._all_headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
        self._headers: dict[bytes, bytes] = dict(reversed(self._all_headers))
        connection: Mapping[str, Any] = scope.get("state", {})
        self._abort: Callable[[], None] | None = connection.get("abort_connection")
        self._is_writable: Callable[[], bool] = connection.get("is_writable", lambda: False)
        self._write_chunk: Callable[[bytes], None] | None = connection.get("write_chunk")
        self._when_lost: Callable[[OnLost | None], None] = connection.get("when_lost", lambda _: None)
        self._authenticator, self._limits = authenticator, limits
        self._receive, self._send = receive, send
        requested_id = self.header(b"x-request-id") or ""
        fits = len(requested_id) < 128 - CHOICE_DIGITS and REQUEST_ID.match(requested_id)
        self.request_id = requested_id if fits else secrets.token_hex(16)
        self.response_headers.append((b"x-request-id", self.request_id.encode()))

    def header(self, name: bytes) -> str | None:
        """The first value of a request header; `name` is in lower case."""
        value = self._headers.get(name)
        return None if value is None else value.decode("latin-1")

    def joined(self, name: bytes) -> str | None:
        """All values of a request header, with commas between them; `name` is in lower case."""
        values = [value for key, value in self._all_headers if key == name]
        return b",".join(values).decode("latin-1") if values else None

    @property
    def credential(self) -> str | None:
        """The API key from `Authorization: Bearer KEY`, or else `x-api-key: KEY`."""
        authorization = self.header(b"authorization") or ""
        if authorization[: len(BEARER)].lower() == BEARER:
            return authorization[len(BEARER) :].strip()
        return self.header(b"x-api-key")

    def caller(self) -> Caller:
        """The caller of the request. Raises UnauthenticatedError."""
        return self._authenticator.caller(self.credential)

    async def json_body(self) -> bytes:
        """The body of a POST. Raises HttpError unless its content type is JSON: a form on another site's page cannot
        send that type without a CORS preflight."""
        content_type = (self.header(b"content-type") or "").partition(";")[0].strip().lower()
        body = await self.body(self._limits.request_bytes)
        if content_type.encode() != JSON_TYPE:
            raise HttpError(415, "content-type must be application/json", "UNSUPPORTED_MEDIA_TYPE")
        encodings = (self.joined(b"content-encoding") or "").lower().split(",")
        if not COMPRESSED.isdisjoint(encoding.strip() for encoding in encodings):
            message = "content-encoding must be identity: bodies are not decompressed"
            raise HttpError(415, message, "UNSUPPORTED_MEDIA_TYPE")
        return body

    async def body(self, limit_bytes: int) -> bytes:
        """The request's body. Raises HttpError if it is too long or too slow, ClientGoneError if it is cut off."""
        pieces: list[bytes] = []

        async def keep(piece: bytes) -> None:
            pieces.append(piece)

        await self.read_body(keep, limit_bytes, BODY_TIMEOUT_S)
        return b"".join(pieces)

    async def read_body(
        self, take: Callable[[bytes], Awaitable[None]], limit_bytes: int, timeout_s: float
    ) -> None:
        """Passes the request's body to `take` as it comes. Raises as `body` does, and what `take` raises; the rest of
        the body is then read for a while."""
        declared = self.header(b"content-length") or "0"
        length = int(declared) if declared.isdigit() else 0
        size, more = 0, True
        try:
            async with asyncio.timeout(timeout_s):
                if length > limit_bytes:
                    await self._refuse_length(limit_bytes, self.header(b"expect") is None)
                while more:
                    message = await self._receive_body()
                    piece = message.get("body", b"")
                    size += len(piece)
                    more = message.get("more_body", False)
                    if size > limit_bytes:
                        await self._refuse_length(limit_bytes, more)
                    await take(piece)
        except TimeoutError:
            text = f"the request's body took longer than {timeout_s:g} s"
            raise HttpError(408, text, "BODY_TIMEOUT", [(b"connection", b"close")]) from None
        except SplitserveError as error:
            if not isinstance(error, HttpError):
                await self._read_rest(more)
                self.response_headers.append((b"connection", b"close"))
            raise

    async def respond(self, status: int, body: bytes, content_type: bytes = JSON_TYPE) -> None:
        """Sends a complete response."""
        headers = [
            (b"content-type", content_type),
            (b"content-length", b"%d" % len(body)),
            *self.response_headers,
        ]
        await self._start(status, headers)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def respond_pieces(self, size: int, pieces: AsyncIterator[bytes]) -> None:
        """Sends a file of `size` bytes. Aborts the connection if `pieces` fail, or if the client does not read a piece
        for BODY_TIMEOUT_S."""
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", b"%d" % size),
            (b"content-disposition", b"attachment"),
            (b"x-content-type-options", b"nosniff"),
            *self.response_headers,
        ]
        await self._start(200, headers)
        try:
            async for piece in pieces:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, SplitserveError):
            if self._abort is not None:
                self._abort()

    async def event(self, data: bytes) -> None:
        """Sends rendered server-sent events. Waits while the client is not reading."""
        if not self.started:
            await self._begin_events()
        if self.takes_events:
            self.event_now(data)
        else:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def _begin_events(self) -> None:
        """Sends the status of a stream once, though several choices may begin the stream concurrently. Waits while the
        client does not read an earlier response on this connection."""
        async with self._beginning:
            if self.started:
                return
            headers = [
                (b"content-type", EVENTS_TYPE),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
                *self.response_headers,
            ]
            await self._start(200, headers)

    async def _start(self, status: int, headers: Headers) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self.started = True

    @property
    def takes_events(self) -> bool:
        """Whether `event_now` may be called: the status has been sent, the stream has not ended, and the client
        reads."""
        return self.started and self._write_chunk is not None and self._is_writable()

    def event_now(self, data: bytes) -> None:
        """Sends at least one rendered server-sent event without a wait. Call it only while `takes_events`. It bypasses
        uvicorn's `send`, which would take a fifth of the time per message; `send` begins and ends the response."""
        assert self._write_chunk is not None, "the stream has ended"
        self._write_chunk(data)

    async def end_events(self, data: bytes = b"") -> None:
        """Sends `data` and ends the stream."""
        self._write_chunk = None
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def fail(self, error: Exception) -> None:
        """Responds with an error, as an event if the stream has begun. Aborts the connection if the client does not
        read the error. Call it from an `except` block."""
        response = error_response(error, self.field_names)
        try:
            async with asyncio.timeout(ERROR_WRITE_S):
                if self.started:
                    await self.end_events(self.error_event(response))
                else:
                    self.response_headers.extend(response.headers)
                    await self.respond(response.status, self.error_body(response))
        except TimeoutError:
            if self._abort is not None:
                self._abort()

    @asynccontextmanager
    async def while_connected(self) -> AsyncIterator[None]:
        """Cancels the block when the client disconnects, and raises ClientGoneError. Read the request's body before."""
        gone = asyncio.timeout(None)  # the loss of the connection sets its deadline

        def lost() -> None:
            with suppress(RuntimeError):  # the block has ended in the meantime
                gone.reschedule(asyncio.get_running_loop().time())

        try:
            async with gone:
                # A callback, because a waiting task for each request would take a tenth of the event loop's time.
                self._when_lost(lost)
                yield
        except TimeoutError:
            if not gone.expired():
                raise
            raise ClientGoneError from None
        finally:
            self._when_lost(None)

    async def _receive_body(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        return message

    async def _read_rest(self, more: bool) -> None:
        """Reads what follows of the body if there is `more` of it, for a while (LINGER_S, LINGER_BYTES)."""
        read = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while more and read < LINGER_BYTES:
                    message = await self._receive_body()
                    read += len(message.get("body", b""))
                    more = message.get("more_body", False)

    async def _refuse_length(self, limit_bytes: int, more: bool) -> Never:
        """Raises HttpError, after reading the rest for a while."""
        await self._read_rest(more)
        text = f"the request's body must be at most {limit_bytes} bytes"
        raise HttpError(413, text, "BODY_TOO_LARGE", [(b"connection", b"close")])


ANY_ORIGIN = "*"
PREFLIGHT_AGE_S = 600
"""How long a browser may keep the answer to a preflight."""


async def _is_preflight(exchange: HttpExchange, origins: Collection[str], method: str) -> bool:
    """Adds the headers of CORS (https://fetch.spec.whatwg.org/#http-cors-protocol) to the response. Responds to a
    preflight, which has no API key, and returns True. Cookies are never allowed: the API has none.

    Raises PermissionDeniedError for a preflight of another origin.
    """
    exchange.response_headers.append((b"vary", b"Origin"))
    origin = exchange.header(b"origin")
    if origin is None:
        return False
    requested = exchange.header(b"access-control-request-method") if method == "OPTIONS" else None
    if ANY_ORIGIN not in origins and origin not in origins:
        if requested is not None:
            message = f"the origin {origin[:128]!r} is not among this server's allowed_origins"
            raise PermissionDeniedError(message, reason="ORIGIN_NOT_ALLOWED")
        return False
    allowed = ANY_ORIGIN if ANY_ORIGIN in origins else origin
    exchange.response_headers += [
        (b"access-control-allow-origin", allowed.encode("latin-1")),
        (b"access-control-expose-headers", b"*"),
    ]
    if requested is None:
        return False
    headers = exchange.joined(b"access-control-request-headers") or ""
    exchange.response_headers += [
        (b"access-control-allow-methods", requested.encode("latin-1")),
        # By name: a wildcard does not stand for `authorization`.
        (b"access-control-allow-headers", headers.encode("latin-1")),
        (b"access-control-max-age", b"%d" % PREFLIGHT_AGE_S),
        (b"vary", b"Access-Control-Request-Headers"),
    ]
    await exchange.respond(200, b"")
    return True


Serve = Callable[[HttpExchange], Awaitable[None]]


READS = ("GET", "HEAD")


class ApiPath(NamedTuple):
    """A path of an API, with the methods that it takes. Others get status 405."""

    methods: tuple[str, ...]
    """Empty: all."""
    path: str
    serve: Serve
    error_body: ErrorBody | None = None
    """None: OpenAI's form."""
    is_shared: bool = True
    """Whether pages of `allowed_origins` may read the responses."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The ASGI application of a path: passes requests to its handler and turns exceptions into responses."""

    path: ApiPath
    authenticator: Authenticator
    limits: InputLimits
    origins: Collection[str] = ()
    """Origins whose pages browsers let read the responses; ANY_ORIGIN is all. Empty: those of this server alone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        exchange, path = HttpExchange(self.authenticator, self.limits, scope, receive, send), self.path
        exchange.error_body = path.error_body or exchange.error_body
        try:
            origins = self.origins if path.is_shared else ()
            if origins and await _is_preflight(exchange, origins, scope["method"]):
                return
            if path.methods and scope["method"] not in path.methods:
                allowed = ", ".join(path.methods)
                headers = [(b"allow", allowed.encode())]
                raise HttpError(405, f"this path takes {allowed} only", "METHOD_NOT_ALLOWED", headers)
            await path.serve(exchange)
        except ClientGoneError:
            return
        except Exception as error:
            await exchange.fail(error)
