"""The client: asks a coordinator for generations and for what it serves.

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

from splitserve.addresses import check_address
from splitserve.api_keys import checked_key, key_metadata
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
from splitserve.part_security import PartSecurity
from splitserve.rpc import error_from_rpc, make_channel
from splitserve.tls import TlsFiles
from splitserve.v1 import inference_pb2
from splitserve.v1.inference_pb2_grpc import InferenceServiceStub

if TYPE_CHECKING:
    from splitserve.v1.inference_pb2_grpc import InferenceServiceAsyncStub

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

    `target` may name several coordinators of the same cluster, separated by commas. One is used; when it is
    unavailable, the next one takes its place, for a generation as long as nothing of the answer has come.

    `timeout_s` is the time for a whole generation unless a call says otherwise. `tls` encrypts and verifies the
    server's name: `TlsFiles(authority=PATH)`, or `TlsFiles()` for the system's authorities. `api_key` says who asks.
    `security` is for parts of the cluster itself.

    All methods raise subclasses of SplitserveError: InvalidArgumentError (field and bound named), NotFoundError
    (unknown model), UnauthenticatedError (no or an unknown key), ResourceExhaustedError (overload or a quota, with
    `retry_after_s`), UnavailableError (UNREACHABLE, TLS_FAILED, or no worker), DeadlineExceededError.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        api_key: str | None = None,
        tls: TlsFiles | None = None,
        security: PartSecurity | None = None,
    ) -> None:
        self._targets = [check_address(address.strip(), "target") for address in target.split(",")]
        self._at = 0
        self._timeout_s = _checked_timeout(timeout_s)
        self._tls, self._security = tls, security
        self._metadata = (*key_metadata(checked_key(api_key)), *(security.metadata if security else ()))
        self._channels: list[grpc.aio.Channel] = []

    @property
    def target(self) -> str:
        """The coordinator in use."""
        return self._targets[self._at]

    async def __aenter__(self) -> Self:
        self._channels = [self._channel_to(address) for address in self._targets]
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
        for others in reversed(range(len(self._targets))):
            used = self._at
            call = self._stubs[used].Generate(request, timeout=timeout_s, metadata=self._metadata)
            try:
                async for response in call:
                    heard = True
                    if response.HasField("done"):
                        yield answer.finish(response.done)
                        return
                    yield answer.add(response.delta)
                raise UnavailableError(f"{self.target} ended the stream early", reason="STREAM_BROKEN")
            except grpc.aio.AioRpcError as error:
                self._leave(used, self._readable(error, timeout_s, heard), may_leave=others > 0 and not heard)
            finally:
                call.cancel()

    async def models(self, *, timeout_s: float = INFO_TIMEOUT_S) -> list[inference_pb2.ModelInfo]:
        """The models that can be named, in order of their names."""
        request, metadata = inference_pb2.ListModelsRequest(), self._metadata
        answer = await self._answered(
            lambda stub: stub.ListModels(request, timeout=timeout_s, metadata=metadata), timeout_s
        )
        return list(answer.models)

    async def server_info(self, *, timeout_s: float = INFO_TIMEOUT_S) -> inference_pb2.GetServerInfoResponse:
        """What the server is and which workers it sees."""
        request, metadata = inference_pb2.GetServerInfoRequest(), self._metadata
        return await self._answered(
            lambda stub: stub.GetServerInfo(request, timeout=timeout_s, metadata=metadata), timeout_s
        )

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

    async def _answered(
        self, ask: Callable[[InferenceServiceAsyncStub], Awaitable[T]], timeout_s: float
    ) -> T:
        for others in reversed(range(len(self._targets))):
            used = self._at
            try:
                return await ask(self._stubs[used])
            except grpc.aio.AioRpcError as error:
                self._leave(used, self._readable(error, timeout_s, False), may_leave=others > 0)
        raise AssertionError("the last coordinator's error is raised")

    def _leave(self, used: int, error: SplitserveError, *, may_leave: bool) -> None:
        """Has the next coordinator take the place of the one in use, if that is to be done about the error."""
        if not may_leave or not isinstance(error, UnavailableError):
            raise error from None
        if self._at == used:  # nobody else has left it meanwhile
            self._at = (used + 1) % len(self._targets)

    def _readable(self, error: grpc.aio.AioRpcError, timeout_s: float, heard: bool) -> SplitserveError:
        """The error for people. What carries details is splitserve's own; the rest is gRPC speaking."""
        known = error_from_rpc(error)
        if any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ()):
            return known
        match error.code():
            case grpc.StatusCode.UNAVAILABLE if known.reason == "TLS_FAILED":
                message = f"no trusted connection to {self.target}: its certificate or ours was not accepted"
                return UnavailableError(message, reason="TLS_FAILED")
            case grpc.StatusCode.UNAVAILABLE if heard:
                message = f"the connection to {self.target} broke before the answer was complete"
                return UnavailableError(message, reason="CONNECTION_LOST")
            case grpc.StatusCode.UNAVAILABLE if "Socket closed" in known.message:
                hint = "does it want no TLS, or our certificate?" if self._tls else "does it want TLS?"
                return UnavailableError(f"{self.target} hung up: {hint}", reason="UNREACHABLE")
            case grpc.StatusCode.UNAVAILABLE:
                why = known.message.rpartition(": ")[2].rstrip("]")  # the innermost of gRPC's causes
                message = f"cannot reach a splitserve coordinator at {self.target} ({why}): is it running?"
                return UnavailableError(f"{message} (splitserve up)", reason="UNREACHABLE")
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
