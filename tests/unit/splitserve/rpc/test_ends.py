"""What ends in any case: a stream's loop that is cancelled at a bad moment, and a server that does not stop."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from splitserve.rpc.carried_calls import CallStream
from splitserve.rpc.channel import make_channel
from splitserve.rpc.server import STOP_S, RpcServer
from splitserve.v1.calls_pb2_grpc import CallServiceStub
from tests.support.cluster.ports import free_port
from tests.support.virtual_time import run_in_virtual_time
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(20)


async def test_a_cancellation_that_comes_with_the_status_of_a_stream_is_not_lost() -> None:
    async with make_channel(f"127.0.0.1:{free_port()}") as channel:

        def open_stream() -> Any:
            call = CallServiceStub(channel).Carry()
            # Its status is there, and it has not begun yet: gRPC then keeps the cancellation to itself.
            call.add_done_callback(lambda _call: running.cancel())
            return call

        stream = CallStream(open_stream, "a worker that has gone")
        stream.begin("abort", b"", PATIENCE_S, lambda _response: None)
        running = asyncio.create_task(stream.run())
        with pytest.raises(asyncio.CancelledError):
            await running


class NeverStops:
    """The stop of a server of gRPC that does not come about."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self.calls = 0
        self._completed = asyncio.get_running_loop().create_future()
        self.server = server

    async def stop(self, grace: float | None) -> None:
        self.calls += 1
        await self._completed  # as in gRPC: whoever cancels it cancels all that come


def test_a_server_that_does_not_stop_is_left_after_its_time_and_may_be_stopped_again() -> None:
    async def stop_twice() -> list[float]:
        server, loop = RpcServer(), asyncio.get_running_loop()
        server.grpc_server = NeverStops(server.grpc_server)  # type: ignore[assignment]
        took_s = []
        for grace_s in (None, 3.0):
            began_s = loop.time()
            await server.stop(grace_s)
            took_s.append(loop.time() - began_s)
        return took_s

    took_s, _ = run_in_virtual_time(stop_twice())
    assert took_s == pytest.approx([STOP_S, STOP_S + 3.0])
