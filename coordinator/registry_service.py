"""The gRPC face of the registry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc

from coordinator.pools import Worker
from coordinator.registration_checks import checked_worker
from coordinator.registry import Registry
from splitserve.errors import InvalidArgumentError, NotFoundError
from splitserve.logs import log_event
from splitserve.v1 import registry_pb2
from splitserve.v1.registry_pb2_grpc import RegistryServiceServicer

if TYPE_CHECKING:
    ReportContext = grpc.aio.ServicerContext[registry_pb2.ReportRequest, registry_pb2.ReportResponse]

WRITE_ENDS_S = 1.0
TELL_AGAIN_S = 5.0
"""A prefill worker that is not connected to all its peers by then gets their list anew: a first try may have failed."""


class RegistryService(RegistryServiceServicer):
    """Registers workers, takes their reports, tells them their peers.

    `load_tokenizer` is awaited before a worker is accepted, so that a model whose tokenizer cannot be
    read is refused here and not at its first request.
    """

    def __init__(
        self, registry: Registry, coordinator_id: str, load_tokenizer: Callable[[str], Awaitable[object]]
    ) -> None:
        self._registry = registry
        self._coordinator_id = coordinator_id
        self._load_tokenizer = load_tokenizer

    async def Register(
        self, request: registry_pb2.RegisterRequest, context: Any
    ) -> registry_pb2.RegisterResponse:
        """See RegistryService.Register in the proto."""
        worker = checked_worker(request)
        try:
            await self._load_tokenizer(worker.model.tokenizer_source)
        except NotFoundError as error:
            message = f"model.tokenizer_source: {error.message}"
            raise InvalidArgumentError(message, field="model.tokenizer_source") from None
        self._registry.register(request, time.monotonic())
        response = registry_pb2.RegisterResponse(coordinator_id=self._coordinator_id)
        response.heartbeat_timeout.FromNanoseconds(round(self._registry.heartbeat_timeout_s * 1e9))
        return response

    async def Report(  # type: ignore[override]
        self, requests: AsyncIterator[registry_pb2.ReportRequest], context: ReportContext
    ) -> None:
        """See RegistryService.Report in the proto. The stream's end drops the worker."""
        first = await anext(requests, None)
        if first is None:
            return
        worker = self._registry.report(first, time.monotonic())
        writing = asyncio.Lock()
        try:
            async with asyncio.TaskGroup() as group:
                telling = group.create_task(self._tell(worker, context, writing))
                await self._hear(worker, requests, context, writing)
                telling.cancel()
        finally:
            self._registry.drop(worker.key, "its report stream ended")

    async def _hear(
        self,
        worker: Worker,
        requests: AsyncIterator[registry_pb2.ReportRequest],
        context: ReportContext,
        writing: asyncio.Lock,
    ) -> None:
        await self._ask_resync(worker, context, writing)
        async for request in requests:
            if (request.worker_id, request.epoch) != worker.key:
                raise InvalidArgumentError("a report stream belongs to one worker", field="worker_id")
            self._registry.report(request, time.monotonic())
            await self._ask_resync(worker, context, writing)

    async def _ask_resync(self, worker: Worker, context: ReportContext, writing: asyncio.Lock) -> None:
        if self._registry.prefixes.take_resync(worker.key):
            log_event("worker.cache_lost", worker_id=worker.worker_id)
            async with writing:
                await _written(context, self._news(worker, resync_cache=True))

    def _news(self, worker: Worker, resync_cache: bool = False) -> registry_pb2.ReportResponse:
        return registry_pb2.ReportResponse(
            peers=self._registry.peers_of(worker),
            ended_agent_ids=self._registry.ended_writers_for(worker),
            resync_cache=resync_cache,
        )

    def _lacks_peers(self, worker: Worker) -> bool:
        now = self._registry.get(worker.key)
        if now is None:
            return False
        settled = now.connected_agents | {lane.agent_id for lane in now.lanes if lane.refused}
        return any(peer.agent_id not in settled for peer in self._registry.peers_of(now))

    async def _tell(self, worker: Worker, context: ReportContext, writing: asyncio.Lock) -> None:
        """Sends the whole lists first and after each change of them, and again while a peer is not connected; ends
        when the worker was dropped."""
        told: registry_pb2.ReportResponse | None = None
        while self._registry.get(worker.key) is not None:
            version = self._registry.version
            news = self._news(worker)
            if news != told:
                async with writing:
                    await _written(context, news)
                told = news
            with suppress(TimeoutError):
                async with asyncio.timeout(TELL_AGAIN_S):
                    await self._registry.wait_change(version)
                    continue
            if self._lacks_peers(worker):
                told = None
        raise NotFoundError(f"worker {worker.worker_id!r} was dropped", reason="WORKER_NOT_REGISTERED")


async def _written(context: ReportContext, news: registry_pb2.ReportResponse) -> None:
    """Sends to the end even when cancelled: gRPC takes no status while a message is on its way."""
    write = asyncio.ensure_future(context.write(news))
    try:
        await asyncio.shield(write)
    except asyncio.CancelledError:
        await asyncio.wait([write], timeout=WRITE_ENDS_S)
        raise
