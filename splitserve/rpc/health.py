"""The standard health service, whose changes never wait for a watcher.

grpcio's own servicer holds a lock while it writes to one: a client that watches and does not read would hold up every
drain.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_KINDS = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):
    """Health of the services that were named to it; "" is the server as a whole."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {"": _KINDS.SERVING}
        self._changed = asyncio.Event()

    def set(self, names: Iterable[str], *, serving: bool) -> None:
        """Sets the status of services, and wakes those who watch."""
        self._statuses |= dict.fromkeys(names, _KINDS.SERVING if serving else _KINDS.NOT_SERVING)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> health_pb2.HealthCheckResponse:
        """The present status. NOT_FOUND for a service that is not known."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """The status, and each that follows, until the caller leaves. SERVICE_UNKNOWN until a service is known."""
        last = None
        while True:
            changed, status = self._changed, self._statuses.get(request.service, _KINDS.SERVICE_UNKNOWN)
            if status != last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
            await changed.wait()
