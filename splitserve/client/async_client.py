"""The asynchronous client of a coordinator's gRPC API; `splitserve.client.client` is the one for threads.

async with AsyncClient("127.0.0.1:50051") as client:
    async for item in client.stream("Once upon a time", max_tokens=40):
        if isinstance(item, Delta):
            print(item.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

import grpc
from google.protobuf.message import Message

from splitserve.client.call_errors import checked_timeout, described, ended_early
from splitserve.client.failover import Failover, GenerationSession, Targets
from splitserve.client.request_builder import build_request
from splitserve.client.types import Completion, Delta, GenerateOptions, Prompt
from splitserve.errors import DeadlineExceededError, UnavailableError
from splitserve.rpc.channel import make_channel
from splitserve.rpc.credentials import ClusterCredentials
from splitserve.security.api_keys import checked_key, key_metadata
from splitserve.security.tls import TlsFiles
from splitserve.v1 import inference_pb2, records_pb2
from splitserve.v1.inference_pb2_grpc import InferenceServiceStub

if TYPE_CHECKING:
    from splitserve.v1.inference_pb2_grpc import InferenceServiceAsyncStub


DEFAULT_TIMEOUT_S = 120.0
INFO_TIMEOUT_S = 10.0
"""Longer than an attempt to connect takes, whose failure says more than this limit."""
READY_POLL_S = 0.1

T = TypeVar("T")


class AsyncClient:
    """A connection to a coordinator at "host:port"; an async context manager, to be used on one event loop.

    `target` may list several coordinators of one cluster, separated by commas. One is used at a time. If it becomes
    unavailable, the client fails over to the next one. A generation goes on there at its next token, without gap or
    repetition: its reader notices a pause at most. One with a grammar whose first token has not come fails if the
    connection breaks: the grammar may be what ended the coordinator.

    `timeout_s` limits a whole generation unless a call overrides it. `tls` encrypts and verifies the server's
    name: `TlsFiles(authority=PATH)`, or `TlsFiles()` for the system's authorities. `api_key` authenticates the
    caller. `security` is for the cluster's own processes.

    All methods raise subclasses of SplitserveError: InvalidArgumentError (names field and bound), NotFoundError
    (unknown model), UnauthenticatedError (missing or unknown key), ResourceExhaustedError (overload or a quota, with
    `retry_after_s`), UnavailableError (UNREACHABLE, TLS_FAILED, or no worker), DeadlineExceededError.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        api_key: str | None = None,
        tls: TlsFiles | None = None,
        security: ClusterCredentials | None = None,
    ) -> None:
        self._targets = Targets(target)
        self._timeout_s = checked_timeout(timeout_s)
        self._tls, self._security = tls, security
        self._metadata = (*key_metadata(checked_key(api_key)), *(security.metadata if security else ()))
        self._channels: list[grpc.aio.Channel] = []

    @property
    def target(self) -> str:
        """The coordinator in use."""
        return self._targets.current

    async def __aenter__(self) -> Self:
        self._channels = [self._channel_to(address) for address in self._targets.addresses]
        self._stubs = [InferenceServiceStub(channel) for channel in self._channels]
        return self

    def _channel_to(self, address: str) -> grpc.aio.Channel:
        if self._security is not None:
            return self._security.channel(address, "coordinator")
        return make_channel(address, tls=self._tls)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels:
            await channel.close()

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Generates the whole answer. Cancelling the call cancels the generation on the server."""
        async with aclosing(self.stream(prompt, **options)) as items:
            async for item in items:
                if isinstance(item, Completion):
                    return item
        raise ended_early(self.target)

    async def stream(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Delta | Completion, None]:
        """Yields deltas as they arrive and finally the Completion with the full text.

        Closing the generator early cancels the generation on the server; use `contextlib.aclosing` to leave the
        loop before its end.
        """
        timeout_s = options.get("timeout_s")
        timeout_s = self._timeout_s if timeout_s is None else checked_timeout(timeout_s)
        session = GenerationSession(
            build_request(prompt, options), self._targets, timeout_s, options.get("traceparent")
        )
        metadata = (*self._metadata, *session.metadata)
        while True:
            stub, left_s = self._stubs[session.failover.index], session.left_s()
            call = stub.Generate(session.request, timeout=left_s, metadata=metadata)
            try:
                async for response in call:
                    item = session.take(response)
                    yield item
                    if isinstance(item, Completion):
                        return
                session.ended()
            except grpc.aio.AioRpcError as error:
                target, received, tls = session.failover.target, session.received, self._tls is not None
                session.failed(described(error, target, timeout_s, received=received, tls=tls))
            finally:
                call.cancel()

    async def models(self, *, timeout_s: float = INFO_TIMEOUT_S) -> list[inference_pb2.ModelInfo]:
        """The models that requests can name, sorted by name."""
        request = inference_pb2.ListModelsRequest()
        answer = await self._call(lambda stub: stub.ListModels, request, timeout_s)
        return list(answer.models)

    async def server_info(self, *, timeout_s: float = INFO_TIMEOUT_S) -> inference_pb2.GetServerInfoResponse:
        """The coordinator's version, uptime, load and registered workers."""
        request = inference_pb2.GetServerInfoRequest()
        return await self._call(lambda stub: stub.GetServerInfo, request, timeout_s)

    async def request_record(
        self, request_id: str, *, timeout_s: float = INFO_TIMEOUT_S
    ) -> records_pb2.RequestRecord:
        """What happened to one request, as the coordinator in use saw it. Raises NotFoundError (REQUEST_NOT_FOUND)."""
        request = records_pb2.GetRequestRecordRequest(request_id=request_id)
        answer = await self._call(lambda stub: stub.GetRequestRecord, request, timeout_s)
        return answer.record

    async def request_records(
        self, *, slow: bool = False, failed: bool = False, limit: int = 20, timeout_s: float = INFO_TIMEOUT_S
    ) -> list[records_pb2.RequestSummary]:
        """The latest kept records, at most `limit`. `slow`, `failed`: only those kept because the request was slow or
        failed."""
        request = records_pb2.ListRequestRecordsRequest(slow=slow, failed=failed, limit=limit)
        answer = await self._call(lambda stub: stub.ListRequestRecords, request, timeout_s)
        return list(answer.requests)

    async def wait_ready(self, timeout_s: float = 60.0, *, model: str = "") -> inference_pb2.ModelInfo:
        """Waits until `model` (default: any) is ready. Raises DeadlineExceededError (NOT_READY)."""
        why = ""
        try:
            async with asyncio.timeout(checked_timeout(timeout_s)):
                while True:
                    try:
                        for info in await self.models():
                            if info.ready and model in ("", info.name):
                                return info
                        why = f"model {model!r} is not ready" if model else "no model is ready"
                    except DeadlineExceededError as error:  # the next poll may be in time
                        why = why or error.message
                    except UnavailableError as error:
                        why = error.message
                    await asyncio.sleep(READY_POLL_S)
        except TimeoutError:
            message = f"{self.target} did not become ready within {timeout_s:g} s: {why or 'no answer yet'}"
            raise DeadlineExceededError(message, reason="NOT_READY") from None

    async def _call(
        self,
        method: Callable[[InferenceServiceAsyncStub], Callable[..., Awaitable[T]]],
        request: Message,
        timeout_s: float,
    ) -> T:
        failover = Failover(self._targets)
        while True:
            try:
                call = method(self._stubs[failover.index])
                return await call(request, timeout=timeout_s, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                failover.failed(described(error, failover.target, timeout_s, tls=self._tls is not None))
