"""The hierarchy of errors. Each class has its gRPC status code; `splitserve.rpc.status` converts both ways."""

from __future__ import annotations

import grpc


class SplitserveError(Exception):
    """Base of all errors that splitserve raises deliberately.

    `reason` is the stable upper-case identifier in `google.rpc.ErrorInfo`; `message` is one line for people;
    `field` names the invalid input, if any; `retry_after_s` is the retry hint sent as `RetryInfo`, in seconds.
    """

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL
    default_reason = "INTERNAL"

    def __init_subclass__(cls) -> None:
        if "code" in vars(cls):  # a class with a status code of its own has the code's name as its reason
            cls.default_reason = cls.code.name

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
    """The request is invalid; `field` names the invalid part."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFoundError(SplitserveError):
    """A model, worker or file that does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class UnauthenticatedError(SplitserveError):
    """A missing or unknown credential."""

    code = grpc.StatusCode.UNAUTHENTICATED


class PermissionDeniedError(SplitserveError):
    """The caller is authenticated but not permitted to do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class ResourceExhaustedError(SplitserveError):
    """Not enough capacity now (with a retry hint) or ever (without one)."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class FailedPreconditionError(SplitserveError):
    """The system is not in the state that the operation requires, for example incompatible peers."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class UnavailableError(SplitserveError):
    """A component cannot be reached or used now; a retry may succeed."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadlineExceededError(SplitserveError):
    """The request's own deadline passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class CancelledByPeerError(SplitserveError):
    """The peer cancelled the request."""

    code = grpc.StatusCode.CANCELLED


ERROR_BY_CODE = {kind.code: kind for kind in SplitserveError.__subclasses__()}
"""The class of each status code: those above, and none of those below, which share their codes."""


class UnsupportedModelError(InvalidArgumentError):
    """A model family or option that the engine does not support; raised at load."""

    default_reason = "UNSUPPORTED_MODEL"


class MissingExtraError(UnavailableError):
    """`what` needs an optional part of splitserve, which is not installed; `why` is added where it says more."""

    default_reason = "EXTRA_MISSING"

    def __init__(self, what: str, extra: str, why: object = "") -> None:
        end = f" ({why})" if str(why) else ""
        super().__init__(f"{what} needs more than is installed: pip install 'splitserve[{extra}]'{end}")


class TransferError(UnavailableError):
    """A KV write failed or its peer is lost."""

    default_reason = "TRANSFER_FAILED"


class ConfigError(InvalidArgumentError):
    """A setting is invalid; `field` names it."""

    default_reason = "INVALID_CONFIG"


class BrokenInvariantError(AssertionError):
    """The books of an engine are wrong, which is a bug and ends its process.

    Not a SplitserveError: no request gets it as an answer, and no guard around one request may swallow it.
    """
