"""Conversion between splitserve's errors and gRPC status.

`status_of` turns a `SplitserveError` into a status with `google.rpc.ErrorInfo` (domain "splitserve", `reason`,
metadata `{"field": ...}`) and `google.rpc.RetryInfo`; `error_from_rpc` restores the subclass from it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any, Never

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from splitserve.errors import (
    ERROR_BY_CODE,
    BrokenInvariantError,
    DeadlineExceededError,
    InvalidArgumentError,
    SplitserveError,
    UnavailableError,
)
from splitserve.logs import log_context, log_exception
from splitserve.tracing.context import TraceContext, trace_id_of

ERROR_DOMAIN = "splitserve"
GRAMMAR_FAILED = "GRAMMAR_FAILED"
"""Reason of an answer that cannot be continued within its grammar on any worker."""
TLS_SIGNS = ("handshake failed", "verification check failed", "VERIFY_FAILED")
"""Parts of gRPC's messages that identify a failed TLS handshake."""
MAX_MESSAGE_BYTES = 1000
MAX_FIELD_BYTES = 200
"""Limits in UTF-8 bytes. A status is sent in HTTP/2 trailers; above 8 KiB in total gRPC rejects some at random. There
a byte of the message takes up to 4.4 bytes: percent-encoded once, and in base64 in the details."""

_NOT_THE_REQUEST = (BrokenInvariantError, KeyboardInterrupt, SystemExit, GeneratorExit)
_CODES = {code.value[0]: code for code in grpc.StatusCode}


def status_of(error: SplitserveError) -> status_pb2.Status:
    """The wire form of an error: code, message, ErrorInfo and, with a retry hint, RetryInfo."""
    message = _cut(error.message, MAX_MESSAGE_BYTES)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)
    if error.field is not None:
        info.metadata["field"] = _cut(error.field, MAX_FIELD_BYTES)
    status = status_pb2.Status(code=error.code.value[0], message=message, details=[_packed(info)])
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        status.details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> Never:
    """Ends an RPC with the status of `shown_error(error)`; always raises. Call it from an `except` block."""
    status = rpc_status.to_status(status_of(shown_error(error)))
    await context.abort(status.code, status.details, status.trailing_metadata)


def shown_error(error: Exception) -> SplitserveError:
    """The error to show to a client. Call it from an `except` block.

    Anything but a SplitserveError becomes INTERNAL with an incident id; the traceback is logged under that id and
    not sent to the client.
    """
    return known_error(error) or _incident("rpc.internal_error", error, "internal error")


def request_error(
    error: BaseException, request_id: str, trace: TraceContext | None = None
) -> SplitserveError:
    """The error that fails the request whose handling in an engine raised `error`, and nothing else. Call it where the
    request can be ended.

    Any other exception than a SplitserveError becomes INTERNAL with an incident id, and its traceback is logged.
    Callers catch BaseException, because a panic of a Rust library is no Exception. A BrokenInvariantError and the
    interpreter's own exits are raised again.
    """
    if isinstance(error, SplitserveError):
        return error
    if isinstance(error, _NOT_THE_REQUEST):
        raise error
    with log_context(request_id=request_id, trace_id=trace_id_of(trace)):
        return _incident("engine.request_failed", error, "the engine failed on this request")


def _incident(event: str, error: BaseException, what: str) -> SplitserveError:
    incident = uuid.uuid4().hex[:12]
    log_exception(event, error, incident=incident)
    return SplitserveError(f"{what}, incident {incident}")


def known_error(error: BaseException) -> SplitserveError | None:
    """The exception itself if it is a SplitserveError, or the first one in an exception group; else None."""
    if isinstance(error, SplitserveError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next((known for inner in error.exceptions if (known := known_error(inner))), None)
    return None


def error_from_rpc(error: grpc.aio.AioRpcError) -> SplitserveError:
    """The SplitserveError subclass of a failed call, with its reason, field and retry hint, if any.

    A code without a subclass gives a SplitserveError with the code's name as its reason.
    """
    return _error(error.code(), error.details() or "", _details(error))


def error_from_status(status: status_pb2.Status) -> SplitserveError:
    """The inverse of `status_of`, for a status that was sent in a message."""
    return _error(_CODES.get(status.code, grpc.StatusCode.UNKNOWN), status.message, status.details)


def _error(code: grpc.StatusCode, message: str, details: Iterable[any_pb2.Any]) -> SplitserveError:
    message = message or code.name.lower().replace("_", " ")
    kind = ERROR_BY_CODE.get(code, SplitserveError)
    reason = None if code in ERROR_BY_CODE else code.name
    field: str | None = None
    retry_after_s: float | None = None
    if code == grpc.StatusCode.UNAVAILABLE and any(sign in message for sign in TLS_SIGNS):
        reason = "TLS_FAILED"
    for detail in details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
            reason = info.reason or reason
            field = info.metadata.get("field")
        elif detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return kind(message, reason=reason, field=field, retry_after_s=retry_after_s)


def failure_error(reason: str, message: str) -> SplitserveError:
    """The error of a request that failed in an engine. UNAVAILABLE only if another worker may succeed."""
    if reason == DeadlineExceededError.default_reason:
        return DeadlineExceededError(message, reason=reason)
    if reason == GRAMMAR_FAILED:
        return InvalidArgumentError(message, reason=reason, field="sampling.grammar")
    if reason == SplitserveError.default_reason:  # the request's own doing: it would fail on every worker
        return SplitserveError(message)
    return UnavailableError(message, reason=reason)


def _cut(text: str, limit_bytes: int) -> str:
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= limit_bytes:
        return encoded.decode("utf-8")  # without halves of surrogate pairs, which no message may have
    return encoded[: limit_bytes - len("…".encode())].decode("utf-8", "ignore") + "…"


def _packed(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _details(error: grpc.aio.AioRpcError) -> list[any_pb2.Any]:
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
    except ValueError:  # a proxy changed code or message, so the details no longer match
        return []
    return list(status.details) if status else []
