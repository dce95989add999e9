"""The coordinator's process: puts its parts together, runs them until a signal, drains."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from prometheus_client.core import Metric

from coordinator.background import Background
from coordinator.caller import OpenDoor
from coordinator.coordinator_metrics import coordinator_metrics
from coordinator.ended_workers import EndedWorkers
from coordinator.front_door import FrontDoor
from coordinator.inference_service import InferenceService
from coordinator.prompt import PromptTokenizers
from coordinator.registry import Registry
from coordinator.registry_service import RegistryService
from coordinator.request_flow import RequestFlow
from coordinator.routing import LeastWaitRouter, Router
from coordinator.scaling_service import ScalingService
from coordinator.signal_book import SignalBook
from coordinator.worker_links import WorkerLinks
from splitserve.config import CoordinatorConfig
from splitserve.hf_tokenizer import load_tokenizer
from splitserve.logs import log_event
from splitserve.metrics import serving_metrics
from splitserve.rpc import RpcServer, make_server
from splitserve.stop_signal import stop_signal
from splitserve.tokenizer import Tokenizer
from splitserve.v1 import inference_pb2, registry_pb2, scaling_pb2
from splitserve.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from splitserve.v1.registry_pb2_grpc import add_RegistryServiceServicer_to_server
from splitserve.v1.scaling_pb2_grpc import add_ScalingServiceServicer_to_server

CLEANUP_GRACE_S = 3.0
SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    registry_pb2.DESCRIPTOR.services_by_name["RegistryService"].full_name,
    scaling_pb2.DESCRIPTOR.services_by_name["ScalingService"].full_name,
)


class Coordinator:
    """The running parts of one coordinator; `running_coordinator` makes one."""

    def __init__(
        self, config: CoordinatorConfig, load: Callable[[str], Tokenizer], router: Router | None
    ) -> None:
        self.coordinator_id = str(uuid.uuid4())
        self.port = 0
        self.config = config
        self.background = Background()
        self.registry = Registry(config.heartbeat_timeout_s)
        self.ended = EndedWorkers(self.registry)
        self.tokenizers = PromptTokenizers(load, config.tokenizer_threads)
        self.links = WorkerLinks(
            self.registry, self.background, self.coordinator_id, config.max_message_bytes
        )
        self.book = SignalBook()
        flow = RequestFlow(
            config,
            self.registry,
            router or LeastWaitRouter(),
            self.links,
            self.tokenizers,
            self.background,
            self.book,
        )
        self.door = FrontDoor(
            flow,
            self.registry,
            self.tokenizers,
            self.background,
            self.book,
            OpenDoor(),
            config.max_running_requests,
        )
        self.server: RpcServer = make_server(max_message_bytes=config.max_message_bytes)
        add_InferenceServiceServicer_to_server(InferenceService(self.door), self.server.grpc_server)
        members = RegistryService(self.registry, self.coordinator_id, self.tokenizers.tokenizer)
        add_RegistryServiceServicer_to_server(members, self.server.grpc_server)
        self.scaling = ScalingService(self.registry, self.book, self.coordinator_id)
        add_ScalingServiceServicer_to_server(self.scaling, self.server.grpc_server)

    async def expire_silent_workers(self) -> None:
        """Drops workers that do not report in time, until cancelled."""
        while True:
            await asyncio.sleep(self.config.heartbeat_timeout_s / 4)
            self.registry.expire(time.monotonic())

    def metrics(self) -> list[Metric]:
        """What the Prometheus endpoint shows, at this moment."""
        return coordinator_metrics(self.registry.snapshot(), self.door.running, self.book.models())

    async def drain(self) -> None:
        """Refuses new generations and waits up to `drain_s` for the running ones.

        Workers stay connected meanwhile, so that what runs can still go on elsewhere.
        """
        log_event("coordinator.draining", running_requests=self.door.running)
        self.door.draining = True
        await self.server.set_serving(False)
        await self._idle(self.config.drain_s)

    async def close(self) -> None:
        """Ends what still runs, lets its clean-up reach the workers, stops the server. Idempotent."""
        self.door.cut_off()
        await self._idle(CLEANUP_GRACE_S)
        # Before the server: stopping it breaks the report streams, and with them the links.
        await self.background.close(CLEANUP_GRACE_S)
        await self.server.stop()

    async def _idle(self, wait_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self.door.idle.wait()


@asynccontextmanager
async def running_coordinator(
    config: CoordinatorConfig,
    *,
    load: Callable[[str], Tokenizer] = load_tokenizer,
    router: Router | None = None,
) -> AsyncIterator[Coordinator]:
    """A coordinator that serves while the context is open; leaving it cancels what still runs.

    Raises UnavailableError when the port is taken.
    """
    coordinator = Coordinator(config, load, router)
    with serving_metrics(coordinator.metrics, config.host, config.metrics_port):
        async with _serving(coordinator, config):
            yield coordinator


@asynccontextmanager
async def _serving(coordinator: Coordinator, config: CoordinatorConfig) -> AsyncIterator[None]:
    try:
        coordinator.port = await coordinator.server.start(config.host, config.grpc_port, SERVICES)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(coordinator.links.run()),
                group.create_task(coordinator.ended.run()),
                group.create_task(coordinator.expire_silent_workers()),
                group.create_task(coordinator.scaling.watch_states()),
            ]
            try:
                yield
            finally:
                await coordinator.close()
                for task in tasks:
                    task.cancel()
    finally:
        await coordinator.server.stop()
        coordinator.tokenizers.close()


async def serve(
    config: CoordinatorConfig,
    *,
    load: Callable[[str], Tokenizer] = load_tokenizer,
    router: Router | None = None,
) -> None:
    """Runs a coordinator until SIGTERM or SIGINT, then drains; a second signal ends the process at once.

    Raises UnavailableError when the port is taken.
    """
    stop = stop_signal()
    async with running_coordinator(config, load=load, router=router) as coordinator:
        log_event(
            "coordinator.ready",
            host=config.host,
            port=coordinator.port,
            coordinator_id=coordinator.coordinator_id,
        )
        await stop.wait()
        await coordinator.drain()
    log_event("coordinator.stopped")
