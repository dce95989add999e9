"""The coordinator's process: puts its parts together, runs them until a signal, drains."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from prometheus_client.core import Metric

from coordinator.access import Access
from coordinator.admission.gate import AdmissionGate
from coordinator.admission.metrics import admission_metrics
from coordinator.background import Background
from coordinator.circuits import Circuits
from coordinator.coordinator_metrics import coordinator_metrics
from coordinator.ended_workers import EndedWorkers
from coordinator.front_door import FrontDoor
from coordinator.inference_service import InferenceService
from coordinator.kserve.service import KserveService
from coordinator.loop_lag import LoopLag
from coordinator.model_routes import ModelRoutes, checked_route
from coordinator.openai.app import make_app
from coordinator.openai.http_server import serving_http
from coordinator.prefix_index import PrefixIndex
from coordinator.prompt import PromptTokenizers
from coordinator.pulse import Pulse
from coordinator.registry import Registry
from coordinator.registry_service import RegistryService
from coordinator.request_flow import RequestFlow
from coordinator.route_planner import make_router
from coordinator.routes_service import RoutesService
from coordinator.routing import Router
from coordinator.scaling_service import ScalingService
from coordinator.signal_book import SignalBook
from coordinator.worker_links import WorkerLinks
from splitserve.collector import relax_collector
from splitserve.config import CoordinatorConfig
from splitserve.hf_tokenizer import load_tokenizer
from splitserve.kserve import open_inference_pb2
from splitserve.kserve.open_inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from splitserve.logs import log_event
from splitserve.metrics import gauge, serving_metrics
from splitserve.rpc import RpcServer, make_server
from splitserve.stop_signal import stop_signal
from splitserve.tokenizer import Tokenizer
from splitserve.v1 import inference_pb2, registry_pb2, routes_pb2, scaling_pb2
from splitserve.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from splitserve.v1.registry_pb2_grpc import add_RegistryServiceServicer_to_server
from splitserve.v1.routes_pb2_grpc import add_RoutesServiceServicer_to_server
from splitserve.v1.scaling_pb2_grpc import add_ScalingServiceServicer_to_server

CLEANUP_GRACE_S = 3.0
SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    registry_pb2.DESCRIPTOR.services_by_name["RegistryService"].full_name,
    scaling_pb2.DESCRIPTOR.services_by_name["ScalingService"].full_name,
    routes_pb2.DESCRIPTOR.services_by_name["RoutesService"].full_name,
    open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name,
)


class Coordinator:
    """The running parts of one coordinator; `running_coordinator` makes one."""

    def __init__(
        self, config: CoordinatorConfig, load: Callable[[str], Tokenizer], router: Router | None
    ) -> None:
        self.coordinator_id = str(uuid.uuid4())
        self.port = 0
        self.cluster_port: int | None = None
        self.http_port: int | None = None
        self.config = config
        self.access = Access(config)
        self.background = Background()
        self.registry = Registry(config.heartbeat_timeout_s, PrefixIndex(config.max_indexed_blocks))
        self.ended = EndedWorkers(self.registry)
        self.tokenizers = PromptTokenizers(load, config.tokenizer_threads)
        self.pulse = Pulse(config.max_coalesce_ms / 1e3)
        self.links = WorkerLinks(
            self.registry,
            self.background,
            self.coordinator_id,
            config.max_message_bytes,
            self.access.security,
            self.pulse,
        )
        self.book = SignalBook()
        self.lag = LoopLag()
        self.admission: AdmissionGate | None = None
        if config.admission.mode == "queue":
            self.admission = AdmissionGate(config, self.registry, self.book)
        shares = config.model_routes.items()
        routes = [checked_route(name, weights, f"model_routes.{name}") for name, weights in shares]
        self.routes = ModelRoutes(self.registry, routes, config.direct_model_names == "allow")
        self.circuits = Circuits(self.registry, config.circuit_breaker)
        flow = RequestFlow(
            config,
            self.registry,
            router or make_router(config.routing),
            self.links,
            self.tokenizers,
            self.background,
            self.book,
            gates=[] if self.admission is None else [self.admission],
            quotas=self.access.gates,
            routes=self.routes,
            circuits=self.circuits,
        )
        self.door = FrontDoor(
            flow,
            self.registry,
            self.tokenizers,
            self.background,
            self.book,
            self.access.authenticator,
            config.max_running_requests,
            self.routes,
        )
        self.server: RpcServer = make_server(
            max_message_bytes=config.max_message_bytes, guard=self.access.guard
        )
        inference = InferenceService(self.door, self.access)
        add_InferenceServiceServicer_to_server(inference, self.server.grpc_server)
        self.kserve = KserveService(self.door, self.access)
        add_GRPCInferenceServiceServicer_to_server(self.kserve, self.server.grpc_server)
        routing = RoutesService(self.routes, self.registry, self.access, self.coordinator_id)
        add_RoutesServiceServicer_to_server(routing, self.server.grpc_server)
        members = RegistryService(self.registry, self.coordinator_id, self.tokenizers.tokenizer)
        add_RegistryServiceServicer_to_server(members, self.server.grpc_server)
        self.scaling = ScalingService(self.registry, self.book, self.coordinator_id, self.access)
        add_ScalingServiceServicer_to_server(self.scaling, self.server.grpc_server)

    async def expire_silent_workers(self) -> None:
        """Drops workers that do not report in time, until cancelled."""
        while True:
            await asyncio.sleep(self.config.heartbeat_timeout_s / 4)
            self.registry.expire(time.monotonic())

    def metrics(self) -> list[Metric]:
        """What the Prometheus endpoint shows, at this moment."""
        figures = coordinator_metrics(self.registry.snapshot(), self.door.running, self.book.models())
        queue = admission_metrics(self.admission.counts()) if self.admission is not None else []
        blocks = gauge(
            "splitserve_prefix_index_blocks", "KV blocks known by their holders", len(self.registry.prefixes)
        )
        return [*figures, *queue, blocks, self.lag.metric(), *self.access.metrics()]

    async def listen(self) -> None:
        """Binds and starts serving; with TLS also at the port for the cluster's own parts."""
        config, tls = self.config, self.access.security.tls
        self.access.warn_if_open(config.host)
        if tls is not None:
            port = config.grpc_port + 1 if config.grpc_port else 0
            port = port if config.cluster_port is None else config.cluster_port
            self.cluster_port = self.server.listen(config.host, port, tls, mutual=True)
        self.port = await self.server.start(config.host, config.grpc_port, SERVICES, tls=tls, mutual=False)

    @asynccontextmanager
    async def serving_http(self) -> AsyncIterator[None]:
        """Serves the OpenAI-compatible API while the context is open, where a port for it is set."""
        config = self.config
        if config.http_port is None:
            yield
            return
        app = make_app(self.door, self.metrics, config.max_message_bytes)
        async with serving_http(app, config.host, config.http_port, self.access.security.tls) as port:
            self.http_port = port
            yield

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
    with serving_metrics(
        coordinator.metrics, config.host, config.metrics_port, coordinator.access.security.tls
    ):
        async with _serving(coordinator, config):
            yield coordinator


@asynccontextmanager
async def _serving(coordinator: Coordinator, config: CoordinatorConfig) -> AsyncIterator[None]:
    try:
        await coordinator.listen()
        async with coordinator.serving_http(), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(coordinator.links.run()),
                group.create_task(coordinator.ended.run()),
                group.create_task(coordinator.circuits.run()),
                group.create_task(coordinator.expire_silent_workers()),
                group.create_task(coordinator.scaling.watch_states()),
                group.create_task(coordinator.access.follow_files()),
                group.create_task(coordinator.lag.watch()),
                group.create_task(coordinator.pulse.watch()),
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
            cluster_port=coordinator.cluster_port,
            http_port=coordinator.http_port,
            coordinator_id=coordinator.coordinator_id,
        )
        relax_collector()
        await stop.wait()
        await coordinator.drain()
    log_event("coordinator.stopped")
