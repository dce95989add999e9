"""RegistryService: workers register here and stream their load reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from typing_extensions import override

from coordinator.workers.registration import check_identity, check_report, checked_worker
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker
from splitserve.errors import InvalidArgumentError, NotFoundError, PermissionDeniedError
from splitserve.logs import log_event
from splitserve.roles import ROLE_NUMBERS
from splitserve.rpc.server import write_whole
from splitserve.security.tls import peer_identity
from splitserve.v1 import registry_pb2
from splitserve.v1.registry_pb2_grpc import RegistryServiceServicer

if TYPE_CHECKING:
    ReportContext = grpc.aio.ServicerContext[registry_pb2.ReportRequest, registry_pb2.ReportResponse]

RESEND_PEERS_S = 5.0
"""Interval at which a worker that is not connected to all its peers gets the list again: a try may have failed."""


@dataclass(eq=False)
class RegistryService(RegistryServiceServicer):
    """Registers workers, takes their reports, sends them their peers."""

    registry: Registry
    coordinator_id: str
    load_tokenizer: Callable[[str], Awaitable[object]]
    """Awaited before a worker is accepted, so that a model whose tokenizer cannot be loaded is refused at
    registration and not at its first request."""
    mutual: bool = False
    """Whether callers present certificates, and may only register and report what these name."""

    @override
    async def Register(
        self, request: registry_pb2.RegisterRequest, context: Any
    ) -> registry_pb2.RegisterResponse:
        worker, certificate = checked_worker(request), ""
        if self.mutual:
            identity = peer_identity(context)
            check_identity(request, identity)
            certificate = identity.fingerprint
        try:
            await self.load_tokenizer(worker.model.tokenizer_source)
        except NotFoundError as error:
            message = f"model.tokenizer_source: {error.message}"
            raise InvalidArgumentError(message, field="model.tokenizer_source") from None
        self.registry.register(request, time.monotonic(), certificate)
        response = registry_pb2.RegisterResponse(coordinator_id=self.coordinator_id)
        response.heartbeat_timeout.FromNanoseconds(round(self.registry.heartbeat_timeout_s * 1e9))
        return response

    @override
    async def Report(  # type: ignore[override]
        self, requests: AsyncIterator[registry_pb2.ReportRequest], context: ReportContext
    ) -> None:
        """Reads a worker's reports until the stream ends, which drops the worker unless its output stream is open."""
        first = await anext(requests, None)
        if first is None:
            return
        self._check_reporter(first, context)
        check_report(first)
        worker = self.registry.report(first, time.monotonic())
        writing = asyncio.Lock()
        try:
            async with asyncio.TaskGroup() as group:
                updates = group.create_task(self._send_updates(worker, context, writing))
                await self._read_reports(worker, requests, context, writing)
                updates.cancel()
        finally:
            self.registry.report_ended(worker.key)

    def _check_reporter(self, first: registry_pb2.ReportRequest, context: ReportContext) -> None:
        """Raises PermissionDeniedError unless the worker registered with the certificate of this call."""
        known = self.registry.get((first.worker_id, first.epoch))
        if self.mutual and known is not None and known.certificate != peer_identity(context).fingerprint:
            message = f"worker {first.worker_id!r} registered with another certificate"
            raise PermissionDeniedError(message, reason="WRONG_WORKER_ID", field="worker_id")

    async def _read_reports(
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
            check_report(request)
            self.registry.report(request, time.monotonic())
            await self._ask_resync(worker, context, writing)

    async def _ask_resync(self, worker: Worker, context: ReportContext, writing: asyncio.Lock) -> None:
        if self.registry.prefixes.take_resync(worker.key):
            log_event("worker.cache_lost", worker_id=worker.worker_id)
            async with writing:
                await write_whole(context, self._update(worker, resync_cache=True))

    def _update(self, worker: Worker, resync_cache: bool = False) -> registry_pb2.ReportResponse:
        current = self.registry.get(worker.key) or worker
        role = self.registry.plan.role_change_of(current)
        return registry_pb2.ReportResponse(
            peers=self.registry.peers_of(current),
            ended_agent_ids=self.registry.ended_writers_for(worker),
            resync_cache=resync_cache,
            role=registry_pb2.ROLE_UNSPECIFIED if role is None else ROLE_NUMBERS[role],
        )

    def _must_repeat(self, worker: Worker) -> bool:
        """Whether the worker is not connected to all its peers, or has not taken the role that the plan gives it."""
        current = self.registry.get(worker.key)
        if current is None:
            return False
        if self.registry.plan.role_change_of(current) is not None:
            return True
        settled = current.connected_agents | {lane.agent_id for lane in current.lanes if lane.refused}
        return any(peer.agent_id not in settled for peer in self.registry.peers_of(current))

    async def _send_updates(self, worker: Worker, context: ReportContext, writing: asyncio.Lock) -> None:
        """Sends the worker its peers, the writers that ended and the role to take: at once, after each change, and
        periodically while a peer is not connected or the worker has another role.

        Raises NotFoundError once the worker has been dropped.
        """
        last: registry_pb2.ReportResponse | None = None
        while self.registry.get(worker.key) is not None:
            version = self.registry.version
            update = self._update(worker)
            if update != last:
                async with writing:
                    await write_whole(context, update)
                last = update
            with suppress(TimeoutError):
                async with asyncio.timeout(RESEND_PEERS_S):
                    await self.registry.wait_change(version)
                    continue
            if self._must_repeat(worker):
                last = None
        raise NotFoundError(f"worker {worker.worker_id!r} was dropped", reason="WORKER_NOT_REGISTERED")
