"""What handling one request raises fails that request and nothing else; only broken invariants go further."""

from __future__ import annotations

import uuid

from splitserve.errors import BrokenInvariantError, SplitserveError
from splitserve.logs import log_context, log_exception
from splitserve.tracing.context import TraceContext, trace_id_of

_NOT_THE_REQUEST = (BrokenInvariantError, KeyboardInterrupt, SystemExit, GeneratorExit)


def request_error(
    error: BaseException, request_id: str, trace: TraceContext | None = None
) -> SplitserveError:
    """The error that fails the request whose handling raised `error`. Call it where the request can be ended.

    Any other exception than a SplitserveError becomes INTERNAL with an incident id, and its traceback is logged.
    Catch BaseException before: a panic of a library in Rust is no Exception. A BrokenInvariantError and the
    interpreter's own exits are raised again.
    """
    if isinstance(error, SplitserveError):
        return error
    if isinstance(error, _NOT_THE_REQUEST):
        raise error
    incident = uuid.uuid4().hex[:12]
    with log_context(request_id=request_id, trace_id=trace_id_of(trace)):
        log_exception("engine.request_failed", error, incident=incident)
    return SplitserveError(f"the engine failed on this request, incident {incident}")
