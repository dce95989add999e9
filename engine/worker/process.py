"""The worker process: engine thread, gRPC server, registration with coordinators, drain and exit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Generic

import psutil
from prometheus_client.core import Metric

from engine.core.engine import Engine
from engine.kv_cache.cache_events import KvEventReader
from engine.worker.build import EngineParts, build_engine
from engine.worker.engine_thread import EngineThread
from engine.worker.gpu_metrics import GpuMetrics, gpus_in_use
from engine.worker.hang_watch import CLOSE_S, DEAD_CLOSE_S, end_engine, watch_for_hangs
from engine.worker.messages import add_tier_reads, lane_report, preemption_notice, worker_load
from engine.worker.metrics import (
    registration_metrics,
    sleep_metrics,
    start_metrics,
    step_metrics,
    tier_metrics,
    work_metrics,
    worker_metrics,
)
from engine.worker.role import C, WorkerRole
from engine.worker.sleep import Sleeper, new_epoch
from engine.worker.warm_up.idle_work import use_idle_time
from engine.worker.weights.pull import weights_peer
from engine.worker.weights.service import TAKERS, WEIGHTS_SERVICE, WeightsService
from kv_transfer.transports.factory import idle_poll_s, make_transport
from kv_transfer.transports.transport import TransferEndpoint
from splitserve.client.registry_client import RegistrationStatus, RegistryClient
from splitserve.config.worker import WorkerConfig
from splitserve.errors import UnavailableError
from splitserve.logs import log_event, log_exception
from splitserve.metrics import reload_metrics, serving_metrics
from splitserve.rpc.carried_calls import CarriedCalls
from splitserve.rpc.credentials import cluster_credentials, warn_if_open
from splitserve.rpc.server import OpenRpcs, RpcServer, make_server
from splitserve.runtime.cancellation import run_beside
from splitserve.runtime.loops import LoopRunner
from splitserve.runtime.process import END_S, relax_collector, stop_signal, unless_stopped
from splitserve.runtime.reload import FileWatcher
from splitserve.security.authorizer import ANY_SERVICE
from splitserve.security.tls import Role
from splitserve.spot.source import SpotNotice
from splitserve.spot.watch import follow_notices, notice_sources
from splitserve.tracing.exporting import exporting_spans
from splitserve.tracing.finished_span import SpanSink
from splitserve.v1 import calls_pb2, kv_transfer_pb2, registry_pb2
from splitserve.v1.calls_pb2_grpc import add_CallServiceServicer_to_server

CALL_SERVICE = calls_pb2.DESCRIPTOR.services_by_name["CallService"].full_name
SERVER_GRACE_S = 2.0
CALLERS: frozenset[Role] = frozenset({"coordinator"})
"""Who may call a worker's services."""


