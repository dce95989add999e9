"""The worker process: engine thread, gRPC server, registration with coordinators, drain and exit."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import grpc
import psutil
from prometheus_client.core import Metric

from engine.core.engine import Engine
from engine.kv_cache.block_pool import KvEventReader
from kv_transfer.transports.polling import PollDealer, idle_poll_s
from kv_transfer.transports.transport import TransferEndpoint
from splitserve.client.registry_client import RegistrationStatus, RegistryClient
from splitserve.config.worker import WorkerConfig
from splitserve.errors import UnavailableError
from splitserve.logs import log_event, log_exception
from splitserve.metrics import reload_metrics, serving_metrics
from splitserve.roles import ROLE_NUMBERS, PoolName
from splitserve.rpc.carried_calls import CarriedCalls, CarriedMethod
from splitserve.rpc.credentials import cluster_credentials, warn_if_open
from splitserve.rpc.server import OpenRpcs, RpcServer
from splitserve.runtime.cancellation import run_beside
from splitserve.runtime.loops import LoopRunner
from splitserve.runtime.process import END_S, relax_collector, stop_signal, unless_stopped
from splitserve.runtime.reload import FileWatcher
from splitserve.security.authorizer import ANY_SERVICE
from splitserve.security.tls import Role as CertificateRole
from splitserve.tracing.context import SpanSink
from splitserve.tracing.exporting import exporting_spans
from splitserve.v1 import calls_pb2, kv_transfer_pb2, registry_pb2
from splitserve.v1.calls_pb2_grpc import add_CallServiceServicer_to_server
from worker.build import EngineParts, build_engine
from worker.connector import KvConnector, PairedConnector
from worker.engine_thread import CLOSE_S, DEAD_CLOSE_S, EngineThread, end_engine, watch_for_hangs
from worker.gpu_metrics import GpuMetrics, gpus_in_use
from worker.messages import lane_report, preemption_notice, worker_load
from worker.metrics import registration_metrics, start_metrics, step_metrics, worker_metrics
from worker.preemption import NoticeFile, SpotNotice, follow_notices
from worker.role import Role

CALL_SERVICE = calls_pb2.DESCRIPTOR.services_by_name["CallService"].full_name
SERVER_GRACE_S = 2.0
CALLERS: frozenset[CertificateRole] = frozenset({"coordinator"})
"""The roles whose certificates may call a worker's services."""


class PoolService(ABC):
    """The service of one pool, with its end of the transfer. Used on the event loop, except for `make_connector`."""

    pool: PoolName

    @abstractmethod
    def make_connector(
        self, parts: EngineParts, epoch: int, on_idle: Callable[[], None], polls: PollDealer | None
    ) -> KvConnector:
        """Builds the connector of the boot `epoch`; called on the engine thread. `on_idle`: see `KvConnector`. `polls`:
        the polls of a connector that polls the transport for this one too; None: this one polls it itself."""

    @abstractmethod
    def add_to(self, server: grpc.aio.Server) -> str:
        """Adds the gRPC service; returns its full name."""

    @abstractmethod
    def carried_methods(self) -> Mapping[str, CarriedMethod]:
        """The methods whose calls may be carried; see `CarriedCalls`."""

    @abstractmethod
    def busy(self) -> bool:
        """Whether requests are still in progress; a drain waits for False.

        Checked again after `WorkerProcess.service_idle` and `engine_idle`.
        """

    def on_peers(self, coordinator: str, peers: Sequence[TransferEndpoint]) -> None:  # noqa: B027 (not all need it)
        """Handles a change of a coordinator's list of workers that take KV. By default nothing is done."""

    def on_ended_writers(self, agent_ids: Sequence[str]) -> None:  # noqa: B027 (not all need it)
        """Handles that these writers of KV, by agent id, have certainly ended. By default nothing is done."""

    def close(self) -> None:  # noqa: B027 (not all need it)
        """Ends calls that would otherwise outlive a drain. By default there are none."""


