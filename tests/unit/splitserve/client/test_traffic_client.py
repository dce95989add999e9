"""A recording whose stream breaks goes on, and knows what it missed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from splitserve.client.traffic_client import RecordingPlan, TrafficClient
from splitserve.errors import InvalidArgumentError, SplitserveError, UnavailableError
from splitserve.v1 import traffic_pb2
from splitserve.v1.inference_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)
from tests.support.cluster.ports import free_port

pytestmark = pytest.mark.timeout(60)
PLAN = RecordingPlan(b"s" * 16, seconds=600.0)


def message(coordinator: str, ended: int, requests: int = 0, lost: int = 0) -> Any:
    made = traffic_pb2.RecordTrafficResponse(
        coordinator_id=coordinator, ended_requests=ended, lost_requests=lost
    )
    made.since.FromSeconds(1000)
    for number in range(requests):
        one = made.requests.add(prompt_tokens=number + 1)
        one.received.FromSeconds(1000 + number)
    return made


class Scripted(InferenceServiceServicer):
    """Each call gets the next script; all but the last one break at their end."""

    def __init__(self, scripts: Sequence[Sequence[Any]]) -> None:
        self._scripts = list(scripts)
        self.requests: list[traffic_pb2.RecordTrafficRequest] = []

    async def RecordTraffic(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        for one in self._scripts.pop(0):
            await context.write(one)
        if self._scripts:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")


@asynccontextmanager
async def coordinator(scripts: Sequence[Sequence[Any]]) -> AsyncIterator[tuple[Scripted, TrafficClient]]:
    server, servicer = grpc.aio.server(), Scripted(scripts)
    add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, TrafficClient(f"127.0.0.1:{port}")
    finally:
        await server.stop(None)


async def test_it_goes_on_after_a_break() -> None:
    scripts = [
        [message("a", 5), message("a", 7, requests=2)],
        [message("a", 10), message("a", 11, requests=1, lost=4)],
        [message("b", 0), message("b", 3, requests=3)],
    ]
    found: list[float] = []
    async with coordinator(scripts) as (servicer, client):
        await client.record(PLAN, lambda _request, at_s: found.append(at_s))
    tally = client.tally
    # Three ended while it was away, four were left out because it was slow.
    assert (tally.recorded, tally.lost, tally.breaks, tally.restarts) == (6, 3 + 4, 2, 1)
    assert found == [0.0, 1.0, 0.0, 0.0, 1.0, 2.0]
    assert not servicer.requests[0].HasField("since")
    assert servicer.requests[1].since.seconds == 1000
    assert servicer.requests[2].salt == PLAN.salt


async def test_one_that_cannot_begin_fails_at_once() -> None:
    nobody = TrafficClient(f"127.0.0.1:{free_port()}")
    with pytest.raises(UnavailableError):
        await nobody.record(PLAN, lambda _request, _at_s: None)

    class Refusing(InferenceServiceServicer):
        async def RecordTraffic(self, request: Any, context: Any) -> None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "salt must have 16..64 bytes")

    server = grpc.aio.server()
    add_InferenceServiceServicer_to_server(Refusing(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        with pytest.raises(SplitserveError) as caught:
            await TrafficClient(f"127.0.0.1:{port}").record(PLAN, lambda _request, _at_s: None)
        assert isinstance(caught.value, InvalidArgumentError)
    finally:
        await server.stop(None)
