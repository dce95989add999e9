"""What distinguishes kinds of worker, and what a worker process gives them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import grpc
from prometheus_client.core import Metric

from engine.core.engine import Engine
from engine.worker.build import EngineParts
from engine.worker.engine_thread import KvConnector
from kv_transfer.transports.transport import TransferEndpoint
from splitserve.config.worker import WorkerConfig
from splitserve.rpc.carried_calls import CarriedMethod
from splitserve.security.tls import Role
from splitserve.tracing.finished_span import SpanSink
from splitserve.v1 import registry_pb2

C = TypeVar("C", bound=KvConnector)
C_co = TypeVar("C_co", bound=KvConnector, covariant=True)
T = TypeVar("T")

POOL_NAMES: dict[registry_pb2.Pool.ValueType, str] = {
    registry_pb2.POOL_PREFILL: "prefill",
    registry_pb2.POOL_DECODE: "decode",
}


class EngineCalls(Protocol[C_co]):
    """Calls into the engine thread; see `EngineThread`."""

    async def call(self, fn: Callable[[Engine, C_co], T]) -> T:
        """See `EngineThread.call`."""
        ...

    def post(self, fn: Callable[[Engine, C_co], object]) -> None:
        """See `EngineThread.post`."""


class WorkerHost(Protocol[C_co]):
    """What a role and its services have of the process that they run in. Used on the event loop."""

    config: WorkerConfig

    @property
    def epoch(self) -> int:
        """This boot's number. A worker that has slept is another boot."""
        ...

    @property
    def spans(self) -> SpanSink | None:
        """Takes the spans of traced requests; None: they are not exported."""
        ...

    @property
    def engine(self) -> EngineCalls[C_co]:
        """The engine thread."""
        ...

    @property
    def parts(self) -> EngineParts:
        """The engine's parts, once it is built."""
        ...

    @property
    def connector(self) -> C_co:
        """The role's connector, once the engine is built. Its methods are for the engine thread, but for `status`."""
        ...

    def require_accepting(self) -> None:
        """Raises UnavailableError (DRAINING, SLEEPING) while the worker takes no new requests."""

    def service_idle(self) -> None:
        """Called on the event loop when a service has no call in progress any more."""

    def ticket_rejected(self) -> None:
        """Counts a ticket that a service has rejected."""

    def report_now(self) -> None:
        """Sends a load report to every coordinator without waiting for the heartbeat."""


class WorkerRole(ABC, Generic[C]):
    """What distinguishes kinds of worker. Used on the event loop, but for `make_connector`."""

    certificate: Role
    """The role that its certificate must have."""
    neutral: bool = False
    """Whether it serves both pools."""
    trades_prefixes: bool = False
    """Whether it serves its own pool, and for prefixes the other one, too."""

    @property
    def service_name(self) -> str:
        """Its name in traces: prefill-worker, decode-worker, worker."""
        return "worker" if self.certificate == "worker" else f"{self.certificate}-worker"

    @property
    @abstractmethod
    def pool(self) -> registry_pb2.Pool.ValueType:
        """The pool that it is in, or leans to now."""

    @abstractmethod
    def make_connector(self, parts: EngineParts, epoch: int, on_idle: Callable[[], None]) -> C:
        """Builds the connector of the boot `epoch`; called on the engine thread. `on_idle`: see `KvConnector`."""

    @abstractmethod
    def add_services(self, server: grpc.aio.Server) -> Sequence[str]:
        """Adds the gRPC services; returns their full names."""

    @abstractmethod
    def carried_methods(self) -> Mapping[str, CarriedMethod]:
        """The methods whose calls may be carried; see `CarriedCalls`."""

    @abstractmethod
    def on_peers(self, coordinator: str, peers: Sequence[TransferEndpoint]) -> None:
        """Handles a change of a coordinator's list of workers that take KV."""

    @abstractmethod
    def on_ended_writers(self, agent_ids: Sequence[str]) -> None:
        """Handles that the processes of these writers of KV have certainly ended."""

    def on_leaning(self, coordinator: str, pool: registry_pb2.Pool.ValueType) -> None:
        """Handles that a coordinator asks the worker to lean to a pool. Only neutral workers do."""

    @abstractmethod
    def busy(self) -> bool:
        """Whether requests are still in progress; a drain waits for False.

        Checked again after `WorkerProcess.service_idle` and `engine_idle`.
        """

    def metrics(self) -> list[Metric]:
        """What only this kind of worker counts."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Ends calls that would otherwise outlive a drain."""