class WorkerProcess:
    """One worker process. `run` builds its engine and serves until it is stopped."""

    def __init__(
        self, config: WorkerConfig, make_services: Sequence[Callable[[WorkerProcess], PoolService]]
    ) -> None:
        """`make_services` build the services of both pools, prefill first, or that of the one pool of a worker that
        keeps its role. They get this worker, and may not use `parts` before the engine is built. Raises ConfigError as
        `check_role`."""
        self.config = config
        self.role = Role(config, self._on_role)
        self.epoch = secrets.randbits(63) + 1
        """The number of this boot."""
        self.open_rpcs = OpenRpcs()
        self.rejected_tickets = 0
        """Tickets that a service has rejected."""
        self.draining = False
        self.notice: SpotNotice | None = None
        """The notice that the machine is taken away; None without one."""
        self.spans: SpanSink | None = None
        """Takes the spans of traced requests; None: spans are not exported."""
        self.engine: EngineThread = EngineThread(
            self._build, name=f"engine-{config.worker_id}", hung_step_s=config.engine.hung_step_s
        )
        self._built: tuple[EngineParts, KvConnector] | None = None
        self._loop = asyncio.get_running_loop()
        self._maybe_idle = asyncio.Event()
        self._keeps_prompt_room = config.role != "decode"
        self._services = [make(self) for make in make_services]
        self._security = cluster_credentials("worker", config.tls, config.cluster_token_file)
        self._address = ""
        self._registries: list[RegistryClient] = []
        self._registration_status = RegistrationStatus(config.coordinators)
        self._loops = LoopRunner()
        tls = self._security.server_tls
        self._files = FileWatcher(tls.file if tls else None)
        self._process = psutil.Process()
        self._gpus = GpuMetrics(gpus_in_use(config))

    def _build(self) -> tuple[Engine, KvConnector]:
        parts = build_engine(self.config, self.engine.post)
        self.engine.idle_poll_s = idle_poll_s(self.config.transport, parts.endpoint.memory.memory_kind)
        self.engine.poll_interval_s = parts.transport.poll_interval_s
        connector = self._make_connector(parts, self.epoch)
        parts.core.poll_while_computing(connector.polls.poll)
        if parts.facts.pooling:
            self.role.may_change = False  # a pooling model has no KV to hand over
        elif self.role.may_change:
            parts.core.keep_prompt_room(self._keeps_prompt_room)
        self._built = parts, connector
        return parts.core, connector

    def _make_connector(self, parts: EngineParts, epoch: int) -> KvConnector:
        first, *others = self._services
        sender = first.make_connector(parts, epoch, self.engine_idle, None)
        if not others:
            return sender
        receiver = others[0].make_connector(parts, epoch, self.engine_idle, sender.polls)
        return PairedConnector(parts, sender, receiver, self.engine_idle)

    @property
    def parts(self) -> EngineParts:
        """The engine's parts, once it is built."""
        assert self._built is not None, "the engine is not built"
        return self._built[0]

    @property
    def connector(self) -> KvConnector:
        """The connector, once the engine is built. Its methods are for the engine thread, except for `status`."""
        assert self._built is not None, "the engine is not built"
        return self._built[1]

    def require_accepting(self, pool: PoolName) -> None:
        """Raises UnavailableError: WRONG_ROLE while the worker takes no new requests of this pool, DRAINING while it
        takes none at all."""
        self.role.require(pool)
        if self.draining:
            raise UnavailableError(f"worker {self.config.worker_id} is draining", reason="DRAINING")

    def service_idle(self) -> None:
        """Called on the event loop when a service has no call in progress any more."""
        self._maybe_idle.set()
        self._keep_prompt_room()

    def engine_idle(self) -> None:
        """Called on the engine thread when its connector has nothing in progress any more."""
        # The status is published already: a drain that begins later sees it, and one that has begun is woken here.
        if self.draining or (self._keeps_prompt_room and self.role.name == "decode"):
            self._loop.call_soon_threadsafe(self.service_idle)

    def report_now(self) -> None:
        """Sends a load report to every coordinator without waiting for the heartbeat."""
        for registry in self._registries:
            registry.report_now()

    def report_soon(self) -> None:
        """Sends a load report to every coordinator, but not shortly after the last report."""
        for registry in self._registries:
            registry.report_soon()

    async def run(self) -> None:
        """Serves until SIGTERM or SIGINT, then drains. Raises the error that ended the engine or the registration."""
        stop = stop_signal(self.config.drain_s + END_S)
        service = "worker" if self.config.role == "both" else f"{self.config.role}-worker"
        async with exporting_spans(self.config.tracing, service, self.config.worker_id) as self.spans:
            await self._run(stop)

    async def _run(self, stop: asyncio.Event) -> None:
        await unless_stopped(self.engine.start(), stop, patience_s=self.config.engine.stop_in_start_s)
        relax_collector()  # a full collection, with all of torch's objects, would stop the engine for 0.2 s
        authorizer = self._security.authorizer({ANY_SERVICE: CALLERS})
        server = RpcServer(open_rpcs=self.open_rpcs, authorizer=authorizer)
        methods = {
            name: method for service in self._services for name, method in service.carried_methods().items()
        }
        calls = CarriedCalls(methods, self.open_rpcs)
        add_CallServiceServicer_to_server(calls, server.grpc_server)
        names = [*(service.add_to(server.grpc_server) for service in self._services), CALL_SERVICE]
        warn_if_open("worker", self.config.host, authorizer.closed)
        port = await server.start(self.config.host, self.config.port, names, tls=self._security.server_tls)
        log_event(
            "worker.ready",
            worker_id=self.config.worker_id,
            port=port,
            model=self.parts.served.name,
            start=self.parts.start.fields() if self.parts.start is not None else None,
        )
        self._address = self.config.advertise_address or f"{self.config.host}:{port}"
        try:
            with serving_metrics(
                self._metrics, self.config.host, self.config.metrics_port, self._security.server_tls
            ):
                await self._serve_until(stop, server)
        finally:
            for service in self._services:
                service.close()
            calls.close()
            # The port closes last: once it refuses connections, this process writes no more KV. An engine that has died
            # may hang where it lets go of a broken device, and so gets less time.
            died = self.engine.died.done() and self.engine.died.exception() is not None
            await end_engine(self.engine.stop(), self.config.worker_id, DEAD_CLOSE_S if died else CLOSE_S)
            self.parts.grammars.close()
            await server.stop(SERVER_GRACE_S)
            log_event("worker.stopped", worker_id=self.config.worker_id)

    async def _serve_until(self, stop: asyncio.Event, server: RpcServer) -> None:
        kv_events, loop = self.parts.core.kv_events, asyncio.get_running_loop()
        registered = self.parts.registration(
            self.epoch, self._address, self.role.name, changes_role=self.role.may_change
        )
        # Without a prefix cache nothing is reported: coordinators would expect an empty cache to keep what is computed.
        read_cache = partial(KvEventReader, kv_events) if self.config.engine.prefix_cache else None
        self._registries = [
            RegistryClient(
                address,
                registered,
                report=self._report,
                on_peers=self._on_peers,
                heartbeat_s=self.config.heartbeat_s,
                on_ended=self._on_ended_writers,
                on_role=self.role.follow,
                security=self._security,
                read_cache=read_cache,
                status=self._registration_status,
            )
            for address in self.config.coordinators
        ]
        kv_events.subscribe(lambda: loop.call_soon_threadsafe(self.report_soon))
        hangs = partial(
            watch_for_hangs, self.engine.activity, self.config.worker_id, lambda: server.set_serving(False)
        )
        # Two errors end the worker: an engine that died, and coordinators all of which refuse the worker.
        await run_beside(
            self._until(stop),
            [
                *((f"registry {registry.coordinator}", registry.run()) for registry in self._registries),
                ("engine", self._watch_engine(server)),
                ("hangs", self._loops.run("hangs", hangs)),
                ("files", self._loops.run("files", self._files.follow)),
                ("spot", self._loops.run("spot", self._watch_spot)),
            ],
        )

    async def _until(self, stop: asyncio.Event) -> None:
        await stop.wait()
        await self.drain()

    async def _watch_engine(self, server: RpcServer) -> None:
        """If the engine thread dies, the worker ends: a supervisor restarts it, and its peers notice."""
        await asyncio.wait([self.engine.died])
        error = self.engine.died.exception()
        if error is None:
            return
        log_exception("engine.died", error, worker_id=self.config.worker_id)
        await server.set_serving(False)
        message = f"the engine has ended: {type(error).__name__}: {error}"
        raise UnavailableError(message, reason="ENGINE_DIED") from error

    async def _watch_spot(self) -> None:
        """At a spot notice the worker takes no new requests. It stays up: its coordinators move requests that cannot
        end in time, and the worker ends with its machine, or by SIGTERM. Later notices count if the machine ends
        sooner."""
        path, notice_s = self.config.spot_file, self.config.spot_notice_s
        file = NoticeFile(path, notice_s) if path is not None else None
        await follow_notices(file, notice_s, self._take_notice, self.notice)

    def _take_notice(self, notice: SpotNotice) -> None:
        self.notice = notice
        left_s = round(notice.ends_s - time.monotonic(), 3)
        log_event("notice.taken", worker_id=self.config.worker_id, source=notice.source, left_s=left_s)
        self.draining = True
        self.report_now()

    async def drain(self) -> None:
        """Takes no new requests and waits until none is in progress, `drain_s` seconds at most."""
        log_event("worker.draining", worker_id=self.config.worker_id)
        self.draining = True
        self.report_now()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_s):
                while any(service.busy() for service in self._services):
                    self._maybe_idle.clear()
                    await self._maybe_idle.wait()

    def _report(self) -> registry_pb2.ReportRequest:
        status = self.connector.status
        load = worker_load(status.load)
        load.rss_bytes = self._process.memory_info().rss
        load.open_rpcs = self.open_rpcs.count
        load.transfers_in_flight = status.transfers_in_flight
        load.waiting_reservations = status.waiting_reservations
        load.rejected_handoffs = self.rejected_tickets + status.completions_rejected
        return registry_pb2.ReportRequest(
            worker_id=self.config.worker_id,
            epoch=self.epoch,
            load=load,
            connected_agent_ids=sorted(status.usable_agents),
            draining=self.draining,
            lanes=[lane_report(judged) for judged in status.lanes],
            role=ROLE_NUMBERS[self.role.name],
            preemption=preemption_notice(self.notice, time.monotonic()),
        )

    def _metrics(self) -> list[Metric]:
        registration = registration_metrics(self._registration_status)
        process = [self._loops.metric(), *reload_metrics(self._files.files)]
        return [
            *start_metrics(self.parts.start),
            *worker_metrics(self.connector.status),
            *self.role.metrics(),
            *step_metrics(self.parts.core.step_totals),
            *self._gpus.metrics(),
            *registration,
            *process,
        ]

    def _on_peers(self, coordinator: str, peers: list[kv_transfer_pb2.TransferEndpoint]) -> None:
        endpoints = [TransferEndpoint.from_proto(peer) for peer in peers]
        for service in self._services:
            service.on_peers(coordinator, endpoints)

    def _on_ended_writers(self, agent_ids: Sequence[str]) -> None:
        for service in self._services:
            service.on_ended_writers(agent_ids)

    def _on_role(self) -> None:
        self._keep_prompt_room()
        self.report_soon()

    def _keep_prompt_room(self) -> None:
        """Makes reservations leave room for prompts as long as prompts may come or are under way here: otherwise two
        workers that hand prompts to each other could wait for each other's blocks."""
        keeps = self.role.name != "decode" or any(
            service.pool == "prefill" and service.busy() for service in self._services
        )
        if keeps != self._keeps_prompt_room:
            self._keeps_prompt_room = keeps
            self.engine.post(lambda core: core.keep_prompt_room(keeps))
