"""The client of a coordinator's gRPC API for programs without an event loop; `AsyncClient` has the same methods.

with Client("127.0.0.1:50051") as client:
    for item in client.stream("Once upon a time", max_tokens=40):
        if isinstance(item, Delta):
            print(item.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from splitserve.client.async_client import DEFAULT_TIMEOUT_S, INFO_TIMEOUT_S, AsyncClient
from splitserve.client.types import Completion, Delta, GenerateOptions, Prompt
from splitserve.security.tls import TlsFiles
from splitserve.v1 import inference_pb2, records_pb2

T = TypeVar("T")


class Client:
    """A connection to a coordinator, or to several of one cluster; a context manager. Any thread may use it.

    Arguments, failover and errors are those of `AsyncClient`, which runs on an event loop in a thread of its own.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        api_key: str | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self._client = AsyncClient(target, timeout_s=timeout_s, api_key=api_key, tls=tls)

    @property
    def target(self) -> str:
        """The coordinator in use."""
        return self._client.target

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="splitserve-client", daemon=True)
        self._thread.start()
        self._result(self._client.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._result(self._client.__aexit__(kind, error, trace))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Generates the whole answer."""
        return self._result(self._client.generate(prompt, **options))

    def stream(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> Generator[Delta | Completion, None, None]:
        """Yields deltas as they arrive and finally the Completion with the full text.

        Closing the generator early cancels the generation on the server; use `contextlib.closing` to leave the loop
        before its end.
        """
        items = self._client.stream(prompt, **options)
        try:
            while (item := self._result(_next(items))) is not None:
                yield item
        finally:
            if self._loop.is_running():  # else the client has closed, and the stream with it
                self._result(items.aclose())

    def models(self, *, timeout_s: float = INFO_TIMEOUT_S) -> list[inference_pb2.ModelInfo]:
        """The models that requests can name, sorted by name."""
        return self._result(self._client.models(timeout_s=timeout_s))

    def server_info(self, *, timeout_s: float = INFO_TIMEOUT_S) -> inference_pb2.GetServerInfoResponse:
        """The coordinator's version, uptime, load and registered workers."""
        return self._result(self._client.server_info(timeout_s=timeout_s))

    def request_record(
        self, request_id: str, *, timeout_s: float = INFO_TIMEOUT_S
    ) -> records_pb2.RequestRecord:
        """What happened to one request, as the coordinator in use saw it. Raises NotFoundError (REQUEST_NOT_FOUND)."""
        return self._result(self._client.request_record(request_id, timeout_s=timeout_s))

    def request_records(
        self, *, slow: bool = False, failed: bool = False, limit: int = 20, timeout_s: float = INFO_TIMEOUT_S
    ) -> list[records_pb2.RequestSummary]:
        """The latest kept records, or of them those that are kept because they were slow, or because they failed."""
        asked = self._client.request_records(slow=slow, failed=failed, limit=limit, timeout_s=timeout_s)
        return self._result(asked)

    def wait_ready(self, timeout_s: float = 60.0, *, model: str = "") -> inference_pb2.ModelInfo:
        """Waits until `model` (default: any) is ready. Raises DeadlineExceededError (NOT_READY)."""
        return self._result(self._client.wait_ready(timeout_s, model=model))

    def _result(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a call on the event loop. What interrupts this thread, such as Ctrl-C, cancels the call."""
        running = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return running.result()
        finally:
            running.cancel()


async def _next(items: AsyncGenerator[Delta | Completion, None]) -> Delta | Completion | None:
    return await anext(items, None)
