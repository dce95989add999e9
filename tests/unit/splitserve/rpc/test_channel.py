"""Channels to peers that are slow to take a connection, or refuse it."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.tcp_proxy import TcpProxy
from splitserve.rpc.channel import CONNECT_TIMEOUT_MS, make_channel
from splitserve.rpc.server import RpcServer
from tests.support.waiting import PATIENCE_S

LATE_S = 2.0


class LateProxy(TcpProxy):
    """Forwards a connection after a while, as a process that got no core for so long answers it."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(LATE_S)
        await super().serve(reader, writer)


async def test_a_peer_that_answers_the_handshake_late_is_waited_for() -> None:
    server = RpcServer()
    proxy = LateProxy(await server.start("127.0.0.1", 0, []))
    listener = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        async with make_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        listener.close()
        await server.stop()


async def test_a_refused_connection_fails_before_the_timeout_of_an_attempt() -> None:
    took_s = []
    for _ in range(3):  # the machine may add to some of them
        async with make_channel("127.0.0.1:1") as channel:
            began_s = time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            took_s.append(time.monotonic() - began_s)
    assert min(took_s) < CONNECT_TIMEOUT_MS / 2e3