class WorkerProcess(Generic[C]):
    """One worker process. `run` builds its engine and serves until it is stopped."""

    def __init__(self, config: WorkerConfig, make_role: Callable[[WorkerProcess[C]], WorkerRole[C]]) -> None:
        """`make_role` gets this worker; it may not use `parts` and `connector` before the engine is built."""
        self.config = config
        self.epoch = new_epoch()
        self.open_rpcs = OpenRpcs()
        self._rejected_tickets = 0
        self.draining = False
        self.notice: SpotNotice | None = None
        """That the machine is taken away; None: no notice."""
        self.spans: SpanSink | None = None
        """Takes the spans of traced requests; None: they are not exported."""
        self.engine: EngineThread[C] = EngineThread(
            self._build,
            name=f"engine-{config.worker_id}",
            hung_step_s=config.engine.hung_step_s,
        )
        self._built: tuple[EngineParts, C] | None = None
        self._loop = asyncio.get_running_loop()
        self._maybe_idle = asyncio.Event()
        self._awoken = asyncio.Event()
        self._role = make_role(self)
        self._security = cluster_credentials(self._role.certificate, config.tls, config.cluster_token_file)
        self._weights = WeightsService(self, make_transport)
        self._sleeper: Sleeper[C] = Sleeper(self, config.worker_id)
        self._address = ""
        self._registries: list[RegistryClient] = []
        self._registration_status = RegistrationStatus(config.coordinators, self.report_soon)
        self._loops = LoopRunner()
        tls = self._security.server_tls
        self._files = FileWatcher(tls.file if tls else None)
        self._process = psutil.Process()
        self._gpus = GpuMetrics(gpus_in_use(config))

    def _build(self) -> tuple[Engine, C]:
        decodes = self._role.neutral or self._role.pool == registry_pb2.POOL_DECODE
        peer = weights_peer(self.config, self._security)
        parts = build_engine(self.config, decodes=decodes, peer=peer)
        self.engine.idle_poll_s = idle_poll_s(self.config.transport, parts.endpoint.memory.memory_kind)
        connector = self._role.make_connector(parts, self.epoch, self.engine_idle)
        self._built = parts, connector
        if (tiers := parts.tiers) is not None:
            tiers.wake = lambda: self.engine.post(lambda _core, _connector: tiers.collect())
        return parts.core, connector

    def reopen(self, epoch: int) -> None:
        """See `SleepHost`."""
        parts, self._rejected_tickets = self.parts.reopened(), 0
        connector = self._role.make_connector(parts, epoch, self.engine_idle)
        self._built = parts, connector
        self.engine.replace_listener(connector)

    async def register_anew(self) -> None:
        """See `SleepHost`."""
        anew = self._registration()
        await asyncio.gather(*(registry.renew(anew) for registry in self._registries))
        self._awoken.set()

    def busy(self) -> bool:
        """Whether requests are in progress, or somebody reads the weights."""
        return self._role.busy() or self._weights.busy

    @property
    def parts(self) -> EngineParts:
        """The engine's parts, once it is built."""
        assert self._built is not None, "the engine is not built"
        return self._built[0]

    @property
    def connector(self) -> C:
        """The role's connector, once the engine is built. Its methods are for the engine thread, but for `status`."""
        assert self._built is not None, "the engine is not built"
        return self._built[1]

    def require_accepting(self) -> None:
        """Raises UnavailableError (DRAINING, SLEEPING) while the worker takes no new requests."""
        if self.draining:
            raise UnavailableError(f"worker {self.config.worker_id} is draining", reason="DRAINING")
        if self._sleeper.closed:
            raise UnavailableError(f"worker {self.config.worker_id} sleeps", reason="SLEEPING")

    def service_idle(self) -> None:
        """Called on the event loop when a service has no call in progress any more."""
        self._maybe_idle.set()

    def engine_idle(self) -> None:
        """Called on the engine thread when its connector has nothing in progress any more."""
        # The status has been published before: a drain that begins later sees it, one that has begun is woken.
        if self.draining:
            self._loop.call_soon_threadsafe(self.service_idle)

    def ticket_rejected(self) -> None:
        """Counts a ticket that a service has rejected."""
        self._rejected_tickets += 1

    def report_now(self) -> None:
        """Sends a load report to every coordinator without waiting for the heartbeat."""
        for registry in self._registries:
            registry.report_now()

    def report_soon(self) -> None:
        """The same, but not shortly after the last one."""
        for registry in self._registries:
            registry.report_soon()

    async def run(self) -> None:
        """Serves until SIGTERM or SIGINT, then drains. Raises the error that ended the engine or the registration."""
        stop, service = stop_signal(self.config.drain_s + END_S), self._role.service_name
        async with exporting_spans(self.config.tracing, service, self.config.worker_id) as self.spans:
            await self._run(stop)

    async def _run(self, stop: asyncio.Event) -> None:
        await unless_stopped(self.engine.start(), stop, patience_s=self.config.engine.stop_in_start_s)
        relax_collector()  # a full collection, with all of torch's objects, would stop the engine for 0.2 s
        authorizer = self._security.authorizer({ANY_SERVICE: CALLERS, WEIGHTS_SERVICE: TAKERS})
        server = make_server(open_rpcs=self.open_rpcs, authorizer=authorizer)
        calls = CarriedCalls(self._role.carried_methods(), self.open_rpcs)
        add_CallServiceServicer_to_server(calls, server.grpc_server)
        names = [*self._role.add_services(server.grpc_server), CALL_SERVICE, WEIGHTS_SERVICE]
        self._weights.add_to(server.grpc_server)
        warn_if_open("worker", self.config.host, authorizer.closed)
        port = await server.start(self.config.host, self.config.port, names, tls=self._security.server_tls)
        log_event(
            "worker.ready",
            worker_id=self.config.worker_id,
            port=port,
            model=self.parts.served.name,
            start=self.parts.start.logged() if self.parts.start is not None else None,
        )
        self._address = self.config.advertise_address or f"{self.config.host}:{port}"
        try:
            with serving_metrics(
                self._metrics, self.config.host, self.config.metrics_port, self._security.server_tls
            ):
                await self._serve_until(stop, server)
        finally:
            self._role.close()
            calls.close()
            # The port closes last: once it refuses connections, this process writes no more KV.
            # One that has died may hang where it lets go of a broken device.
            died = self.engine.died.done() and self.engine.died.exception() is not None
            await end_engine(self.engine.stop(), self.config.worker_id, DEAD_CLOSE_S if died else CLOSE_S)
            await server.stop(SERVER_GRACE_S)
            log_event("worker.stopped", worker_id=self.config.worker_id)

    async def _serve_until(self, stop: asyncio.Event, server: RpcServer) -> None:
        kv_events, loop = self.parts.core.kv_events, asyncio.get_running_loop()
        registered = self._registration()
        # A worker that reported an empty cache would be counted on to keep what it computes.
        read_cache = partial(KvEventReader, kv_events) if self.config.engine.prefix_cache else None
        self._registries = [
            RegistryClient(
                address,
                registered,
                report=self._report,
                on_peers=self._on_peers,
                heartbeat_s=self.config.heartbeat_s,
                on_ended=self._role.on_ended_writers,
                on_leaning=self._role.on_leaning,
                on_sleep=self._sleeper.follow,
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
        idle = partial(use_idle_time, self.engine, self.parts.idle, self._awoken)
        # Three things end the worker: an engine that died, one that cannot wake up, and coordinators none of which ever
        # took the worker in.
        await run_beside(
            self._until(stop),
            [
                *((f"registry {each.coordinator}", each.run()) for each in self._registries),
                ("engine", self._watch_engine(server)),
                ("sleeper", self._sleeper.run()),
                ("hangs", self._loops.run("hangs", hangs)),
                ("idle", self._loops.run("idle", idle)),
                ("files", self._loops.run("files", self._files.follow)),
                ("spot", self._loops.run("spot", self._watch_spot)),
            ],
        )

    async def _until(self, stop: asyncio.Event) -> None:
        await stop.wait()
        await self.drain()
        if (tiers := self.parts.tiers) is not None:
            await self.engine.call(lambda _core, _connector: tiers.flush())

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
        """At a spot notice the worker takes no new requests. It stays up: its coordinators move what cannot end in
        time, and it ends as its machine does, or by SIGTERM. Later notices count if the machine ends sooner."""
        spot = self.config.spot
        await follow_notices(spot, notice_sources(spot), self._take_notice, self.notice)

    def _take_notice(self, notice: SpotNotice) -> None:
        self.notice = notice
        left_s = round(notice.ends_s - time.monotonic(), 3)
        log_event("spot.notice", worker_id=self.config.worker_id, source=notice.source, left_s=left_s)
        self.draining = True
        self.report_now()

    async def drain(self) -> None:
        """Takes no new requests and waits until none is in progress, `drain_s` seconds at most."""
        log_event("worker.draining", worker_id=self.config.worker_id)
        self.draining = True
        self.report_now()
        with suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_s):
                while self._role.busy():
                    self._maybe_idle.clear()
                    await self._maybe_idle.wait()

    def _registration(self) -> registry_pb2.RegisterRequest:
        role, asleep = self._role, self._sleeper.asleep
        return self.parts.registration(
            self.epoch,
            self._address,
            role.pool,
            neutral=role.neutral,
            trades_prefixes=role.trades_prefixes,
            asleep=asleep,
        )

    def _report(self) -> registry_pb2.ReportRequest:
        status = self.connector.status
        load = worker_load(status.load)
        load.rss_bytes = self._process.memory_info().rss
        load.open_rpcs = self.open_rpcs.count
        load.transfers_in_flight = status.transfers_in_flight
        load.waiting_reservations = status.waiting_reservations
        add_tier_reads(load, self.parts.tiers)
        load.rejected_handoffs = self._rejected_tickets + status.completions_rejected
        return registry_pb2.ReportRequest(
            worker_id=self.config.worker_id,
            epoch=self.epoch,
            load=load,
            connected_agent_ids=[] if self._sleeper.asleep else sorted(status.usable_agents),
            draining=self.draining,
            lanes=[] if self._sleeper.asleep else [lane_report(judged) for judged in status.lanes],
            leaning=self._role.pool if self._role.neutral else registry_pb2.POOL_UNSPECIFIED,
            preemption=preemption_notice(self.notice, time.monotonic()),
            sleeping=self._sleeper.asleep,
            wake_seconds=self._sleeper.wake_s,
        )

    def _metrics(self) -> list[Metric]:
        registration = registration_metrics(self._registration_status)
        process = [self._loops.metric(), *reload_metrics(self._files.files)]
        totals = self.parts.core.step_totals
        steps = [*step_metrics(totals), *work_metrics(totals, self.parts.work, self.config.engine)]
        return [
            *start_metrics(self.parts.start),
            *sleep_metrics(self._sleeper.asleep, self._sleeper.wake_s),
            *worker_metrics(self.connector.status),
            *self._role.metrics(),
            *steps,
            *tier_metrics(self.parts.tiers),
            *self._gpus.metrics(),
            *self._weights.metrics(),
            *registration,
            *process,
        ]

    def _on_peers(self, coordinator: str, peers: list[kv_transfer_pb2.TransferEndpoint]) -> None:
        self._role.on_peers(coordinator, [TransferEndpoint.from_proto(peer) for peer in peers])
