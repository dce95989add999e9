"""What a failed call to a coordinator means, in words for its caller."""

from __future__ import annotations

import re

import grpc

from splitserve.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    SplitserveError,
    UnavailableError,
)
from splitserve.rpc.status import error_from_rpc

DETAILS_KEY = "grpc-status-details-bin"
CONNECTION_LOST = "CONNECTION_LOST"
"""Reason of a call whose connection broke after the call was sent and before its answer was complete."""
NEVER_SENT = "failed to connect"
"""Start of gRPC's message for a call that found no connection."""
_HUNG_UP = re.compile("Socket closed|Connection reset by peer|Broken pipe|(keepalive|ping) timeout")


def described(
    error: grpc.aio.AioRpcError, target: str, timeout_s: float, *, received: bool = False, tls: bool = False
) -> SplitserveError:
    """The error of a failed call with a readable message.

    `received`: a part of the answer had arrived. Errors with status details are splitserve's own and stay unchanged.
    """
    known = error_from_rpc(error)
    if any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ()):
        return known
    hung_up = _HUNG_UP.search(known.message)
    match error.code():
        case grpc.StatusCode.UNAVAILABLE if known.reason == "TLS_FAILED":
            message = f"no trusted connection to {target}: its certificate or ours was not accepted, or it has no TLS"
            return UnavailableError(message, reason="TLS_FAILED")
        case grpc.StatusCode.UNAVAILABLE if received or (
            hung_up and not known.message.startswith(NEVER_SENT)
        ):
            message = f"the connection to {target} broke before the answer was complete"
            return UnavailableError(message, reason=CONNECTION_LOST)
        case grpc.StatusCode.UNAVAILABLE if hung_up:
            hint = "does it want no TLS, or our certificate?" if tls else "does it want TLS?"
            return UnavailableError(f"{target} hung up: {hint}", reason="UNREACHABLE")
        case grpc.StatusCode.UNAVAILABLE:
            why = known.message.rpartition(": ")[2].rstrip("]")  # gRPC's innermost cause
            message = f"cannot reach a splitserve coordinator at {target} ({why}): is it running?"
            return UnavailableError(f"{message} (splitserve up)", reason="UNREACHABLE")
        case grpc.StatusCode.UNIMPLEMENTED:
            message = f"the gRPC server at {target} is no splitserve coordinator"
            return FailedPreconditionError(message, reason="WRONG_SERVER")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return took_too_long(target, timeout_s)
    return known


def took_too_long(target: str, timeout_s: float) -> DeadlineExceededError:
    """The error when the client's own timeout is over."""
    return DeadlineExceededError(f"{target} gave no complete answer within {timeout_s:g} s")


def ended_early(target: str) -> UnavailableError:
    """The error of a stream that ended without its last message."""
    return UnavailableError(f"{target} ended the stream early", reason="STREAM_BROKEN")


def checked_timeout(timeout_s: float) -> float:
    """Returns `timeout_s`. Raises InvalidArgumentError unless it is finite and above 0."""
    if not 0 < timeout_s < float("inf"):
        raise InvalidArgumentError(
            f"timeout_s must be finite and above 0, not {timeout_s}", field="timeout_s"
        )
    return timeout_s
