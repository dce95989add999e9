"""The coordinator process: builds its parts, runs them until a signal, drains. The composition root."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from prometheus_client.core import Metric

from coordinator.admission.controller import CapacityAdmission
from coordinator.background_tasks import BackgroundTasks
from coordinator.entrypoints.grpc_services import SERVICES, add_services
from coordinator.entrypoints.http.server import serving_http
from coordinator.entrypoints.inference_api import InferenceApi
from coordinator.entrypoints.inference_service import InferenceService
from coordinator.entrypoints.input_limits import InputLimits
from coordinator.entrypoints.kserve.service import KserveService
from coordinator.entrypoints.openai.app import make_app
from coordinator.entrypoints.page.endpoints import PageEndpoints, page_endpoints
from coordinator.entrypoints.trace_sampler import TraceSampler
from coordinator.health.breaker_registry import CircuitBreakerRegistry
from coordinator.health.failure_detector import FailureDetector
from coordinator.input_processor import InputProcessor
from coordinator.leanings.leaning_loop import LeaningLoop
from coordinator.metrics.event_loop import LoopLag
from coordinator.metrics.prometheus import admission_metrics, coordinator_metrics
from coordinator.metrics.scaling_service import ScalingService
from coordinator.metrics.stats import RequestStats
from coordinator.metrics.tenant_metrics import tenant_metrics
from coordinator.models.model_routes import configured_routes
from coordinator.models.routes_service import RoutesService
from coordinator.models.tokenizers import PromptTokenizers
from coordinator.peer_fetch.fetcher import PrefixFetcher
from coordinator.peer_fetch.seeder import Seeder
from coordinator.quality.watch import QualityWatch, quality_watch
from coordinator.records.explanation import Explainer
from coordinator.records.record_keeper import RecordKeeper
from coordinator.records.tenant_costs import tenant_costs
from coordinator.records.traffic_stream import TrafficStream
from coordinator.request.estimates import Estimates
from coordinator.request_flow import RequestFlow
from coordinator.routing.pair_selector import make_router
from coordinator.routing.router import Router
from coordinator.spot.mover import SpotMover
from coordinator.tenants.access_control import AccessControl
from coordinator.workers.clients import WorkerClients
from coordinator.workers.output_collector import OutputCoalescer
from coordinator.workers.prefix_index.index import PrefixIndex
from coordinator.workers.registry import Registry
from coordinator.workers.registry_service import RegistryService
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.generation.grammar import load_compiler
from splitserve.logs import log_event
from splitserve.metrics import gauge, reload_metrics, serving_metrics
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.models.tokenizer import Tokenizer
from splitserve.rpc.server import LISTENERS, RpcServer, make_server
from splitserve.runtime.calls.parser_thread import ParserThread, favor_event_loop
from splitserve.runtime.cancellation import end_tasks
from splitserve.runtime.loops import LoopRunner
from splitserve.runtime.process import END_S, connections_that_fit, relax_collector, stop_signal
from splitserve.runtime.reload import FileWatcher
from splitserve.tracing.exporting import exporting_spans
from splitserve.tracing.finished_span import SpanSink

CLEANUP_GRACE_S = 3.0
"""How long shutdown waits for requests to unwind and for aborts to reach the workers."""


class Coordinator:
    """The running parts of one coordinator; `running_coordinator` makes one."""

    def __init__(
        self,
        config: CoordinatorConfig,
        load: Callable[[str], Tokenizer],
        router: Router | None,
        coordinator_id: str,
        spans: SpanSink | None = None,
    ) -> None:
        self.coordinator_id = coordinator_id
        self.port = 0
        self.cluster_port: int | None = None
        self.http_port: int | None = None
        self.config = config
        self.access = AccessControl(config)
        self.background = BackgroundTasks()
        prefixes, trade = PrefixIndex(config.max_indexed_blocks), config.peer_fetch == "on"
        self.registry = Registry(config.heartbeat_timeout_s, prefixes, trade=trade)
        self.loops = LoopRunner()
        self.failure_detector = FailureDetector(self.registry, self.loops)
        self.tokenizers = PromptTokenizers(load, config.tokenizer_threads, config.tokenizers)
        self.stats = RequestStats(config.long_prompt_tokens)
        self.estimates = Estimates(self.registry)
        self.breakers = CircuitBreakerRegistry(self.registry, config.circuit_breaker)
        self.costs = tenant_costs(self.access.tenants, config.prices)
        self.records = RecordKeeper(config.records, spans, self.costs.add if self.costs else None)
        self.traffic = TrafficStream(self.coordinator_id)
        self.routes = configured_routes(config, self.registry)
        self.files = self._followed_files()
        coalescer = OutputCoalescer(config.max_coalesce_ms / 1e3)
        self.loop_lag = LoopLag(coalescer.on_sample)
        self.clients = WorkerClients(
            self.registry,
            self.background,
            self.coordinator_id,
            config.max_message_bytes,
            self.access.security,
            coalescer,
            self.loops,
        )
        self.fetcher = PrefixFetcher(config, self.registry, self.clients, self.background)
        self.seeder = Seeder(self.registry, self.fetcher, self.background)
        self.spot, self.quality = SpotMover(config.spot, self.registry, self.clients), self._quality_watch()
        self.admission = self._capacity_admission()
        self.parser = ParserThread()
        self.limits = InputLimits(self.registry.known_models, config.max_message_bytes)
        self.api = self._inference_api(router or make_router(config.routing))
        self.server: RpcServer = make_server(
            max_message_bytes=config.max_message_bytes,
            authorizer=self.access.guard,
            limit_of=self.limits.limit_of,
            max_connections=config.max_connections,
        )
        ended = self.failure_detector.report_ended
        self.scaling = ScalingService(
            self.registry, self.stats, self.estimates, self.coordinator_id, self.access, ended
        )
        self.explainer = Explainer(self.records, self.registry, config.routing)
        self.page = self._page_endpoints()
        self._add_services()

    def _quality_watch(self) -> QualityWatch:
        parts = self.tokenizers, self.clients, self.background
        return quality_watch(self.config.quality, self.registry, *parts)

    def _capacity_admission(self) -> CapacityAdmission | None:
        queues = self.config.admission.mode == "queue"
        return CapacityAdmission(self.config, self.registry, self.stats.set_held) if queues else None

    def _page_endpoints(self) -> PageEndpoints | None:
        queues = self.admission.counts if self.admission is not None else dict
        parts = (self.registry, self.stats, queues, self.records, self.explainer, self.scaling)
        return page_endpoints(self.config, self.api, *parts)

    def _followed_files(self) -> FileWatcher:
        routes, access = self.config.model_routes_file, self.access
        return FileWatcher(
            self.routes.follow(routes) if routes else None,
            access.tenants.file if access.tenants else None,
            self.costs.file if self.costs else None,
            access.security.server_tls.file if access.security.server_tls else None,
        )

    def _inference_api(self, router: Router) -> InferenceApi:
        flow = RequestFlow(
            self.config,
            self.registry,
            router,
            self.clients,
            InputProcessor(self.config, self.registry, self.routes, self.tokenizers),
            self.background,
            self.stats,
            self.estimates,
            self.breakers,
            self.records,
            self.traffic.recorder,
            self.fetcher if self.config.peer_fetch == "on" else None,
            quota_plugins=self.access.quota_plugins,
            capacity_plugins=[] if self.admission is None else [self.admission],
            observers=[self.spot.running],
        )
        return InferenceApi(
            flow,
            self.registry,
            self.tokenizers,
            self.background,
            self.stats,
            self.access.authenticator,
            self.config.max_running_requests,
            self.routes,
            self.limits,
            self.parser,
            TraceSampler(self.config.tracing),
        )

    def _add_services(self) -> None:
        """Registers the servicers of all gRPC services on the server."""
        routes = RoutesService(self.routes, self.registry, self.access, self.coordinator_id)
        registry = RegistryService(
            self.registry, self.coordinator_id, self.tokenizers.tokenizer, mutual=self.access.guard.mutual
        )
        inference = InferenceService(self.api, self.access, self.explainer, self.traffic)
        self.kserve = KserveService(self.api, self.access)
        add_services(self.server.grpc_server, inference, self.kserve, routes, registry, self.scaling)

    def background_loops(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """What runs beside the servers for as long as they do, by name."""
        return {
            "clients": self.clients.run,
            "failure_detector": self.failure_detector.run,
            "circuit_breakers": self.breakers.run,
            "expiry": self.expire_silent_workers,
            "worker_states": self.scaling.watch_states,
            "leanings": LeaningLoop(self.config, self.registry, lambda model: self.stats.of(model).held).run,
            "files": self.files.follow,
            "loop_lag": self.loop_lag.watch,
            **({"page": self.page.sample} if self.page is not None else {}),
            **({"seeding": self.seeder.run} if self.config.peer_fetch == "on" else {}),
            "spot": self.spot.run,
            **self.quality.loops,
        }

    async def expire_silent_workers(self) -> None:
        """Drops workers that miss the heartbeat timeout, until cancelled.

        A coordinator that was stopped for a while has not heard its workers; they have not been silent.
        """
        every_s = min(1.25, self.config.heartbeat_timeout_s / 4)  # a plan ends at such a look, too
        while True:
            due_s = time.monotonic() + every_s
            await asyncio.sleep(every_s)
            now = time.monotonic()
            self.registry.expire(now, absent_s=max(0.0, now - due_s))

    def metrics(self) -> list[Metric]:
        """The current values of all metrics, for a Prometheus scrape."""
        requests = coordinator_metrics(self.registry.snapshot(), self.api.running, self.stats.models())
        queue = admission_metrics(self.admission.counts()) if self.admission is not None else []
        tenants = tenant_metrics(self.access.tenants) if self.access.tenants else []
        costs = self.costs.metrics() if self.costs else []
        process = [*self.loop_lag.metrics(), self.loops.metric(), *reload_metrics(self.files.files)]
        watches = [*self.fetcher.metrics(), *self.quality.metrics(), *self.spot.metrics()]
        blocks = gauge("splitserve_prefix_index_blocks", "KV blocks known", len(self.registry.prefixes))
        return [*requests, *queue, blocks, *process, *tenants, *costs, *watches]

    async def listen(self) -> None:
        """Binds and starts serving. With TLS, also listens on the cluster port, which requires client certificates."""
        config, tls = self.config, self.access.security.server_tls
        self.access.warn_if_open(config.host)
        if tls is not None:
            port = config.grpc_port + 1 if config.grpc_port else 0
            port = port if config.cluster_port is None else config.cluster_port
            self.cluster_port = self.server.listen(config.host, port, tls, mutual=True)
        self.port = await self.server.start(config.host, config.grpc_port, SERVICES, tls=tls, mutual=False)

    @asynccontextmanager
    async def serving_http(self) -> AsyncIterator[None]:
        """Serves the OpenAI-compatible API while the context is open, if `http_port` is set."""
        config = self.config
        if config.http_port is None:
            yield
            return
        app = make_app(self.api, self.metrics, self.page.paths if self.page is not None else ())
        most = connections_that_fit(config.max_connections, LISTENERS)
        tls = self.access.security.server_tls
        async with serving_http(app, config.host, config.http_port, tls, most) as port:
            self.http_port = port
            yield

    async def drain(self) -> None:
        """Refuses new requests and waits up to `drain_s` for the running ones. Workers stay connected, so that a
        running request can still be resumed on another pair.
        """
        log_event("coordinator.draining", running_requests=self.api.running)
        self.api.draining = True
        await self.server.set_serving(False)
        await self._idle(self.config.drain_s)

    async def close(self) -> None:
        """Ends running requests, lets their aborts reach the workers, stops the server. Idempotent."""
        self.api.end_all()
        await self._idle(CLEANUP_GRACE_S)
        # Before the server: stopping it breaks the report streams, which drops the workers and their clients.
        await self.background.close(CLEANUP_GRACE_S)
        await self.server.stop()

    async def _idle(self, wait_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self.api.idle.wait()


@asynccontextmanager
async def running_coordinator(
    config: CoordinatorConfig,
    *,
    load: Callable[[str], Tokenizer] = load_tokenizer,
    router: Router | None = None,
) -> AsyncIterator[Coordinator]:
    """A coordinator that serves while the context is open; leaving it cancels running requests.

    Raises UnavailableError when a port is taken.
    """
    coordinator_id = str(uuid.uuid4())
    async with exporting_spans(config.tracing, "coordinator", coordinator_id) as spans:
        coordinator = Coordinator(config, load, router, coordinator_id, spans)
        tls = coordinator.access.security.server_tls
        with serving_metrics(coordinator.metrics, config.host, config.metrics_port, tls):
            async with _serving(coordinator, config):
                yield coordinator


@asynccontextmanager
async def _serving(coordinator: Coordinator, config: CoordinatorConfig) -> AsyncIterator[None]:
    try:
        await coordinator.listen()
        async with coordinator.serving_http(), AsyncExitStack() as ends:
            # No TaskGroup: it would wait without limit for a loop that does not end.
            run, loops = coordinator.loops.run, coordinator.background_loops().items()
            tasks = [asyncio.create_task(run(name, loop), name=name) for name, loop in loops]
            ends.push_async_callback(end_tasks, tasks)
            ends.push_async_callback(coordinator.close)
            yield
    finally:
        await coordinator.server.stop()
        coordinator.tokenizers.close()
        coordinator.parser.close()


async def serve(
    config: CoordinatorConfig,
    *,
    load: Callable[[str], Tokenizer] = load_tokenizer,
    router: Router | None = None,
) -> None:
    """Runs a coordinator until SIGTERM or SIGINT, then drains. A second signal ends the process at once.

    Raises UnavailableError when a port is taken.
    """
    stop = stop_signal(config.drain_s + END_S)
    load_compiler()
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
        favor_event_loop()
        await stop.wait()
        await coordinator.drain()
    log_event("coordinator.stopped")
