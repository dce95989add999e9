"""Health checks: what they say, and that nobody who watches holds up a change."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitserve.rpc.channel import make_channel
from splitserve.rpc.server import Health, RpcServer

pytestmark = pytest.mark.timeout(20)
KINDS = health_pb2.HealthCheckResponse


async def test_a_watcher_is_told_of_each_change_and_of_a_service_that_comes() -> None:
    server = RpcServer()
    port = await server.start("127.0.0.1", 0, ["s"])
    try:
        async with make_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            whole = stub.Watch(health_pb2.HealthCheckRequest())
            later = stub.Watch(health_pb2.HealthCheckRequest(service="later"))
            assert (await whole.read()).status == KINDS.SERVING
            assert (await later.read()).status == KINDS.SERVICE_UNKNOWN
            await server.set_serving(False)
            assert (await whole.read()).status == KINDS.NOT_SERVING
            await server.set_serving(True)
            assert (await whole.read()).status == KINDS.SERVING
    finally:
        await server.stop()


class StuckWatcher:
    """The context of a caller who does not read."""

    def __init__(self) -> None:
        self.writing = asyncio.Event()

    async def write(self, message: Any) -> None:
        self.writing.set()
        await asyncio.Event().wait()


async def test_a_watcher_who_does_not_read_holds_up_no_change() -> None:
    health, context = Health(), StuckWatcher()
    watching = asyncio.create_task(health.Watch(health_pb2.HealthCheckRequest(), context))
    await context.writing.wait()
    health.set([""], serving=False)
    said = await health.Check(health_pb2.HealthCheckRequest(), context)
    assert said.status == KINDS.NOT_SERVING
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
