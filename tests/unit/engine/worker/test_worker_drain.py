"""A worker's drain ends when nothing is in progress any more, and after `drain_s` at the latest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc
import pytest

from engine.core.engine_core import EngineCore
from engine.core.types import StepResult
from engine.worker.build import EngineParts
from engine.worker.engine_thread import KvConnector
from engine.worker.process import WorkerProcess
from engine.worker.role import WorkerRole
from engine.worker.status import WorkerStatus
from kv_transfer.layout import KvLayout
from kv_transfer.transports.memory import MemoryHub, MemoryTransport
from kv_transfer.transports.poll_dealer import PollDealer
from kv_transfer.transports.transport import KvMemoryRegion, TransferEndpoint
from splitserve.config.worker import WorkerConfig
from splitserve.rpc.carried_calls import CarriedMethod
from splitserve.v1 import registry_pb2

pytestmark = pytest.mark.timeout(60)

LAYOUT = KvLayout("f" * 64, "float32", 16, 1, 1, 8)
ENDPOINT = TransferEndpoint("agent", "memory", b"", KvMemoryRegion(0, 1, LAYOUT))


class Connector(KvConnector):
    def show(self, in_progress: int) -> None:
        self._publish(WorkerStatus(in_progress=in_progress))

    def advance(self, core: EngineCore, now: float) -> bool:
        return False

    def after_step(self, core: EngineCore, result: StepResult, now: float) -> None:
        raise AssertionError("no engine runs here")


class Role(WorkerRole[Connector]):
    certificate = "decode"
    pool = registry_pb2.POOL_DECODE

    def __init__(self) -> None:
        self.calls = 0
        self.connector: Connector | None = None

    def make_connector(self, parts: EngineParts, epoch: int, on_idle: Callable[[], None]) -> Connector:
        raise AssertionError("no engine runs here")

    def add_services(self, server: grpc.aio.Server) -> Sequence[str]:
        return []

    def carried_methods(self) -> dict[str, CarriedMethod]:
        return {}

    def on_peers(self, coordinator: str, peers: Sequence[TransferEndpoint]) -> None:
        return

    def on_ended_writers(self, agent_ids: Sequence[str]) -> None:
        return

    def busy(self) -> bool:
        return self.calls > 0 or (self.connector is not None and self.connector.status.in_progress > 0)

    def close(self) -> None:
        return


def worker_of(role: Role, drain_s: float) -> WorkerProcess[Connector]:
    made = WorkerProcess(WorkerConfig(worker_id="d", model="simulated", drain_s=drain_s), lambda worker: role)
    transport = MemoryTransport(MemoryHub())
    role.connector = Connector(ENDPOINT, transport, PollDealer(transport.poll), made.engine_idle)
    return made


async def drains(worker: WorkerProcess[Connector]) -> asyncio.Task[None]:
    task = asyncio.create_task(worker.drain())
    await asyncio.sleep(0)
    assert worker.draining
    return task


async def test_it_ends_at_once_where_nothing_is_in_progress() -> None:
    await worker_of(Role(), 3600.0).drain()


async def test_it_ends_with_the_last_call_of_a_service() -> None:
    role = Role()
    worker, role.calls = worker_of(role, 3600.0), 1
    draining = await drains(worker)
    assert not draining.done()
    role.calls = 0
    worker.service_idle()
    await draining


async def test_it_ends_with_the_last_request_on_the_engine_thread() -> None:
    role = Role()
    worker = worker_of(role, 3600.0)
    assert role.connector is not None
    role.connector.show(1)
    draining = await drains(worker)
    worker.service_idle()
    await asyncio.sleep(0)
    assert not draining.done(), "a service is idle, the engine is not"
    await asyncio.to_thread(role.connector.show, 0)
    await draining


async def test_it_waits_no_longer_than_it_may() -> None:
    role = Role()
    worker, role.calls = worker_of(role, 0.01), 1
    await worker.drain()
    assert role.busy()
