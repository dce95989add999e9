"""One tree of errors. Each kind knows its gRPC code; `splitserve.rpc` maps them at one boundary."""

from __future__ import annotations

import grpc


class SplitserveError(Exception):
    """Base of everything splitserve raises on purpose.

    `reason` is the upper-case word that goes into `google.rpc.ErrorInfo`, stable for programs;
    `message` is one line for people; `field` names the offending input, where there is one;
    `retry_after_s` is the hint sent as `RetryInfo`, in seconds.
    """

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL
    default_reason = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.field = field
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message


class InvalidArgumentError(SplitserveError):
    """The request itself is wrong; `field` says where."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "INVALID_ARGUMENT"


class NotFoundError(SplitserveError):
    """A model, worker or file that does not exist."""

    code = grpc.StatusCode.NOT_FOUND
    default_reason = "NOT_FOUND"


class UnauthenticatedError(SplitserveError):
    """No credential, or one that is not known."""

    code = grpc.StatusCode.UNAUTHENTICATED
    default_reason = "UNAUTHENTICATED"


class PermissionDeniedError(SplitserveError):
    """The caller is known and may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED
    default_reason = "PERMISSION_DENIED"


class ResourceExhaustedError(SplitserveError):
    """No room now (with a retry hint) or ever (without one)."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    default_reason = "RESOURCE_EXHAUSTED"


class FailedPreconditionError(SplitserveError):
    """The two sides do not fit each other, or not yet."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "FAILED_PRECONDITION"


class UnavailableError(SplitserveError):
    """A part that should be there is not; trying again may help."""

    code = grpc.StatusCode.UNAVAILABLE
    default_reason = "UNAVAILABLE"


class DeadlineExceededError(SplitserveError):
    """The request's own deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class CancelledByPeerError(SplitserveError):
    """The other side gave the request up."""

    code = grpc.StatusCode.CANCELLED
    default_reason = "CANCELLED"


class UnsupportedModelError(InvalidArgumentError):
    """A model family or option that the engine refuses at load, with the reason."""

    default_reason = "UNSUPPORTED_MODEL"


class TransferError(UnavailableError):
    """A KV write failed or its peer is gone."""

    default_reason = "TRANSFER_FAILED"


class ConfigError(InvalidArgumentError):
    """A setting is wrong; `field` names it."""

    default_reason = "INVALID_CONFIG"
