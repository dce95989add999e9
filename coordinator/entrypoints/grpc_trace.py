"""The trace context in the metadata of a gRPC call."""

from __future__ import annotations

from typing import Any

import grpc

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
TraceHeaders = tuple[str | None, str | None]
"""`traceparent` and `tracestate`, unchecked."""


def trace_headers(context: grpc.aio.ServicerContext[Any, Any]) -> TraceHeaders:
    """Those of a call; None where it has none. Several states are joined."""
    parent: str | None = None
    states = []
    for name, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            if name == TRACEPARENT:
                parent = value
            elif name == TRACESTATE:
                states.append(value)
    return parent, ",".join(states) or None
