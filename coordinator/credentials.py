"""The API key of a gRPC call: metadata `authorization: Bearer KEY`, or `x-api-key: KEY`."""

from __future__ import annotations

from typing import Any

import grpc

BEARER = "bearer "


def credential_of(context: grpc.aio.ServicerContext[Any, Any]) -> str | None:
    """The key that a call carries; None where it carries none."""
    found: str | None = None
    for name, value in context.invocation_metadata() or ():
        text = value if isinstance(value, str) else ""
        if name == "authorization" and text[: len(BEARER)].lower() == BEARER:
            return text[len(BEARER) :].strip()
        if name == "x-api-key":
            found = text
    return found
