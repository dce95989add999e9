"""GRPCInferenceService: the Open Inference Protocol over gRPC, on top of InferenceApi."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from typing_extensions import override

from coordinator.entrypoints.inference_api import InferenceApi
from coordinator.entrypoints.inference_service import begin_trace, trace_headers
from coordinator.entrypoints.kserve.requests import MAX_ID, ParsedRequest, read_request
from coordinator.entrypoints.kserve.responses import (
    ONLY_VERSION,
    Responses,
    failure,
    model_config,
    model_metadata,
    named,
    repository_index,
    server_metadata,
    versions_of,
)
from coordinator.request.inference_request import Caller, RequestTrace
from coordinator.request.sending import WaitingOutput
from coordinator.tenants.access_control import AccessControl
from splitserve.errors import NotFoundError
from splitserve.kserve import open_inference_pb2 as pb
from splitserve.kserve.open_inference_pb2_grpc import GRPCInferenceServiceServicer
from splitserve.rpc.server import write_whole
from splitserve.rpc.status import shown_error
from splitserve.v1 import generation_pb2, inference_pb2

if TYPE_CHECKING:
    InferContext = grpc.aio.ServicerContext[pb.ModelInferRequest, pb.ModelInferResponse]
    StreamContext = grpc.aio.ServicerContext[pb.ModelInferRequest, pb.ModelStreamInferResponse]

MAX_IN_FLIGHT = 1024
"""Most concurrent requests of a stream. The next one is read from the client when another ends."""


@dataclass(eq=False)
class KserveService(GRPCInferenceServiceServicer):
    """The servicer of the Open Inference Protocol, on top of InferenceApi."""

    api: InferenceApi
    access: AccessControl
    max_in_flight: int = MAX_IN_FLIGHT

    @override
    async def ServerLive(self, request: pb.ServerLiveRequest, context: Any) -> pb.ServerLiveResponse:
        """Needs no credentials, like any health check."""
        return pb.ServerLiveResponse(live=True)

    @override
    async def ServerReady(self, request: pb.ServerReadyRequest, context: Any) -> pb.ServerReadyResponse:
        """Needs no credentials, like any health check."""
        return pb.ServerReadyResponse(ready=self.api.is_ready)

    @override
    async def ServerMetadata(
        self, request: pb.ServerMetadataRequest, context: Any
    ) -> pb.ServerMetadataResponse:
        return server_metadata()

    @override
    async def ModelReady(self, request: pb.ModelReadyRequest, context: Any) -> pb.ModelReadyResponse:
        try:
            model = await self._model(request, context)
        except NotFoundError:
            return pb.ModelReadyResponse(ready=False)
        ready = {version.name: version.ready for version in model.versions}
        return pb.ModelReadyResponse(ready=ready.get(request.version, model.ready))

    @override
    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Any) -> pb.ModelMetadataResponse:
        return model_metadata(await self._model(request, context))

    @override
    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Any) -> pb.ModelConfigResponse:
        return model_config(await self._model(request, context))

    @override
    async def RepositoryIndex(
        self, request: pb.RepositoryIndexRequest, context: Any
    ) -> pb.RepositoryIndexResponse:
        models = await self.api.models(self.access.caller(context))
        return repository_index(models, request.ready)

    @override
    async def ModelInfer(self, request: pb.ModelInferRequest, context: InferContext) -> pb.ModelInferResponse:
        caller, parsed = self.access.caller(context), await self._read(request)
        trace = await begin_trace(self.api, context, "text_completion")
        return await _Call(self.api, request, parsed, caller, trace).whole(context.time_remaining())

    @override
    async def ModelStreamInfer(  # type: ignore[override]
        self, requests: AsyncIterator[pb.ModelInferRequest], context: StreamContext
    ) -> None:
        """Cancelling the stream cancels every request on it."""
        caller, headers = self.access.caller(context), trace_headers(context)
        room, writing = asyncio.Semaphore(self.max_in_flight), asyncio.Lock()

        async def write(response: pb.ModelStreamInferResponse) -> None:
            async with writing:  # gRPC allows one write at a time
                await write_whole(context, response)

        async def put(response: pb.ModelInferResponse) -> None:
            await write(pb.ModelStreamInferResponse(infer_response=response))

        async def answer(request: pb.ModelInferRequest) -> None:
            left_s = context.time_remaining()
            try:
                parsed = await self._read(request)
                trace = self.api.begin_trace(*headers, "text_completion")
                call = _Call(self.api, request, parsed, caller, trace)
                if call.parsed.stream:
                    await call.pieces(put, left_s)
                else:
                    await put(await call.whole(left_s))
            except Exception as error:
                await write(failure(request.id[:MAX_ID], shown_error(error)))
            finally:
                room.release()

        async with asyncio.TaskGroup() as group:
            await room.acquire()
            async for request in requests:
                group.create_task(answer(request))
                await room.acquire()

    async def _read(self, request: pb.ModelInferRequest) -> ParsedRequest:
        return await self.api.parser.run(request.ByteSize(), read_request, request)

    async def _model(
        self,
        request: pb.ModelReadyRequest | pb.ModelMetadataRequest | pb.ModelConfigRequest,
        context: Any,
    ) -> inference_pb2.ModelInfo:
        models = await self.api.models(self.access.caller(context))
        return named(models, request.name, request.version)


@dataclass(frozen=True, slots=True)
class _Call:
    """A parsed request. `left_s` is the time left until the client's deadline; None: it has none."""

    api: InferenceApi
    request: pb.ModelInferRequest
    parsed: ParsedRequest
    caller: Caller
    trace: RequestTrace | None

    async def whole(self, left_s: float | None) -> pb.ModelInferResponse:
        """The answer as one response."""
        deltas: list[generation_pb2.OutputDelta] = []
        ended: list[inference_pb2.GenerationDone] = []

        async def send(response: inference_pb2.GenerateResponse) -> None:
            if response.HasField("done"):
                ended.append(response.done)
            else:
                deltas.append(response.delta)

        await self._generate(send, left_s)
        size = sum(delta.ByteSize() for delta in deltas)
        responses = Responses(self.request, self.parsed)
        return await self.api.parser.run(size, responses.whole, deltas, ended[0])

    async def pieces(
        self, put: Callable[[pb.ModelInferResponse], Awaitable[None]], left_s: float | None
    ) -> None:
        """Hands `put` a response for each delta. `done` is sent with the last delta, or else in an empty response."""
        responses = Responses(self.request, self.parsed)
        last: generation_pb2.OutputDelta | None = None

        async def send(response: inference_pb2.GenerateResponse) -> None:
            nonlocal last
            if not response.HasField("done"):
                if response.delta.finish_reason and not self.parsed.empty_final:
                    last = response.delta  # `done` follows at once
                else:
                    await put(responses.piece(response.delta))
            elif self.parsed.empty_final:
                await put(responses.empty_final(response.done))
            else:
                if last is None:
                    last = generation_pb2.OutputDelta(finish_reason=response.done.finish_reason)
                await put(responses.piece(last, response.done))

        await self._generate(send, left_s)

    async def _generate(
        self, send: Callable[[inference_pb2.GenerateResponse], Awaitable[None]], left_s: float | None
    ) -> None:
        version = self.request.model_version
        if version not in ("", ONLY_VERSION):
            model = named(await self.api.models(self.caller), self.request.model_name, version)
            self.parsed.generate.model = version if version in versions_of(model) else model.name
        await self.api.generate(self.parsed.generate, self.caller, WaitingOutput(send), left_s, self.trace)
