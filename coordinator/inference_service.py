"""The gRPC face towards clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc

from coordinator.background import Background
from coordinator.pools import PoolSnapshot, Worker
from coordinator.prompt import PromptTokenizers
from coordinator.registry import Registry
from coordinator.request_flow import RETRY_AFTER_S, RequestFlow
from coordinator.signal_book import SignalBook
from splitserve import __version__
from splitserve.errors import ResourceExhaustedError, UnavailableError
from splitserve.v1 import inference_pb2, registry_pb2, scaling_pb2
from splitserve.v1.inference_pb2_grpc import InferenceServiceServicer

if TYPE_CHECKING:
    GenerateContext = grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]


class InferenceService(InferenceServiceServicer):
    """Admits generations up to a number and hands them to the request flow."""

    def __init__(
        self,
        flow: RequestFlow,
        registry: Registry,
        tokenizers: PromptTokenizers,
        background: Background,
        book: SignalBook,
        max_running_requests: int,
    ) -> None:
        self._running: set[asyncio.Timeout] = set()
        self.draining = False
        self.idle = asyncio.Event()
        """Set while no generation runs."""
        self.idle.set()
        self._flow = flow
        self._registry = registry
        self._tokenizers = tokenizers
        self._background = background
        self._book = book
        self._max_running_requests = max_running_requests
        self._started_s = time.monotonic()

    @property
    def running(self) -> int:
        """Generations in progress."""
        return len(self._running)

    async def Generate(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: GenerateContext
    ) -> None:
        """See InferenceService.Generate in the proto."""
        async with self._admitted(request.model):
            await self._flow.generate(request, context.write, context.time_remaining())

    def cut_off(self) -> None:
        """Ends what still runs, with UNAVAILABLE (DRAINING); nothing new is admitted."""
        self.draining = True
        now = asyncio.get_running_loop().time()
        for running in self._running:
            running.reschedule(now)

    async def GetServerInfo(
        self, request: inference_pb2.GetServerInfoRequest, context: Any
    ) -> inference_pb2.GetServerInfoResponse:
        """See InferenceService.GetServerInfo in the proto."""
        snapshot = self._registry.snapshot()
        return inference_pb2.GetServerInfoResponse(
            version=__version__,
            workers=[_worker_info(worker, snapshot) for worker in snapshot.workers],
            uptime_seconds=time.monotonic() - self._started_s,
            running_requests=self.running,
            background_tasks=self._background.count,
        )

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        """See InferenceService.ListModels in the proto."""
        snapshot = self._registry.snapshot()
        response = inference_pb2.ListModelsResponse()
        for name, model in sorted(self._registry.known_models().items()):
            tokenizer = await self._tokenizers.tokenizer(model.tokenizer_source)
            response.models.add(
                name=name,
                context_tokens=model.context_tokens,
                vocabulary_size=model.vocabulary_size,
                has_chat_template=tokenizer.has_chat_template,
                ready=any(snapshot.is_ready(w) for w in snapshot.accepting(name, "prefill")),
            )
        return response

    @asynccontextmanager
    async def _admitted(self, model: str) -> AsyncIterator[None]:
        if self.draining:
            raise _shutting_down()
        if self.running >= self._max_running_requests:
            self._book.turned_away(model)
            raise ResourceExhaustedError(
                f"{self.running} generations are running, which is the limit",
                reason="TOO_MANY_REQUESTS",
                retry_after_s=RETRY_AFTER_S,
            )
        # A timeout without a time, which `cut_off` can set.
        running = asyncio.timeout(None)
        self._running.add(running)
        self.idle.clear()
        try:
            async with running:
                yield
        except TimeoutError:
            if not running.expired():
                raise
            raise _shutting_down() from None
        finally:
            self._running.discard(running)
            if not self._running:
                self.idle.set()


def _shutting_down() -> UnavailableError:
    return UnavailableError("the coordinator is shutting down", reason="DRAINING")


def _worker_info(worker: Worker, snapshot: PoolSnapshot) -> inference_pb2.WorkerInfo:
    load, lanes = worker.load, snapshot.lanes_of(worker)
    return inference_pb2.WorkerInfo(
        worker_id=worker.worker_id,
        pool=worker.pool,
        address=worker.address,
        model=worker.model.name,
        state=_state(worker, snapshot),
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        total_blocks=load.total_blocks,
        free_blocks=load.free_blocks,
        reserved_blocks=load.reserved_blocks,
        quarantined_blocks=load.quarantined_blocks,
        referenced_blocks=load.referenced_blocks,
        transport=worker.transport,
        rss_bytes=load.rss_bytes,
        open_rpcs=load.open_rpcs,
        transfers_in_flight=load.transfers_in_flight,
        waiting_reservations=load.waiting_reservations,
        rejected_handoffs=load.rejected_handoffs,
        lanes=[_lane_info(peer, lane) for peer, lane in lanes],
    )


def _state(worker: Worker, snapshot: PoolSnapshot) -> str:
    match snapshot.state_of(worker):
        case scaling_pb2.WORKER_STATE_DRAINING:
            return "draining"
        case scaling_pb2.WORKER_STATE_STANDBY:
            return "standby"
    if any(lane.problem for _, lane in snapshot.lanes_of(worker)):
        return "slow-lane"
    return "ready" if snapshot.is_ready(worker) else "connecting"


def _lane_info(peer: Worker, lane: registry_pb2.LaneReport) -> inference_pb2.LaneInfo:
    return inference_pb2.LaneInfo(
        peer=peer.worker_id,
        gb_per_second=lane.gb_per_second,
        latency_ms=lane.latency_ms,
        lane=lane.lane,
        problem=lane.problem,
        refused=lane.refused,
    )
