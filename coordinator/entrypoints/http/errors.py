"""Maps splitserve's errors to HTTP: status, OpenAI's error object, retry headers.

The object has the form of https://platform.openai.com/docs/guides/error-codes, which the official clients turn into
typed exceptions by status.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from splitserve.errors import InvalidArgumentError, SplitserveError
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
"""Everything else is 500."""
TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
"""Other statuses below 500 are "invalid_request_error", from 500 on "server_error"."""
CODES: Mapping[str, str | None] = {
    "INVALID_ARGUMENT": "invalid_value",
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "UNAUTHENTICATED": "invalid_api_key",
    "WRONG_API_KEY": "invalid_api_key",
    "RESOURCE_EXHAUSTED": "rate_limit_exceeded",
    "TENANT_QUOTA": "rate_limit_exceeded",
    "TENANT_CONCURRENCY": "rate_limit_exceeded",
}
"""OpenAI's error code for a reason; other reasons are used in lower case."""


class HttpError(InvalidArgumentError):
    """An error with an HTTP status of its own, such as 405."""

    def __init__(self, status: int, message: str, reason: str, headers: Headers | None = None) -> None:
        super().__init__(message, reason=reason)
        self.status = status
        self.headers = headers or []


class FieldNames:
    """Maps gRPC field names to those of one HTTP request, so that errors name what the client sent."""

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self._given = names or {}

    def http_name(self, field: str) -> str:
        """The HTTP name of a gRPC field."""
        names = {"sampling.": "", "stop.stop_strings": "stop", "stop.": "", **self._given}
        for prefix, name in sorted(names.items(), key=lambda item: -len(item[0])):
            if field.startswith(prefix):
                return name + field[len(prefix) :]
        return field

    def reworded(self, error: SplitserveError) -> str:
        """The error's message with HTTP field names."""
        if error.field is None:
            return error.message
        return error.message.replace(error.field, self.http_name(error.field))


NO_NAMES = FieldNames()


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """An error as an HTTP response."""

    status: int
    body: bytes
    """`{"error": {...}}`"""
    headers: Headers


def error_response(error: Exception, names: FieldNames = NO_NAMES) -> ErrorResponse:
    """The response for an error. Call it from an `except` block.

    Anything but a SplitserveError becomes status 500 with an incident id, under which the traceback is logged.
    """
    known = known_error(error)
    if known is None:
        incident = uuid.uuid4().hex[:12]
        log_exception("http.internal_error", error, incident=incident)
        known = SplitserveError(f"internal error, incident {incident}")
    if isinstance(known, HttpError):
        return ErrorResponse(known.status, _body(known.status, known, names), known.headers)
    status = STATUS.get(known.code, 500)
    return ErrorResponse(status, _body(status, known, names), _retry_headers(status, known))


def _body(status: int, error: SplitserveError, names: FieldNames) -> bytes:
    shown: dict[str, Any] = {
        "message": names.reworded(error),
        "type": TYPES.get(status, "invalid_request_error" if status < 500 else "server_error"),
        "param": names.http_name(error.field) if error.field is not None else None,
        "code": CODES.get(error.reason, error.reason.lower()),
    }
    return json.dumps({"error": shown}, ensure_ascii=False).encode("utf-8", "replace")


def _retry_headers(status: int, error: SplitserveError) -> Headers:
    """`retry-after` for errors with a hint and for any 503; a 429 without a hint does not depend on time."""
    seconds = error.retry_after_s
    if seconds is None:
        if status != 503:
            return []
        seconds = DEFAULT_RETRY_AFTER_S
    return [
        (b"retry-after", b"%d" % max(1, math.ceil(seconds))),
        (b"retry-after-ms", b"%d" % max(1, math.ceil(seconds * 1e3))),
    ]
