"""GRPCInferenceService: the Open Inference Protocol over gRPC, on top of InferenceApi."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
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
from coordinator.request.sending import Output
from coordinator.tenants.access_control import AccessControl
from splitserve.errors import NotFoundError
from splitserve.generation.output_delta import TokenDelta
from splitserve.kserve import open_inference_pb2 as pb
from splitserve.kserve.open_inference_pb2_grpc import GRPCInferenceServiceServicer
from splitserve.rpc.server import StreamWriter, write_whole
from splitserve.rpc.status import shown_error
from splitserve.v1 import inference_pb2

if TYPE_CHECKING:
    InferContext = grpc.aio.ServicerContext[pb.ModelInferRequest, pb.ModelInferResponse]
    StreamContext = grpc.aio.ServicerContext[pb.ModelInferRequest, pb.ModelStreamInferResponse]

MAX_IN_FLIGHT = 1024
"""Most concurrent requests of a stream. The next one is read from the client when another ends."""
TOKEN_BYTES, LOGPROBS_BYTES = 16, 1024
"""About the size of a token in a response, without and with logprobs."""


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
        room, writer = asyncio.Semaphore(self.max_in_flight), _SharedWriter(StreamWriter(context.write))

        async def answer(request: pb.ModelInferRequest) -> None:
            left_s = context.time_remaining()
            try:
                parsed = await self._read(request)
                trace = self.api.begin_trace(*headers, "text_completion")
                call = _Call(self.api, request, parsed, caller, trace)
                if call.parsed.stream:
                    await call.pieces(writer, left_s)
                else:
                    whole = await call.whole(left_s)
                    await writer.write(pb.ModelStreamInferResponse(infer_response=whole))
            except Exception as error:
                await writer.write(failure(request.id[:MAX_ID], shown_error(error)))
            finally:
                room.release()

        try:
            async with asyncio.TaskGroup() as group:
                await room.acquire()
                async for request in requests:
                    group.create_task(answer(request))
                    await room.acquire()
        finally:
            await writer.settle()

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
class _SharedWriter:
    """The writer of a stream with several requests."""

    writer: StreamWriter
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the task that writes: gRPC allows one write at a time."""

    async def write(self, response: pb.ModelStreamInferResponse) -> None:
        """Writes a message, after those of other requests, completely even when cancelled: gRPC accepts no status while
        a write is in progress."""
        async with self._turn:
            await write_whole(self.writer, response)

    @property
    def is_ready(self) -> bool:
        """Whether `begin` may be called."""
        return self.writer.is_ready and not self._turn.locked()

    def begin(self, response: pb.ModelStreamInferResponse) -> None:
        """Begins to write a message, without waiting."""
        self.writer.begin(response)

    async def settle(self) -> None:
        """Waits for a write in progress, for a while."""
        if not self.writer.is_ready:
            await self.writer.settle()


@dataclass(slots=True)
class _Pieces(Output):
    """A streamed answer: a response for each delta. The end comes with the last delta, or else in an empty response."""

    responses: Responses
    writer: _SharedWriter
    empty_final: bool
    _last: TokenDelta | None = None

    @override
    async def send(self, delta: TokenDelta, started: inference_pb2.GenerationStart | None) -> None:
        if delta.finish_reason and not self.empty_final:
            self._last = delta  # the end follows at once
        else:
            await self.writer.write(self.responses.piece(delta))

    @override
    async def end(self, done: inference_pb2.GenerationDone) -> None:
        if self.empty_final:
            await self.writer.write(self.responses.empty_final(done))
            return
        last = self._last or TokenDelta(0, [], finish_reason=done.finish_reason)
        await self.writer.write(self.responses.piece(last, done))

    @override
    def takes_now(self) -> bool:
        return self.writer.is_ready

    @override
    def send_now(self, delta: TokenDelta) -> None:
        self.writer.begin(self.responses.piece(delta))


@dataclass(slots=True)
class _Whole(Output):
    """An answer that is sent as one response."""

    deltas: list[TokenDelta] = field(default_factory=list)
    done: inference_pb2.GenerationDone | None = None

    @override
    async def send(self, delta: TokenDelta, started: inference_pb2.GenerationStart | None) -> None:
        self.deltas.append(delta)

    @override
    async def end(self, done: inference_pb2.GenerationDone) -> None:
        self.done = done

    @override
    def takes_now(self) -> bool:
        return True

    @override
    def send_now(self, delta: TokenDelta) -> None:
        self.deltas.append(delta)


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
        answer = _Whole()
        await self._generate(answer, left_s)
        assert answer.done is not None
        tokens = sum(len(delta.token_ids) for delta in answer.deltas)
        size = tokens * (LOGPROBS_BYTES if answer.deltas[0].logprobs else TOKEN_BYTES)
        responses = Responses(self.request, self.parsed)
        return await self.api.parser.run(size, responses.whole, answer.deltas, answer.done)

    async def pieces(self, writer: _SharedWriter, left_s: float | None) -> None:
        """Writes a response for each delta."""
        responses = Responses(self.request, self.parsed)
        await self._generate(_Pieces(responses, writer, self.parsed.empty_final), left_s)

    async def _generate(self, output: Output, left_s: float | None) -> None:
        version = self.request.model_version
        if version not in ("", ONLY_VERSION):
            model = named(await self.api.models(self.caller), self.request.model_name, version)
            self.parsed.generate.model = version if version in versions_of(model) else model.name
        await self.api.generate(self.parsed.generate, self.caller, output, left_s, self.trace)
