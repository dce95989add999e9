"""A worker's drain ends when nothing is in progress any more, and after `drain_s` at the latest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest

from engine.core.engine import StepResult
from engine.core.engine_core import EngineCore
from kv_transfer.layout import KvLayout
from kv_transfer.transports.polling import PollDealer
from kv_transfer.transports.regions import KvMemoryRegion
from kv_transfer.transports.transport import TransferEndpoint
from splitserve.config.worker import WorkerConfig
from splitserve.rpc.carried_calls import CarriedMethod
from tests.support.transfer.memory_transport import MemoryHub, MemoryTransport
from worker.build import EngineParts
from worker.connector import KvConnector, WorkerStatus
from worker.process import PoolService, WorkerProcess

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


class Services(PoolService):
    pool = "decode"

    def __init__(self) -> None:
        self.calls = 0
        self.connector: Connector | None = None

    def make_connector(
        self, parts: EngineParts, epoch: int, on_idle: Callable[[], None], polls: PollDealer | None
    ) -> Connector:
        raise AssertionError("no engine runs here")

    def add_to(self, server: grpc.aio.Server) -> str:
        raise AssertionError("no server runs here")

    def carried_methods(self) -> dict[str, CarriedMethod]:
        return {}

    def busy(self) -> bool:
        return self.calls > 0 or (self.connector is not None and self.connector.status.in_progress > 0)


def worker_of(services: Services, drain_s: float) -> WorkerProcess:
    made = WorkerProcess(
        WorkerConfig(worker_id="d", model="simulated", drain_s=drain_s), [lambda worker: services]
    )
    transport = MemoryTransport(MemoryHub())
    services.connector = Connector(ENDPOINT, transport, PollDealer(transport.poll), made.engine_idle)
    return made


async def drains(worker: WorkerProcess) -> asyncio.Task[None]:
    task = asyncio.create_task(worker.drain())
    await asyncio.sleep(0)
    assert worker.draining
    return task


async def test_it_ends_at_once_where_nothing_is_in_progress() -> None:
    await worker_of(Services(), 3600.0).drain()


async def test_it_ends_with_the_last_call_of_a_service() -> None:
    services = Services()
    worker, services.calls = worker_of(services, 3600.0), 1
    draining = await drains(worker)
    assert not draining.done()
    services.calls = 0
    worker.service_idle()
    await draining


async def test_it_ends_with_the_last_request_on_the_engine_thread() -> None:
    services = Services()
    worker = worker_of(services, 3600.0)
    assert services.connector is not None
    services.connector.show(1)
    draining = await drains(worker)
    worker.service_idle()
    await asyncio.sleep(0)
    assert not draining.done(), "a service is idle, the engine is not"
    await asyncio.to_thread(services.connector.show, 0)
    await draining


async def test_it_waits_no_longer_than_it_may() -> None:
    services = Services()
    worker, services.calls = worker_of(services, 0.01), 1
    await worker.drain()
    assert services.busy()
