"""The process around an engine: engine thread, gRPC server, registry clients, drain and exit."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Generic, TypeVar

import grpc
import psutil
from prometheus_client.core import Metric

from engine import watchdog
from engine.build import EngineParts, build_engine
from engine.cache_log import CacheSession
from engine.core import EngineCore
from engine.messages import lane_report, worker_load
from engine.thread import EngineThread, StepListener
from engine.types import EngineLoad
from engine.worker_metrics import worker_metrics
from kv_transfer.lanes import JudgedLane
from kv_transfer.select import idle_poll_s
from kv_transfer.transport import TransferEndpoint
from splitserve.call_guard import ANY_SERVICE
from splitserve.collector import relax_collector
from splitserve.config import WorkerConfig
from splitserve.errors import UnavailableError
from splitserve.logs import log_event
from splitserve.metrics import serving_metrics
from splitserve.part_security import part_security, warn_if_open
from splitserve.registry_client import RegistryClient
from splitserve.rpc import OpenRpcs, make_server
from splitserve.stop_signal import stop_signal
from splitserve.tls import Role
from splitserve.v1 import kv_transfer_pb2, registry_pb2

IDLE_POLL_S = 0.05
SERVER_GRACE_S = 2.0
ROLES: Mapping[registry_pb2.Pool.ValueType, Role] = {
    registry_pb2.POOL_PREFILL: "prefill",
    registry_pb2.POOL_DECODE: "decode",
}
CALLERS: frozenset[Role] = frozenset({"coordinator"})
"""Who may call a worker's services."""


class RoleListener(StepListener, ABC):
    """The part of a worker that lives on the engine thread; see `engine.thread.StepListener`.

    `load` and the numbers are replaced, never changed in place, so that
    the event loop may read them at any time.
    """

    load: EngineLoad = EngineLoad()
    transfers_in_flight: int = 0
    waiting_reservations: int = 0
    rejected_handoffs: int = 0
    lanes: tuple[JudgedLane, ...] = ()
    handoffs_completed: int = 0
    handoff_bytes: int = 0
    handoffs_rejected: Mapping[str, int] = MappingProxyType({})
    """Handoffs that failed or were refused, by reason."""
    endpoint: TransferEndpoint


L = TypeVar("L", bound=RoleListener)


class WorkerRole(ABC, Generic[L]):
    """What makes a worker a prefill or a decode worker."""

    pool: registry_pb2.Pool.ValueType

    @abstractmethod
    def make_listener(self, parts: EngineParts, epoch: int) -> L:
        """Builds the engine-thread side; called on that thread. `epoch` is this boot's."""

    @abstractmethod
    def add_services(self, server: grpc.aio.Server, worker: WorkerHost[L]) -> Sequence[str]:
        """Adds the gRPC services; returns their full names."""

    @abstractmethod
    def on_peers(self, coordinator: str, peers: Sequence[TransferEndpoint]) -> None:
        """A coordinator's list of decode pools has changed."""

    @abstractmethod
    def on_ended_writers(self, agent_ids: Sequence[str]) -> None:
        """The processes of these prefill workers have ended for certain."""

    @abstractmethod
    def rejected_handoffs(self) -> int:
        """Tickets and completions refused since the start."""

    @abstractmethod
    def connected_agents(self) -> Sequence[str]:
        """Agent ids that KV can be written to now."""

    @abstractmethod
    def busy(self) -> bool:
        """Whether requests are still in progress; a drain waits for False."""

    @abstractmethod
    def close(self) -> None:
        """Ends calls that would otherwise outlive a drain."""


