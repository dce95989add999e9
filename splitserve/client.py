"""The client: asks a coordinator for generations and for what it serves.

async with AsyncClient("127.0.0.1:50051") as client:
    async for item in client.stream("Once upon a time", max_tokens=40):
        if isinstance(item, Delta):
            print(item.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc

from splitserve.addresses import check_address
from splitserve.client_request import build_request
from splitserve.client_types import (
    Answer,
    ChatMessage,
    Completion,
    Delta,
    FinishReason,
    GenerateOptions,
    Prompt,
    ServedBy,
    Timings,
    TokenLogprob,
    Usage,
)
from splitserve.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    SplitserveError,
    UnavailableError,
)
from splitserve.rpc import error_from_rpc, make_channel
from splitserve.v1 import inference_pb2
from splitserve.v1.inference_pb2_grpc import InferenceServiceStub

__all__ = [
    "AsyncClient",
    "ChatMessage",
    "Completion",
    "Delta",
    "FinishReason",
    "GenerateOptions",
    "Prompt",
    "ServedBy",
    "Timings",
    "TokenLogprob",
    "Usage",
]

DEFAULT_TIMEOUT_S = 120.0
INFO_TIMEOUT_S = 5.0
READY_POLL_S = 0.1
DETAILS_KEY = "grpc-status-details-bin"

T = TypeVar("T")


class AsyncClient:
    """A connection to one coordinator at "host:port"; an async context manager, for one event loop.

    `timeout_s` is the time for a whole generation unless a call says otherwise. All methods raise subclasses
    of SplitserveError: InvalidArgumentError (field and bound named), NotFoundError (unknown model),
    ResourceExhaustedError (overload, with `retry_after_s`), UnavailableError (UNREACHABLE, or no worker),
    DeadlineExceededError.
    """

    def __init__(self, target: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.target = check_address(target, "target")
        self._timeout_s = _checked_timeout(timeout_s)
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        self._channel = make_channel(self.target)
        self._stub = InferenceServiceStub(self._channel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer at once. Cancelling the call cancels the generation on the server."""
        async with aclosing(self.stream(prompt, **options)) as items:
            async for item in items:
                if isinstance(item, Completion):
                    return item
        raise UnavailableError(f"{self.target} ended the stream early", reason="STREAM_BROKEN")

    async def stream(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Delta | Completion, None]:
        """Yields deltas as they come, then the Completion with the full text, last and once.

        Closing the generator early cancels the generation on the server; use `contextlib.aclosing` when you
        leave the loop before its end.
        """
        timeout_s = options.get("timeout_s")
        timeout_s = self._timeout_s if timeout_s is None else _checked_timeout(timeout_s)
        request = build_request(prompt, options)
        answer, heard = Answer(request.model), False
        call = self._stub.Generate(request, timeout=timeout_s)
        try:
            async for response in call:
                heard = True
                if response.HasField("done"):
                    yield answer.finish(response.done)
                    return
                yield answer.add(response.delta)
            raise UnavailableError(f"{self.target} ended the stream early", reason="STREAM_BROKEN")
        except grpc.aio.AioRpcError as error:
            raise self._readable(error, timeout_s, heard) from None
        finally:
            call.cancel()

    async def models(self, *, timeout_s: float = INFO_TIMEOUT_S) -> list[inference_pb2.ModelInfo]:
        """The models that can be named, in order of their names."""
        call = self._stub.ListModels(inference_pb2.ListModelsRequest(), timeout=timeout_s)
        return list((await self._answered(call, timeout_s)).models)

    async def server_info(self, *, timeout_s: float = INFO_TIMEOUT_S) -> inference_pb2.GetServerInfoResponse:
        """What the server is and which workers it sees."""
        call = self._stub.GetServerInfo(inference_pb2.GetServerInfoRequest(), timeout=timeout_s)
        return await self._answered(call, timeout_s)

    async def wait_ready(self, timeout_s: float = 60.0, *, model: str = "") -> inference_pb2.ModelInfo:
        """Waits until `model` (default: any) can be asked for. Raises DeadlineExceededError (NOT_READY)."""
        why = "it serves no model yet"
        try:
            async with asyncio.timeout(_checked_timeout(timeout_s)):
                while True:
                    try:
                        for info in await self.models():
                            if info.ready and model in ("", info.name):
                                return info
                        why = f"model {model!r} is not ready" if model else "no model is ready"
                    except UnavailableError as error:
                        why = error.message
                    await asyncio.sleep(READY_POLL_S)
        except TimeoutError:
            message = f"{self.target} did not become ready within {timeout_s:g} s: {why}"
            raise DeadlineExceededError(message, reason="NOT_READY") from None

    async def _answered(self, call: Awaitable[T], timeout_s: float) -> T:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise self._readable(error, timeout_s, False) from None

    def _readable(self, error: grpc.aio.AioRpcError, timeout_s: float, heard: bool) -> SplitserveError:
        """The error for people. What carries details is splitserve's own; the rest is gRPC speaking."""
        known = error_from_rpc(error)
        if any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ()):
            return known
        match error.code():
            case grpc.StatusCode.UNAVAILABLE if heard:
                message = f"the connection to {self.target} broke before the answer was complete"
                return UnavailableError(message, reason="CONNECTION_LOST")
            case grpc.StatusCode.UNAVAILABLE:
                message = (
                    f"cannot reach a splitserve coordinator at {self.target}: is it running? (splitserve up)"
                )
                return UnavailableError(message, reason="UNREACHABLE")
            case grpc.StatusCode.UNIMPLEMENTED:
                message = f"the gRPC server at {self.target} is no splitserve coordinator"
                return FailedPreconditionError(message, reason="WRONG_SERVER")
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                message = f"{self.target} gave no complete answer within {timeout_s:g} s"
                return DeadlineExceededError(message)
        return known


def _checked_timeout(timeout_s: float) -> float:
    if not 0 < timeout_s < float("inf"):
        raise InvalidArgumentError(f"timeout_s must be a time above 0 s, not {timeout_s}", field="timeout_s")
    return timeout_s
