"""The coordinator process: builds its parts, runs them until a signal, drains. The composition root."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from importlib.util import find_spec

from prometheus_client.core import Metric

from coordinator.admission.controller import CapacityAdmission
from coordinator.canary.canary import Canary
from coordinator.canary.probe import Prober
from coordinator.entrypoints.anthropic.endpoints import MessagesEndpoints
from coordinator.entrypoints.batch.door import Door
from coordinator.entrypoints.batch.endpoints import BatchEndpoints
from coordinator.entrypoints.batch.folder import BatchFolder
from coordinator.entrypoints.batch.runner import BatchRunner
from coordinator.entrypoints.http.server import serving_http
from coordinator.entrypoints.inference_api import InferenceApi, InputLimits, TraceSampler
from coordinator.entrypoints.inference_service import InferenceService
from coordinator.entrypoints.kserve.service import KserveService
from coordinator.entrypoints.openai.app import AnswerFormats, OpenAIServing, make_app
from coordinator.entrypoints.openai.pooling import PoolingEndpoints
from coordinator.entrypoints.openai.tokenization import TokenizationEndpoints
from coordinator.entrypoints.page.endpoints import PageAccess, PageEndpoints
from coordinator.entrypoints.responses.endpoints import ResponsesEndpoints
from coordinator.health.circuit_breakers import CircuitBreakerRegistry
from coordinator.health.failure_detector import FailureDetector
from coordinator.health.notice_moves import NoticeMover
from coordinator.models.model_routes import configured_routes
from coordinator.models.routes_service import RoutesService
from coordinator.models.tokenizers import PromptTokenizers
from coordinator.request.state import Estimates
from coordinator.request_flow import InputProcessor, RequestFlow
from coordinator.routing.prefix_router import PrefixRouter
from coordinator.routing.warming import KEPT_PROMPTS, Warmer
from coordinator.telemetry.event_loop import LoopLag
from coordinator.telemetry.explanation import Explainer
from coordinator.telemetry.prometheus import admission_metrics, coordinator_metrics
from coordinator.telemetry.record_keeper import RecordKeeper
from coordinator.telemetry.request_log import RequestLog
from coordinator.telemetry.request_stats import RequestStats
from coordinator.telemetry.scaling_service import ScalingService
from coordinator.telemetry.tenant_metrics import TenantCosts, tenant_metrics
from coordinator.tenants.access_control import AccessControl
from coordinator.workers.client import BackgroundTasks, WorkerClients
from coordinator.workers.output_stream import OutputCoalescer
from coordinator.workers.prefix_index import PrefixIndex, RecentPrompts
from coordinator.workers.registry import Registry
from coordinator.workers.registry_service import RegistryService
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.grammars.processes import GrammarProcesses
from splitserve.kserve import open_inference_pb2
from splitserve.kserve.open_inference_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from splitserve.logs import log_event
from splitserve.metrics import reload_metrics, serving_metrics
from splitserve.models.hf_tokenizer import load_tokenizer
from splitserve.models.tokenizer import Tokenizer
from splitserve.rpc.server import LISTENERS, RpcServer
from splitserve.runtime.call_thread import ParserThread, favor_event_loop
from splitserve.runtime.cancellation import end_tasks
from splitserve.runtime.loops import LoopRunner
from splitserve.runtime.process import END_S, connections_that_fit, relax_collector, stop_signal
from splitserve.runtime.reload import FileWatcher
from splitserve.tracing.context import SpanSink
from splitserve.tracing.exporting import exporting_spans
from splitserve.v1 import inference_pb2, registry_pb2, routes_pb2, scaling_pb2
from splitserve.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from splitserve.v1.registry_pb2_grpc import add_RegistryServiceServicer_to_server
from splitserve.v1.routes_pb2_grpc import add_RoutesServiceServicer_to_server
from splitserve.v1.scaling_pb2_grpc import add_ScalingServiceServicer_to_server

SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    registry_pb2.DESCRIPTOR.services_by_name["RegistryService"].full_name,
    scaling_pb2.DESCRIPTOR.services_by_name["ScalingService"].full_name,
    routes_pb2.DESCRIPTOR.services_by_name["RoutesService"].full_name,
    open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name,
)
"""Full names of the gRPC services, without vLLM's."""
CLEANUP_GRACE_S = 3.0
"""How long shutdown waits for requests to unwind and for aborts to reach the workers."""
STATUS_GRACE_S = 1.0
"""How long shutdown waits for the handlers of ended requests to send their status."""