class WorkerHost(Generic[L]):
    """One worker process: built by `run_worker`, handed to the role's services."""

    def __init__(self, config: WorkerConfig, role: WorkerRole[L]) -> None:
        self.config = config
        self.epoch = secrets.randbits(63) + 1
        self.open_rpcs = OpenRpcs()
        self.draining = False
        self.engine: EngineThread[L] = EngineThread(
            self._build, name=f"engine-{config.worker_id}", idle_poll_s=idle_poll_s(config.transport)
        )
        self._role = role
        self._security = part_security(ROLES[role.pool], config.tls, config.cluster_token_file)
        self._registries: list[RegistryClient] = []
        self._process = psutil.Process()

    def _build(self) -> tuple[EngineCore, L]:
        parts = build_engine(self.config)
        self.parts = parts
        self.listener = self._role.make_listener(parts, self.epoch)
        return parts.core, self.listener

    def require_accepting(self) -> None:
        """Raises UnavailableError (DRAINING) once the worker takes no new requests."""
        if self.draining:
            raise UnavailableError(f"worker {self.config.worker_id} is draining", reason="DRAINING")

    def report_now(self) -> None:
        """Sends a load report to every coordinator without waiting for the heartbeat."""
        for registry in self._registries:
            registry.poke()

    def _report_soon(self) -> None:
        for registry in self._registries:
            registry.poke_soon()

    async def run(self) -> None:
        """Serves until SIGTERM or SIGINT, then drains. Raises what broke the engine or the registration."""
        stop = stop_signal()
        await self.engine.start()
        relax_collector()  # a look at all that torch brings along would stop the engine for a fifth of a second
        guard = self._security.guard({ANY_SERVICE: CALLERS})
        server = make_server(open_rpcs=self.open_rpcs, guard=guard)
        names = self._role.add_services(server.grpc_server, self)
        warn_if_open("worker", self.config.host, guard.closed)
        port = await server.start(self.config.host, self.config.port, names, tls=self._security.tls)
        log_event("worker.ready", worker_id=self.config.worker_id, port=port, model=self.parts.served.name)
        address = self.config.advertise_address or f"{self.config.host}:{port}"
        try:
            with serving_metrics(
                self._metrics, self.config.host, self.config.metrics_port, self._security.tls
            ):
                await self._serve_until(stop, self._registration(address))
        finally:
            self._role.close()
            # The port closes last: once it refuses connections, nothing of this process writes any more.
            await self.engine.stop()
            await server.stop(SERVER_GRACE_S)
            log_event("worker.stopped", worker_id=self.config.worker_id)

    async def _serve_until(self, stop: asyncio.Event, registration: registry_pb2.RegisterRequest) -> None:
        cache_log, loop = self.parts.core.cache_log, asyncio.get_running_loop()
        self._registries = [
            RegistryClient(
                address,
                registration,
                report=self._report,
                on_peers=self._on_peers,
                heartbeat_s=self.config.heartbeat_s,
                on_ended=self._role.on_ended_writers,
                security=self._security,
                read_cache=lambda: CacheSession(cache_log),
            )
            for address in self.config.coordinators
        ]
        cache_log.tell(lambda: loop.call_soon_threadsafe(self._report_soon))
        async with asyncio.TaskGroup() as group:
            background = [group.create_task(registry.run()) for registry in self._registries]
            background.append(group.create_task(self._watch_engine()))
            hanging_s = self.engine.between_steps_s
            background.append(group.create_task(watchdog.watch(hanging_s, self.config.worker_id)))
            await stop.wait()
            await self._drain()
            for task in background:
                task.cancel()

    async def _watch_engine(self) -> None:
        # An engine thread that died takes the worker down: a supervisor restarts it, peers see it gone.
        await asyncio.shield(self.engine.died)

    async def _drain(self) -> None:
        log_event("worker.draining", worker_id=self.config.worker_id)
        self.draining = True
        self.report_now()
        deadline = time.monotonic() + self.config.drain_s
        while self._role.busy() and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(IDLE_POLL_S)  # what it asks about lives on the engine thread

    def _registration(self, address: str) -> registry_pb2.RegisterRequest:
        engine, facts = self.config.engine, self.parts.runner.facts
        return registry_pb2.RegisterRequest(
            worker_id=self.config.worker_id,
            epoch=self.epoch,
            pool=self._role.pool,
            address=address,
            model=registry_pb2.ServedModel(
                name=self.parts.served.name,
                tokenizer_source=self.parts.served.tokenizer_source,
                context_tokens=min(facts.context_tokens, engine.context_tokens or facts.context_tokens),
                vocabulary_size=facts.vocabulary_size,
                eos_token_ids=sorted(facts.eos_token_ids),
            ),
            endpoint=self.listener.endpoint.to_proto(),
            max_step_tokens=self.parts.core.max_step_tokens,
            max_running_requests=engine.max_running_requests,
            standby=self.config.standby,
        )

    def _report(self) -> registry_pb2.ReportRequest:
        load = worker_load(self.listener.load)
        load.rss_bytes = self._process.memory_info().rss
        load.open_rpcs = self.open_rpcs.count
        load.transfers_in_flight = self.listener.transfers_in_flight
        load.waiting_reservations = self.listener.waiting_reservations
        load.rejected_handoffs = self._role.rejected_handoffs()
        return registry_pb2.ReportRequest(
            worker_id=self.config.worker_id,
            epoch=self.epoch,
            load=load,
            connected_agent_ids=self._role.connected_agents(),
            draining=self.draining,
            lanes=[lane_report(judged) for judged in self.listener.lanes],
        )

    def _metrics(self) -> list[Metric]:
        listener = self.listener
        return worker_metrics(
            listener.load,
            listener.lanes,
            listener.handoffs_completed,
            listener.handoff_bytes,
            listener.handoffs_rejected,
        )

    def _on_peers(self, coordinator: str, peers: list[kv_transfer_pb2.TransferEndpoint]) -> None:
        self._role.on_peers(coordinator, [TransferEndpoint.from_proto(peer) for peer in peers])
