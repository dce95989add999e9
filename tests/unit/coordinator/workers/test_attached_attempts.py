"""What a worker's client tells the attempts that run there, by the part that the worker has in each of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from coordinator.workers.client import WorkerClient
from coordinator.workers.output_stream import OutputCollector, WorkerEvent, WorkerFailed
from coordinator.workers.registry import Registry
from splitserve.errors import UnavailableError
from splitserve.rpc.carried_calls import CarriedCalls, decode_methods
from splitserve.rpc.server import RpcServer
from splitserve.runtime.loops import LoopRunner
from splitserve.v1 import decode_pb2, registry_pb2
from splitserve.v1.calls_pb2_grpc import add_CallServiceServicer_to_server
from splitserve.v1.decode_pb2_grpc import DecodeServiceServicer, add_DecodeServiceServicer_to_server
from tests.support.cluster.registrations import registration

pytestmark = pytest.mark.timeout(10)


class Full(DecodeServiceServicer):
    """Has no room."""

    def __init__(self) -> None:
        self.asked, self.given_up = asyncio.Event(), asyncio.Event()

    async def StreamOutputs(  # type: ignore[override]
        self, request: decode_pb2.StreamOutputsRequest, context: Any
    ) -> AsyncIterator[decode_pb2.StreamOutputsResponse]:
        yield decode_pb2.StreamOutputsResponse(epoch=1)
        await asyncio.Event().wait()

    async def Reserve(self, request: decode_pb2.ReserveRequest, context: Any) -> decode_pb2.ReserveResponse:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.given_up.set()
        raise AssertionError


class Forgetful(DecodeServiceServicer):
    """Has lost whatever the coordinator asks for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def StreamOutputs(  # type: ignore[override]
        self, request: decode_pb2.StreamOutputsRequest, context: Any
    ) -> AsyncIterator[decode_pb2.StreamOutputsResponse]:
        self.asked = [one.request_id for one in request.requests]
        yield decode_pb2.StreamOutputsResponse(epoch=1)
        yield decode_pb2.StreamOutputsResponse(lost_request_ids=self.asked)
        await asyncio.Event().wait()


async def test_an_attempt_that_waits_for_room_is_failed_at_once() -> None:
    service, server = Full(), RpcServer()
    add_DecodeServiceServicer_to_server(service, server.grpc_server)
    calls = CarriedCalls(decode_methods(service), server.open_rpcs)
    add_CallServiceServicer_to_server(calls, server.grpc_server)
    port = await server.start("127.0.0.1", 0, [])
    request = registration("d", registry_pb2.ROLE_DECODE, f"127.0.0.1:{port}")
    client = WorkerClient(Registry(1.0).register(request, 0.0), "c", 2**20, itertools.count(1))
    opened, collector, moved = (
        asyncio.Event(),
        OutputCollector(),
        UnavailableError("it moves", reason="MOVED"),
    )
    reading = asyncio.create_task(client.run(lambda is_open: opened.set() if is_open else None, LoopRunner()))
    await opened.wait()
    with client.attached("a", collector, decodes=True):
        reserving = asyncio.create_task(client.reserve(decode_pb2.ReserveRequest(request_id="a"), 9.0))
        await service.asked.wait()
        client.fail_all(moved)
        with pytest.raises(UnavailableError, match="it moves"):
            await reserving
        await service.given_up.wait()
        assert reasons(collector.take_all()) == []
        client.fail_all(moved)  # it runs by now
        assert reasons(collector.take_all()) == ["MOVED"]
    # Given up by its own request, it is cancelled and not failed.
    service.asked.clear()
    reserving = asyncio.create_task(client.reserve(decode_pb2.ReserveRequest(request_id="a"), 9.0))
    await service.asked.wait()
    reserving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reserving
    reading.cancel()
    await asyncio.wait([reading])
    await client.close()
    await server.stop()


def reasons(events: list[WorkerEvent]) -> list[str]:
    return [event.error.reason for event in events if isinstance(event, WorkerFailed)]


async def test_a_worker_is_asked_only_for_what_it_decodes_and_its_loss_is_that_of_prompts_too() -> None:
    """A worker of role both has an output stream, and may compute prompts whose answers others decode."""
    service, server = Forgetful(), RpcServer()
    add_DecodeServiceServicer_to_server(service, server.grpc_server)
    port = await server.start("127.0.0.1", 0, [])
    request = registration("n", registry_pb2.ROLE_BOTH, f"127.0.0.1:{port}")
    client = WorkerClient(Registry(1.0).register(request, 0.0), "c", 2**20, itertools.count(1))
    prompt, answer = OutputCollector(), OutputCollector()
    with client.attached("prompt", prompt, decodes=False), client.attached("answer", answer, decodes=True):
        reading = asyncio.create_task(client.outputs.run(lambda is_open: None))
        await answer.wait()
        assert service.asked == ["answer"]
        assert (reasons(answer.take_all()), reasons(prompt.take_all())) == (["REQUEST_LOST"], [])
        client.lose()
        assert (reasons(answer.take_all()), reasons(prompt.take_all())) == (["WORKER_LOST"], ["WORKER_LOST"])
    reading.cancel()
    await asyncio.wait([reading])
    await client.close()
    await server.stop()
