"""Writing to a stream of a gRPC server."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

WRITE_GRACE_S = 1.0


async def write_whole(context: grpc.aio.ServicerContext[Any, Any], message: Any) -> None:
    """Completes the write even when cancelled: gRPC accepts no status while a write is in progress."""
    write = asyncio.ensure_future(context.write(message))
    try:
        await asyncio.shield(write)
    except asyncio.CancelledError:
        await asyncio.wait([write], timeout=WRITE_GRACE_S)
        raise
