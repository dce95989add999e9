"""Errors across gRPC, the handlers' error boundary, and binding of ports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from splitserve.errors import (
    CancelledByPeerError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    SplitserveError,
    TransferError,
    UnavailableError,
)
from splitserve.rpc.channel import make_channel
from splitserve.rpc.server import OpenRpcs, RpcServer
from splitserve.rpc.status import error_from_rpc, status_of
from splitserve.v1 import decode_pb2, inference_pb2
from splitserve.v1.inference_pb2_grpc import (
    InferenceServiceServicer,
    InferenceServiceStub,
    add_InferenceServiceServicer_to_server,
)
from tests.support.waiting import PATIENCE_S

SERVICE = "splitserve.v1.InferenceService"


class Scripted(InferenceServiceServicer):
    """Answers with the callables that the test sets."""

    def __init__(self) -> None:
        self.unary: Callable[[], Awaitable[Any]] | None = None
        self.stream: Callable[[], AsyncIterator[Any]] | None = None

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        assert self.unary is not None
        return await self.unary()

    async def ListModels(self, request: Any, context: Any) -> Any:
        return inference_pb2.ListModelsResponse()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        assert self.stream is not None
        async for response in self.stream():
            yield response


@asynccontextmanager
async def served(scripted: Scripted, **options: Any) -> AsyncIterator[tuple[RpcServer, grpc.aio.Channel]]:
    server = RpcServer(**options)
    add_InferenceServiceServicer_to_server(scripted, server.grpc_server)
    port = await server.start("127.0.0.1", 0, [SERVICE])
    try:
        async with make_channel(f"127.0.0.1:{port}") as channel:
            yield server, channel
    finally:
        await server.stop()


async def raised(channel: grpc.aio.Channel) -> SplitserveError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await InferenceServiceStub(channel).GetServerInfo(
            inference_pb2.GetServerInfoRequest(), timeout=PATIENCE_S
        )
    return error_from_rpc(caught.value)


def failing(error: BaseException) -> Callable[[], Awaitable[Any]]:
    async def unary() -> Any:
        raise error

    return unary


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidArgumentError("top_p: 2 is above 1", field="top_p"), InvalidArgumentError),
        (NotFoundError("no such model", reason="MODEL_NOT_FOUND"), NotFoundError),
        (ResourceExhaustedError("full", retry_after_s=0.25), ResourceExhaustedError),
        (
            FailedPreconditionError("differs", reason="LAYOUT_MISMATCH", field="dtype"),
            FailedPreconditionError,
        ),
        (UnavailableError("gone"), UnavailableError),
        (TransferError("write failed"), UnavailableError),
        (DeadlineExceededError("late"), DeadlineExceededError),
        (CancelledByPeerError("given up"), CancelledByPeerError),
        (SplitserveError("broken", reason="BROKEN"), SplitserveError),
    ],
)
async def test_every_error_survives_the_wire(error: SplitserveError, kind: type[SplitserveError]) -> None:
    scripted = Scripted()
    scripted.unary = failing(error)
    async with served(scripted) as (_, channel):
        back = await raised(channel)
    assert type(back) is kind
    assert (back.message, back.reason, back.field) == (error.message, error.reason, error.field)
    assert back.retry_after_s == error.retry_after_s


async def test_unknown_exceptions_leak_nothing(caplog: pytest.LogCaptureFixture) -> None:
    scripted = Scripted()
    scripted.unary = failing(RuntimeError("secret path /etc/key"))
    async with served(scripted) as (_, channel):
        back = await raised(channel)
    assert back.code is grpc.StatusCode.INTERNAL
    assert "secret" not in back.message
    record = next(r for r in caplog.records if r.getMessage() == "rpc.internal_error")
    assert record.__dict__["event_fields"]["incident"] in back.message
    assert record.exc_info is not None


async def test_a_task_groups_error_is_unwrapped() -> None:
    scripted = Scripted()
    scripted.unary = failing(ExceptionGroup("tasks", [RuntimeError("x"), NotFoundError("no such model")]))
    async with served(scripted) as (_, channel):
        assert isinstance(await raised(channel), NotFoundError)


@pytest.mark.parametrize("letter", ["a", "%", "ä", "語", "🙂"])
async def test_long_messages_are_cut_not_lost(letter: str) -> None:
    scripted = Scripted()
    scripted.unary = failing(InvalidArgumentError(letter * 20_000, field=letter * 20_000))
    async with served(scripted) as (_, channel):
        for _ in range(20):  # gRPC refuses trailers above its soft limit at random
            back = await raised(channel)
            assert isinstance(back, InvalidArgumentError)
            assert back.field is not None
            for text in (back.message, back.field):
                assert set(text) == {letter, "…"}
    trailers = rpc_status.to_status(status_of(InvalidArgumentError("🙂" * 20_000, field="🙂" * 20_000)))
    ((_, details),) = trailers.trailing_metadata
    assert len(quote(trailers.details)) + len(details) * 4 / 3 < 6_000


async def test_bad_utf8_is_an_invalid_argument() -> None:
    async with served(Scripted()) as (_, channel):
        call = channel.unary_stream(f"/{SERVICE}/Generate")(b"\x0a\x02\xff\xfe", timeout=PATIENCE_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    back = error_from_rpc(caught.value)
    assert isinstance(back, InvalidArgumentError)
    assert back.reason == "MALFORMED_MESSAGE"


async def test_cancelled_streams_are_closed_and_uncounted() -> None:
    scripted, open_rpcs, closed = Scripted(), OpenRpcs(), asyncio.Event()

    async def stream() -> AsyncIterator[Any]:
        try:
            while True:
                yield inference_pb2.GenerateResponse()
        finally:
            closed.set()

    scripted.stream = stream
    async with served(scripted, open_rpcs=open_rpcs) as (_, channel):
        call = InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest(), timeout=PATIENCE_S)
        await call.read()
        assert open_rpcs.count == 1
        call.cancel()
        await asyncio.wait_for(closed.wait(), PATIENCE_S)
    assert open_rpcs.count == 0


def test_long_lived_streams_are_not_counted() -> None:
    open_rpcs = OpenRpcs()
    service = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name
    with open_rpcs.track(f"/{service}/StreamOutputs"), open_rpcs.track(f"/{service}/Reserve"):
        assert open_rpcs.count == 1
    assert open_rpcs.count == 0


async def test_oversized_messages_are_refused_and_harm_nobody() -> None:
    async with served(Scripted(), max_message_bytes=2**16) as (_, channel):
        stub = InferenceServiceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest(text="x" * 2**17), timeout=PATIENCE_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert isinstance(error_from_rpc(caught.value), ResourceExhaustedError)
        await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=PATIENCE_S)


async def test_a_taken_port_is_one_clear_line() -> None:
    first, second = RpcServer(), RpcServer()
    port = await first.start("127.0.0.1", 0, [])
    try:
        with pytest.raises(UnavailableError) as caught:
            await second.start("127.0.0.1", port, [])
        assert caught.value.message == f"port {port} on 127.0.0.1 is in use"
    finally:
        await first.stop()
        await second.stop()


async def test_health_and_reflection() -> None:
    async with served(Scripted()) as (server, channel):
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
        await server.set_serving(False)
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        listed = await call.read()
        assert SERVICE in {service.name for service in listed.list_services_response.service}
        call.cancel()