class Coordinator:
    """The running parts of one coordinator; `running_coordinator` makes one."""

    def __init__(
        self,
        config: CoordinatorConfig,
        load: Callable[[str], Tokenizer],
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
        recent = RecentPrompts(KEPT_PROMPTS if config.warm_prefixes else 0)
        self.registry = Registry(config.heartbeat_timeout_s, PrefixIndex(recent=recent))
        self.loops = LoopRunner()
        self.failure_detector = FailureDetector(self.registry, self.loops)
        self.tokenizers = PromptTokenizers(
            load, config.tokenizers, trust_templates=config.trust_request_chat_template
        )
        self.grammars = GrammarProcesses()
        self.stats = RequestStats(config.long_prompt_tokens)
        self.estimates = Estimates(self.registry)
        self.breakers = CircuitBreakerRegistry(self.registry, config.circuit_breaker)
        self.costs = TenantCosts(self.access.tenants) if self.access.tenants else None
        self.request_log = (
            RequestLog(config.request_log, config.request_log_max_bytes) if config.request_log else None
        )
        on_ended = [reader.add for reader in (self.costs, self.request_log) if reader is not None]
        self.records = RecordKeeper(config.records, spans, on_ended)
        self.batch_folder = BatchFolder(config.batch_folder) if config.batch_folder else None
        self.batches: BatchRunner | None = None
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
        self.notice_mover = NoticeMover(self.registry, self.clients)
        self.warmer = Warmer(self.registry, self.clients, config.warm_prefixes)
        prober = Prober(self.clients, self.background)
        self.canary = Canary(config.canary, self.registry, self.tokenizers, prober)
        self.admission = CapacityAdmission(config, self.registry, self.stats.set_held)
        self.parser = ParserThread()
        self.limits = InputLimits(self.registry.known_models, config.max_message_bytes)
        self.api = self._inference_api()
        self.server = RpcServer(
            max_message_bytes=config.max_message_bytes,
            authorizer=self.access.guard,
            limit_of=self.limits.limit_of,
            max_connections=config.max_connections,
        )
        ended = self.failure_detector.report_ended
        self.scaling = ScalingService(
            self.registry, self.stats, self.estimates, self.coordinator_id, self.access, ended
        )
        self.explainer = Explainer(self.records, self.registry)
        self.page = self._page_endpoints()
        self._add_services()

    def _page_endpoints(self) -> PageEndpoints | None:
        """The page at `/`; None if it is off. Raises ConfigError for a credential that cannot be used."""
        if self.config.page == "off" or self.config.http_port is None:
            return None
        return PageEndpoints(
            self.api,
            PageAccess(self.config),
            self.registry,
            self.stats,
            self.admission.counts,
            self.records,
            self.explainer,
            self.scaling,
        )

    def _followed_files(self) -> FileWatcher:
        routes, access = self.config.model_routes_file, self.access
        return FileWatcher(
            self.routes.follow(routes) if routes else None,
            access.tenants.file if access.tenants else None,
            access.security.server_tls.file if access.security.server_tls else None,
        )

    def _inference_api(self) -> InferenceApi:
        flow = RequestFlow(
            self.config,
            self.registry,
            PrefixRouter(),
            self.clients,
            InputProcessor(self.config, self.registry, self.routes, self.tokenizers, self.grammars),
            self.background,
            self.stats,
            self.estimates,
            self.breakers,
            self.records,
            tenants=self.access.tenants,
            admission=self.admission,
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
        inference = InferenceService(self.api, self.access, self.explainer)
        self.kserve = KserveService(self.api, self.access)
        server = self.server.grpc_server
        add_InferenceServiceServicer_to_server(inference, server)
        add_GRPCInferenceServiceServicer_to_server(self.kserve, server)
        add_RoutesServiceServicer_to_server(routes, server)
        add_RegistryServiceServicer_to_server(registry, server)
        add_ScalingServiceServicer_to_server(self.scaling, server)
        self.services: tuple[str, ...] = SERVICES
        if find_spec("smg_grpc_proto") is not None:  # only with an extra
            from coordinator.entrypoints.vllm.service import add_vllm_engine

            self.services = (*SERVICES, add_vllm_engine(self.api, self.access, server))

    def background_loops(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """The loops that run as long as the servers, by name."""
        return {
            "clients": self.clients.run,
            "failure_detector": self.failure_detector.run,
            "circuit_breakers": self.breakers.run,
            "expiry": self.expire_silent_workers,
            "worker_states": self.scaling.watch_states,
            "files": self.files.follow,
            "loop_lag": self.loop_lag.watch,
            **({"page": self.page.sample} if self.page is not None else {}),
            **({"batches": self.batches.run} if self.batches is not None else {}),
            "notices": self.notice_mover.run,
            **({"warming": self.warmer.run} if self.config.warm_prefixes else {}),
            **({"canary": self.canary.run} if self.canary.interval_s else {}),
        }

    async def expire_silent_workers(self) -> None:
        """Drops workers that miss the heartbeat timeout, until cancelled.

        Time in which this process did not run does not count: it could not hear its workers.
        """
        pause_s = min(
            1.25, self.config.heartbeat_timeout_s / 4
        )  # short, since `expire` ends scaling plans, too
        while True:
            due_s = time.monotonic() + pause_s
            await asyncio.sleep(pause_s)
            now = time.monotonic()
            self.registry.expire(now, absent_s=max(0.0, now - due_s))

    def metrics(self) -> list[Metric]:
        """The current values of all metrics, for a Prometheus scrape."""
        requests = coordinator_metrics(self.registry.snapshot(), self.api.running, self.stats.models())
        queue = admission_metrics(self.admission.counts())
        tenants = tenant_metrics(self.access.tenants) if self.access.tenants else []
        costs = self.costs.metrics() if self.costs else []
        process = [*self.loop_lag.metrics(), self.loops.metric(), *reload_metrics(self.files.files)]
        watches = [*self.canary.metrics(), *self.notice_mover.metrics()]
        log = self.request_log.metrics() if self.request_log is not None else []
        batches = self.batches.metrics() if self.batches is not None else []
        return [*requests, *queue, *log, *batches, *process, *tenants, *costs, *watches]

    async def listen(self) -> None:
        """Binds and starts serving. With TLS, also listens on the cluster port, which requires client certificates."""
        config, tls = self.config, self.access.security.server_tls
        self.access.warn_if_open(config.host)
        if tls is not None:
            port = config.grpc_port + 1 if config.grpc_port else 0
            port = port if config.cluster_port is None else config.cluster_port
            self.cluster_port = self.server.listen(config.host, port, tls, mutual=True)
        self.port = await self.server.start(
            config.host, config.grpc_port, self.services, tls=tls, mutual=False
        )

    @asynccontextmanager
    async def serving_http(self) -> AsyncIterator[None]:
        """Serves the OpenAI-compatible API while the context is open, if `http_port` is set."""
        config = self.config
        if config.http_port is None:
            yield
            return
        formats = AnswerFormats(self.api, config.tool_format, config.reasoning_format)
        chats = OpenAIServing(self.api, formats)
        responses, pooling = ResponsesEndpoints(self.api, chats), PoolingEndpoints(self.api, chats)
        handlers = {
            "/v1/chat/completions": chats.chat,
            "/v1/completions": chats.completion,
            "/v1/responses": responses.create,
            "/v1/embeddings": pooling.embeddings,
        }
        if self.batch_folder is not None:
            door = Door(self.api, self.access, self.admission, handlers)
            self.batches = BatchRunner(
                self.batch_folder, door, config.batch_concurrency, config.max_message_bytes
            )
        others = [
            *TokenizationEndpoints(self.api, chats).paths,
            *responses.paths,
            *pooling.paths,
            *MessagesEndpoints(self.api, chats).paths,
            *BatchEndpoints(chats, self.batches, handlers).paths,
        ]
        others += self.page.paths if self.page is not None else ()
        app = make_app(self.api, self.metrics, chats, others, frozenset(config.allowed_origins))
        most = connections_that_fit(config.max_connections, LISTENERS)
        if most < config.max_connections:
            advice = "raise the limit of open files (ulimit -n, LimitNOFILE) or lower max_connections"
            log_event("connections.limited", level=logging.WARNING, most=most, advice=advice)
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
        await _set_within(self.api.idle, self.config.drain_s)

    async def close(self) -> None:
        """Ends running requests, lets their aborts reach the workers, stops the server. Idempotent."""
        self.api.end_all()
        await _set_within(self.api.idle, CLEANUP_GRACE_S)
        # A server that stops cancels handlers, also handlers that still have to send the status of an ended request.
        await _set_within(self.server.open_rpcs.none_open, STATUS_GRACE_S)
        # Before the server stops: that breaks the report streams, which drops the workers and their clients.
        await self.background.close(CLEANUP_GRACE_S)
        await self.server.stop()
        if self.request_log is not None:
            await asyncio.to_thread(self.request_log.close)


async def _set_within(event: asyncio.Event, wait_s: float) -> None:
    """Waits for an event, up to `wait_s` seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await event.wait()


@asynccontextmanager
async def running_coordinator(
    config: CoordinatorConfig,
    *,
    load: Callable[[str], Tokenizer] = load_tokenizer,
) -> AsyncIterator[Coordinator]:
    """A coordinator that serves while the context is open; leaving it cancels running requests.

    Raises UnavailableError when a port is taken.
    """
    coordinator_id = str(uuid.uuid4())
    async with exporting_spans(config.tracing, "coordinator", coordinator_id) as spans:
        coordinator = Coordinator(config, load, coordinator_id, spans)
        tls = coordinator.access.security.server_tls
        with serving_metrics(coordinator.metrics, config.host, config.metrics_port, tls):
            async with _serving(coordinator):
                yield coordinator


@asynccontextmanager
async def _serving(coordinator: Coordinator) -> AsyncIterator[None]:
    try:
        coordinator.grammars.start()
        await coordinator.listen()
        async with coordinator.serving_http(), AsyncExitStack() as ends:
            # A TaskGroup would wait without limit for a loop that does not end.
            run, loops = coordinator.loops.run, coordinator.background_loops().items()
            tasks = [asyncio.create_task(run(name, loop), name=name) for name, loop in loops]
            ends.push_async_callback(end_tasks, tasks)
            ends.push_async_callback(coordinator.close)
            yield
    finally:
        await coordinator.server.stop()
        if coordinator.batch_folder is not None:
            await coordinator.batch_folder.close()
        coordinator.tokenizers.close()
        coordinator.grammars.close()
        coordinator.parser.close()


async def serve(config: CoordinatorConfig) -> None:
    """Runs a coordinator until SIGTERM or SIGINT, then drains. A second signal ends the process at once.

    Raises UnavailableError when a port is taken.
    """
    stop = stop_signal(config.drain_s + END_S)
    async with running_coordinator(config) as coordinator:
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
