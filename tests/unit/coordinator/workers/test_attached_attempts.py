"""What a worker's client tells the attempts that run there, by the part that the worker has in each of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from coordinator.workers.client import WorkerClient
from coordinator.workers.output_collector import OutputCollector, WorkerEvent, WorkerFailed
from coordinator.workers.registry import Registry
from splitserve.rpc.server import make_server
from splitserve.v1 import decode_pb2, registry_pb2
from splitserve.v1.decode_pb2_grpc import DecodeServiceServicer, add_DecodeServiceServicer_to_server
from tests.support.cluster.registrations import registration

pytestmark = pytest.mark.timeout(10)


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


def reasons(events: list[WorkerEvent]) -> list[str]:
    return [event.error.reason for event in events if isinstance(event, WorkerFailed)]


async def test_a_worker_is_asked_only_for_what_it_decodes_and_its_loss_is_that_of_prompts_too() -> None:
    """A neutral worker has an output stream, and may compute prompts whose answers others decode."""
    service, server = Forgetful(), make_server()
    add_DecodeServiceServicer_to_server(service, server.grpc_server)
    port = await server.start("127.0.0.1", 0, [])
    request = registration("n", registry_pb2.POOL_PREFILL, f"127.0.0.1:{port}")
    request.neutral = True
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
