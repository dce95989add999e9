"""Calls over one stream: they answer, fail, are cancelled and run out of time as calls of their own do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc import status_pb2  # type: ignore[import-untyped]

from splitserve.errors import (
    CancelledByPeerError,
    DeadlineExceededError,
    InvalidArgumentError,
    ResourceExhaustedError,
    SplitserveError,
    UnavailableError,
)
from splitserve.rpc.carried_calls import CallStream, CarriedCall, CarriedCalls, CarriedMethod
from splitserve.rpc.channel import make_channel
from splitserve.rpc.server import RpcServer
from splitserve.rpc.status import error_from_rpc, error_from_status
from splitserve.v1 import calls_pb2, decode_pb2, prefill_pb2
from splitserve.v1.calls_pb2_grpc import CallServiceStub, add_CallServiceServicer_to_server
from tests.support.journal import Gate, Journal, settled
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(20)
LONG_S = 60.0


class Worker:
    """Echoes; requests wait at a gate."""

    def __init__(self) -> None:
        self.begun: Journal[str] = Journal()
        self.ended: Journal[str] = Journal()
        self.gate = Gate()
        self.error: Exception | None = None
        self.server = RpcServer()
        methods = {
            "abort": CarriedMethod("/w/Abort", decode_pb2.AbortRequest.FromString, self.abort),
            "prefill": CarriedMethod("/w/Prefill", prefill_pb2.PrefillRequest.FromString, self.prefill),
        }
        self.calls = CarriedCalls(methods, self.server.open_rpcs)
        add_CallServiceServicer_to_server(self.calls, self.server.grpc_server)

    async def abort(self, request: decode_pb2.AbortRequest, context: Any) -> decode_pb2.AbortResponse:
        self.begun.add(request.request_id)
        try:
            if self.error is not None:
                raise self.error
            await self.gate.passed()
            return decode_pb2.AbortResponse(aborted=True)
        finally:
            self.ended.add(request.request_id)

    async def prefill(
        self, request: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        self.begun.add(request.request_id)
        try:
            await context.send_initial_metadata(())
            yield prefill_pb2.PrefillResponse(first_token=prefill_pb2.FirstToken(chunks=1))
            await self.gate.passed()
            yield prefill_pb2.PrefillResponse(handoff=prefill_pb2.HandoffDone(descriptors=2))
        finally:
            self.ended.add(request.request_id)


class Asking:
    """A stream to a worker, and what came on it."""

    def __init__(self, worker: Worker, port: int, channel: grpc.aio.Channel) -> None:
        self.worker, self.port = worker, port
        self.stub = CallServiceStub(channel)
        self.opened = 0
        self.stream = CallStream(self._open, "worker w")

    def _open(self) -> Any:
        self.opened += 1
        return self.stub.Carry()

    def abort(self, name: str, timeout_s: float = LONG_S) -> CarriedCall:
        data = decode_pb2.AbortRequest(request_id=name).SerializeToString()
        return self.stream.begin("abort", data, timeout_s, lambda response: None)


@asynccontextmanager
async def asking(worker: Worker, port: int = 0) -> AsyncIterator[Asking]:
    port = await worker.server.start("127.0.0.1", port, [])
    try:
        async with make_channel(f"127.0.0.1:{port}") as channel:
            found = Asking(worker, port, channel)
            running = asyncio.create_task(found.stream.run())
            try:
                yield found
            finally:
                running.cancel()
                await asyncio.wait([running])
    finally:
        await worker.server.stop()
    assert worker.server.open_rpcs.count == 0


async def test_responses_come_to_the_calls_that_they_are_for() -> None:
    worker = Worker()
    async with asking(worker) as asked:
        worker.gate.close()
        seen: list[prefill_pb2.PrefillResponse] = []
        first = asyncio.Event()

        def accept(data: bytes) -> None:
            seen.append(prefill_pb2.PrefillResponse.FromString(data))
            first.set()

        prompt = prefill_pb2.PrefillRequest(request_id="p").SerializeToString()
        streaming = asked.stream.begin("prefill", prompt, LONG_S, accept)
        many = [asked.abort(str(number)) for number in range(100)]
        await first.wait()
        assert [response.WhichOneof("event") for response in seen] == ["first_token"]
        assert not streaming.ended.done()
        assert worker.server.open_rpcs.count == 101
        worker.gate.open()
        await asyncio.gather(streaming.ended, *(call.ended for call in many))
        assert [response.WhichOneof("event") for response in seen] == ["first_token", "handoff"]
        assert asked.opened == 1
        for call in (streaming, *many):
            call.cancel()  # has ended: nothing is said


@pytest.mark.parametrize(
    "error",
    [
        ResourceExhaustedError("full", reason="QUEUE_FULL", retry_after_s=1.5),
        InvalidArgumentError("wrong", field="stop.max_tokens"),
        UnavailableError("leaving", reason="DRAINING"),
        TimeoutError("its own"),
        ValueError("a bug"),
    ],
)
async def test_a_call_fails_as_it_does_by_itself(error: Exception) -> None:
    worker = Worker()
    async with asking(worker) as asked:
        worker.error = error
        with pytest.raises(SplitserveError) as caught:
            await asked.abort("a").ended
        found = caught.value
        if isinstance(error, SplitserveError):
            assert (type(found), found.reason, found.field, found.retry_after_s, found.message) == (
                type(error),
                error.reason,
                error.field,
                error.retry_after_s,
                error.message,
            )
        else:
            assert (type(found), found.reason) == (SplitserveError, "INTERNAL")
        worker.error = None
        await asked.abort("b").ended


async def test_a_call_that_is_cancelled_at_once_begins_before_it_ends() -> None:
    worker = Worker()
    async with asking(worker) as asked:
        worker.gate.close()
        call = asked.abort("a")
        call.cancel()
        await worker.ended.wait(1)
        assert worker.begun.entries == ["a"]
        assert call.ended.cancelled()
        other = asked.abort("b")
        await worker.begun.wait(2)
        other.fail(UnavailableError("it moves", reason="MOVED"))
        other.fail(UnavailableError("again"))
        with pytest.raises(UnavailableError, match="it moves"):
            await other.ended
        await worker.ended.wait(2)


async def test_a_deadline_ends_a_call_on_both_sides() -> None:
    worker = Worker()
    async with asking(worker) as asked:
        worker.gate.close()
        late = asked.abort("a", 0.05)
        with pytest.raises(DeadlineExceededError):
            await late.ended
        await worker.ended.wait(1)
        # The worker by itself, of a caller that says no more.
        stream = asked.stub.Carry()
        await stream.write(calls_pb2.CarryRequest(calls=[began(1, 0.05)]))
        (response,) = (await stream.read()).responses
        assert error_code(response) == "DEADLINE_EXCEEDED"
        await worker.ended.wait(2)
        stream.cancel()


def began(number: int, timeout_s: float = LONG_S, **request: bytes) -> calls_pb2.CarriedCall:
    call = calls_pb2.CarriedCall(number=number, **(request or {"abort": b""}))  # type: ignore[arg-type]
    call.timeout.FromNanoseconds(int(timeout_s * 1e9))
    return call


def error_code(response: calls_pb2.CarriedResponse) -> str:
    assert response.ended
    return error_from_status(status_pb2.Status.FromString(response.status)).reason


async def test_a_stream_that_breaks_fails_its_calls_and_the_next_one_opens_another() -> None:
    worker = Worker()
    async with asking(worker) as asked:
        worker.gate.close()
        calls = [asked.abort(str(number)) for number in range(20)]
        await worker.begun.wait(20)
        stopping = asyncio.create_task(worker.server.stop())
        while not stopping.done():  # writes meet the end of the stream
            calls.append(asked.abort("more"))
            await asyncio.sleep(0)
        results = await asyncio.gather(*(call.ended for call in calls), return_exceptions=True)
        assert all(isinstance(result, UnavailableError | CancelledByPeerError) for result in results), results
        await worker.ended.wait(len(worker.begun.entries))
        with pytest.raises(UnavailableError):  # nobody listens there
            await asked.abort("x").ended
        async with asyncio.timeout(PATIENCE_S):
            again = Worker()
            await again.server.start("127.0.0.1", asked.port, [])
            while not again.ended.entries:
                await asyncio.gather(asked.abort("y").ended, return_exceptions=True)
        await again.server.stop()


async def test_losing_the_worker_fails_what_waits_also_before_the_stream_is_open() -> None:
    worker = Worker()
    async with asking(worker) as asked:
        call = asked.abort("a")
        asked.stream.fail_all(UnavailableError("lost", reason="WORKER_LOST"))
        with pytest.raises(UnavailableError, match="lost"):
            await call.ended
        await asked.abort("b").ended
        assert worker.begun.entries == ["b"]


async def test_a_worker_that_closes_ends_the_stream_after_its_last_call() -> None:
    worker = Worker()
    async with asking(worker) as asked:
        worker.gate.close()
        call = asked.abort("a")
        await worker.begun.wait(1)
        worker.calls.close()
        worker.gate.open()
        await call.ended
        async with asyncio.timeout(PATIENCE_S):
            await worker.server.stop(2 * PATIENCE_S)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (began(1, prefill=b"\xff"), "MALFORMED_MESSAGE"),
        (began(1, reserve=b""), "NOT_CARRIED"),
        (calls_pb2.CarriedCall(number=1), "NOT_CARRIED"),
        (calls_pb2.CarriedCall(number=1, abort=b""), "INVALID_ARGUMENT"),
        (began(1, -1.0), "INVALID_ARGUMENT"),
        (began(1, 1e9), "INVALID_ARGUMENT"),
        (began(1, abort=bytes(2**17)), "REQUEST_TOO_LARGE"),
    ],
)
async def test_a_wrong_call_is_refused_and_others_go_on(call: calls_pb2.CarriedCall, reason: str) -> None:
    worker = Worker()
    async with asking(worker) as asked:
        stream = asked.stub.Carry()
        await stream.write(calls_pb2.CarryRequest(calls=[call, began(2)]))
        found: dict[int, calls_pb2.CarriedResponse] = {}
        while len(found) < 2:
            found |= {response.number: response for response in (await stream.read()).responses}
        assert error_code(found[1]) == reason
        assert found[2].ended
        assert not found[2].status
        stream.cancel()


@pytest.mark.parametrize("numbers", [(1, 1), (2, 1), (0,)])
async def test_numbers_that_do_not_rise_end_the_stream(numbers: tuple[int, ...]) -> None:
    worker = Worker()
    async with asking(worker) as asked:
        worker.gate.close()
        stream = asked.stub.Carry()
        await stream.write(calls_pb2.CarryRequest(calls=[began(number) for number in numbers]))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert error_from_rpc(caught.value).field == "calls.number"
        await settled(lambda: worker.server.open_rpcs.count == 0)


async def test_a_response_that_cannot_be_read_fails_its_call_alone() -> None:
    worker = Worker()
    async with asking(worker) as asked:

        def refuse(_data: bytes) -> None:
            raise ValueError("cannot be read")

        data = decode_pb2.AbortRequest(request_id="a").SerializeToString()
        with pytest.raises(SplitserveError, match="cannot be read"):
            await asked.stream.begin("abort", data, LONG_S, refuse).ended
        await asked.abort("b").ended
        assert asked.opened == 1
