"""Which calls to a worker share its stream, and which are their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from coordinator.workers.client import BackgroundTasks, WorkerCalls
from coordinator.workers.output_stream import OutputCoalescer
from coordinator.workers.registry import Registry
from splitserve.errors import UnavailableError
from splitserve.rpc import carried_calls
from splitserve.rpc.carried_calls import MAX_CARRIED_BYTES, CarriedCalls, decode_methods, prefill_methods
from splitserve.rpc.channel import make_channel
from splitserve.rpc.server import RpcServer
from splitserve.v1 import decode_pb2, prefill_pb2, registry_pb2
from splitserve.v1.calls_pb2_grpc import add_CallServiceServicer_to_server
from splitserve.v1.decode_pb2_grpc import DecodeServiceServicer, add_DecodeServiceServicer_to_server
from splitserve.v1.prefill_pb2_grpc import PrefillServiceServicer, add_PrefillServiceServicer_to_server
from tests.support.cluster.registrations import registration

pytestmark = pytest.mark.timeout(10)
LONG_S = 60.0
Way = tuple[str, bool]
"""A method, and whether its call was carried."""


class Worker(DecodeServiceServicer, PrefillServiceServicer):
    """Notes the way of each call."""

    def __init__(self) -> None:
        self.ways: list[Way] = []

    def _note(self, method: str, context: Any) -> None:
        self.ways.append((method, type(context).__module__ == carried_calls.__name__))

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Any) -> decode_pb2.ReserveResponse:
        self._note("reserve", context)
        return decode_pb2.ReserveResponse(wait_ms=len(request.token_ids))

    async def Abort(self, request: decode_pb2.AbortRequest, context: Any) -> decode_pb2.AbortResponse:
        self._note("abort", context)
        return decode_pb2.AbortResponse()

    async def Prefill(  # type: ignore[override]
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        self._note("prefill", context)
        await context.send_initial_metadata(())
        yield prefill_pb2.PrefillResponse(handoff=prefill_pb2.HandoffDone(descriptors=len(request.token_ids)))


@asynccontextmanager
async def calls_to(worker: Worker) -> AsyncIterator[WorkerCalls]:
    server = RpcServer()
    add_DecodeServiceServicer_to_server(worker, server.grpc_server)
    add_PrefillServiceServicer_to_server(worker, server.grpc_server)
    methods = {**decode_methods(worker), **prefill_methods(worker)}
    add_CallServiceServicer_to_server(CarriedCalls(methods, server.open_rpcs), server.grpc_server)
    port = await server.start("127.0.0.1", 0, [])
    request = registration("w", registry_pb2.ROLE_DECODE, f"127.0.0.1:{port}")
    try:
        async with make_channel(f"127.0.0.1:{port}") as channel:
            calls = WorkerCalls(Registry(1.0).register(request, 0.0), channel, (), OutputCoalescer())
            running = asyncio.create_task(calls.run())
            yield calls
            running.cancel()
            await asyncio.wait([running])
    finally:
        await server.stop()


async def ask_all(calls: WorkerCalls, tokens: int) -> list[int]:
    """Calls each method with so many tokens; the numbers that come back."""
    ids = [2**31] * tokens  # of five bytes each
    reserved = await calls.reserve(decode_pb2.ReserveRequest(request_id="a", token_ids=ids), LONG_S)
    prompts: list[prefill_pb2.PrefillResponse] = []
    background, ended = BackgroundTasks(), asyncio.get_running_loop().create_future()
    request = prefill_pb2.PrefillRequest(request_id="a", token_ids=ids)
    calls.prefill(request, LONG_S, prompts.append, ended.set_result, background)
    assert await ended is None
    await calls.abort(decode_pb2.AbortRequest(request_id="a"), LONG_S)
    return [int(reserved.wait_ms), prompts[0].handoff.descriptors]


async def test_a_long_prompt_does_not_hold_back_short_ones() -> None:
    worker, long = Worker(), MAX_CARRIED_BYTES // 5 + 1
    async with calls_to(worker) as calls:
        assert await ask_all(calls, 10) == [10, 10]
        assert await ask_all(calls, long) == [long, long]
    short = [("reserve", True), ("prefill", True), ("abort", True)]
    assert worker.ways == [*short, ("reserve", False), ("prefill", False), ("abort", True)]


async def test_calls_to_a_lost_worker_fail_at_once() -> None:
    worker = Worker()
    async with calls_to(worker) as calls:
        calls.lose(UnavailableError("gone", reason="WORKER_LOST"))
        with pytest.raises(UnavailableError, match="gone"):
            await ask_all(calls, 10)
        errors: list[Any] = []
        calls.prefill(prefill_pb2.PrefillRequest(), LONG_S, errors.append, errors.append, BackgroundTasks())()
        assert [error.reason for error in errors] == ["WORKER_LOST"]
    assert worker.ways == []
