"""The client of a coordinator's gRPC API for programs without an event loop; `AsyncClient` has the same methods.

with Client("127.0.0.1:50051") as client:
    for item in client.stream("Once upon a time", max_tokens=40):
        if isinstance(item, Delta):
            print(item.text, end="", flush=True)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc

from splitserve.client.async_client import DEFAULT_TIMEOUT_S, INFO_TIMEOUT_S, READY_POLL_S
from splitserve.client.call_errors import checked_timeout, described, ended_early, not_ready
from splitserve.client.failover import Failover, GenerationSession, Targets
from splitserve.client.request_builder import build_request
from splitserve.client.types import Completion, Delta, GenerateOptions, Prompt
from splitserve.errors import DeadlineExceededError, UnavailableError
from splitserve.rpc.channel import make_blocking_channel
from splitserve.security.api_keys import checked_key, key_metadata
from splitserve.security.tls import TlsFiles
from splitserve.v1 import inference_pb2, records_pb2
from splitserve.v1.inference_pb2_grpc import InferenceServiceStub

T = TypeVar("T")


class Client:
    """A connection to a coordinator, or to several of one cluster; a context manager. Any thread may use it.

    Arguments, failover and errors are those of `AsyncClient`.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        api_key: str | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self._targets = Targets(target)
        self._timeout_s = checked_timeout(timeout_s)
        self._tls = tls
        self._metadata = key_metadata(checked_key(api_key))
        self._channels: list[grpc.Channel] = []

    @property
    def target(self) -> str:
        """The coordinator in use."""
        return self._targets.current

    def __enter__(self) -> Self:
        self._channels = [
            make_blocking_channel(address, tls=self._tls) for address in self._targets.addresses
        ]
        self._stubs = [InferenceServiceStub(channel) for channel in self._channels]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels:
            channel.close()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Generates the whole answer."""
        with closing(self.stream(prompt, **options)) as items:
            for item in items:
                if isinstance(item, Completion):
                    return item
        raise ended_early(self.target)

    def stream(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> Generator[Delta | Completion, None, None]:
        """Yields deltas as they arrive and finally the Completion with the full text.

        Closing the generator early cancels the generation on the server; use `contextlib.closing` to leave the loop
        before its end.
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
                for response in call:
                    item = session.take(response)
                    yield item
                    if isinstance(item, Completion):
                        return
                session.ended()
            except grpc.RpcError as error:
                target, received, tls = session.failover.target, session.received, self._tls is not None
                session.failed(described(error, target, timeout_s, received=received, tls=tls))
            finally:
                call.cancel()

    def models(self, *, timeout_s: float = INFO_TIMEOUT_S) -> list[inference_pb2.ModelInfo]:
        """The models that requests can name, sorted by name."""
        request, metadata = inference_pb2.ListModelsRequest(), self._metadata
        answer = self._call(
            lambda stub: stub.ListModels(request, timeout=timeout_s, metadata=metadata), timeout_s
        )
        return list(answer.models)

    def server_info(self, *, timeout_s: float = INFO_TIMEOUT_S) -> inference_pb2.GetServerInfoResponse:
        """The coordinator's version, uptime, load and registered workers."""
        request, metadata = inference_pb2.GetServerInfoRequest(), self._metadata
        return self._call(
            lambda stub: stub.GetServerInfo(request, timeout=timeout_s, metadata=metadata), timeout_s
        )

    def request_record(
        self, request_id: str, *, timeout_s: float = INFO_TIMEOUT_S
    ) -> records_pb2.RequestRecord:
        """What happened to one request, as the coordinator in use saw it. Raises NotFoundError (REQUEST_NOT_FOUND)."""
        request, metadata = records_pb2.GetRequestRecordRequest(request_id=request_id), self._metadata
        answer = self._call(
            lambda stub: stub.GetRequestRecord(request, timeout=timeout_s, metadata=metadata), timeout_s
        )
        return answer.record

    def request_records(
        self, *, slow: bool = False, failed: bool = False, limit: int = 20, timeout_s: float = INFO_TIMEOUT_S
    ) -> list[records_pb2.RequestSummary]:
        """The latest kept records, or of them those that are kept because they were slow, or because they failed."""
        request = records_pb2.ListRequestRecordsRequest(slow=slow, failed=failed, limit=limit)
        metadata = self._metadata
        answer = self._call(
            lambda stub: stub.ListRequestRecords(request, timeout=timeout_s, metadata=metadata), timeout_s
        )
        return list(answer.requests)

    def wait_ready(self, timeout_s: float = 60.0, *, model: str = "") -> inference_pb2.ModelInfo:
        """Waits until `model` (default: any) is ready. Raises DeadlineExceededError (NOT_READY)."""
        why, deadline_s = "", time.monotonic() + checked_timeout(timeout_s)
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                for info in self.models(timeout_s=min(INFO_TIMEOUT_S, left_s)):
                    if info.ready and model in ("", info.name):
                        return info
                why = f"model {model!r} is not ready" if model else "no model is ready"
            except DeadlineExceededError as error:  # asked again
                why = why or error.message
            except UnavailableError as error:
                why = error.message
            time.sleep(min(READY_POLL_S, left_s))
        raise not_ready(self.target, timeout_s, why or "no answer yet")

    def _call(self, ask: Callable[[InferenceServiceStub], T], timeout_s: float) -> T:
        failover = Failover(self._targets)
        while True:
            try:
                return ask(self._stubs[failover.index])
            except grpc.RpcError as error:
                failover.failed(described(error, failover.target, timeout_s, tls=self._tls is not None))
