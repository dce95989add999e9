"""Proof that a prefill worker's process has ended: a refused connection or a later boot, and nothing less."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from coordinator.ended_workers import EndedWorkers, is_refused
from coordinator.pools import Worker
from coordinator.registry import Registry
from splitserve.v1 import registry_pb2
from tests.fakes.gates import settled
from tests.fakes.registrations import registration

PREFILL, DECODE = registry_pb2.POOL_PREFILL, registry_pb2.POOL_DECODE


@contextmanager
def listening() -> Iterator[str]:
    """An address at which connections are taken in by the system, as those of a frozen process are."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"127.0.0.1:{server.getsockname()[1]}"


@asynccontextmanager
async def watched() -> AsyncIterator[tuple[Registry, Worker]]:
    """A registry under watch, and a decode worker in it that is to be told."""
    registry = Registry(5.0)
    decode = registry.register(registration("d", DECODE), 0.0)
    watching = asyncio.create_task(EndedWorkers(registry).run())
    try:
        yield registry, decode
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_a_refused_connection_is_proof() -> None:
    with listening() as address:
        assert not await is_refused(address)
    assert await is_refused(address)
    assert not await is_refused("nowhere.invalid:1")


async def test_a_process_that_listens_has_not_ended() -> None:
    async with watched() as (registry, decode):
        with listening() as address:
            worker = registry.register(registration("p", PREFILL, address), 0.0)
            await asyncio.sleep(0)
            registry.drop(worker.key, "silent")
            await asyncio.sleep(0.3)  # some looks
            assert registry.ended_writers_for(decode) == []
        await settled(lambda: registry.ended_writers_for(decode) == [worker.agent_id])
        assert registry.ended_writers_for(worker) == []


async def test_a_later_boot_at_the_same_address_is_proof() -> None:
    async with watched() as (registry, decode):
        with listening() as address:
            first = registry.register(registration("p", PREFILL, address, epoch=1), 0.0)
            await asyncio.sleep(0)
            registry.register(registration("p", PREFILL, address, epoch=2), 0.0)
            await settled(lambda: registry.ended_writers_for(decode) == [first.agent_id])


async def test_one_that_comes_back_is_not_ended() -> None:
    async with watched() as (registry, decode):
        with listening() as address:
            request = registration("p", PREFILL, address)
            worker = registry.register(request, 0.0)
            await asyncio.sleep(0)
            registry.drop(worker.key, "its report stream ended")
            await asyncio.sleep(0)
            registry.register(request, 0.0)
        await asyncio.sleep(0.3)
        assert registry.ended_writers_for(decode) == []
