"""Proof that a prefill worker's process has ended: a refused connection, a later boot, the runtime's word."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise

import pytest

from coordinator.health.failure_detector import LAST_PAUSE_S, FailureDetector, is_refused
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import Worker
from splitserve.runtime.loops import LoopRunner
from splitserve.v1 import registry_pb2
from tests.support.cluster.registrations import registration
from tests.support.journal import settled
from tests.support.virtual_time import run_in_virtual_time
from tests.support.waiting import PATIENCE_S

PREFILL, DECODE = registry_pb2.ROLE_PREFILL, registry_pb2.ROLE_DECODE


@contextmanager
def listening() -> Iterator[str]:
    """An address whose connections the kernel accepts, like those of a frozen process."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"127.0.0.1:{server.getsockname()[1]}"


@asynccontextmanager
async def watched() -> AsyncIterator[tuple[Registry, Worker]]:
    """A watched registry, and a decode worker in it that is to be notified."""
    async with detecting() as (registry, decode, _):
        yield registry, decode


@asynccontextmanager
async def detecting(
    refused: Callable[[str], Awaitable[bool]] | None = None,
) -> AsyncIterator[tuple[Registry, Worker, FailureDetector]]:
    """As `watched`, with the detector."""
    registry = Registry(5.0)
    decode = registry.register(registration("d", DECODE), 0.0)
    loops = LoopRunner()
    detector = FailureDetector(registry, loops, refused)
    watching = asyncio.create_task(detector.run())
    try:
        yield registry, decode, detector
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert all(sample.value == 0 for sample in loops.metric().samples)


async def test_a_refused_connection_is_proof() -> None:
    with listening() as address:
        assert not await is_refused(address)
    async with asyncio.timeout(PATIENCE_S):
        while not await is_refused(address):  # on a busy machine its own timeout may come first
            pass
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


def test_one_that_comes_back_and_leaves_again_is_probed_as_at_first() -> None:
    looks: list[float] = []
    is_gone = False

    async def look(address: str) -> bool:
        looks.append(asyncio.get_running_loop().time())
        return is_gone

    async def leaves_twice() -> None:
        nonlocal is_gone
        async with detecting(look) as (registry, decode, _):
            request = registration("p", PREFILL, "127.0.0.1:2")
            for _ in range(2):
                worker = registry.register(request, 0.0)
                await asyncio.sleep(0.01)  # of virtual time, the probe's pauses as well
                begin, looked = asyncio.get_running_loop().time(), len(looks)
                registry.drop(worker.key, "its report stream ended")
                await asyncio.sleep(30.0)
                pauses = [later - before for before, later in pairwise(looks[looked:])]
                assert looks[looked] == begin
                assert pauses[:6] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2])
                assert pauses[6:] == pytest.approx([LAST_PAUSE_S] * 4), "one probe, not two"
            assert registry.ended_writers_for(decode) == []
            is_gone = True
            await asyncio.sleep(LAST_PAUSE_S)
            assert registry.ended_writers_for(decode) == [worker.agent_id]

    run_in_virtual_time(leaves_twice())


VANISHED = "3f2a91c0d4e7.invalid:50061"
"""The address of a container: its name vanishes with it, so that nobody is left to refuse a connection."""


async def test_a_vanished_name_is_not_proof_but_the_runtimes_word_is() -> None:
    async with detecting() as (registry, decode, detector):
        worker = registry.register(registration("p", PREFILL, VANISHED, epoch=1), 0.0)
        await asyncio.sleep(0)
        registry.drop(worker.key, "its report stream ended")
        await asyncio.sleep(0.3)  # some looks
        detector.report_ended([("p", 2), ("q", 1)])
        assert registry.ended_writers_for(decode) == []
        detector.report_ended([worker.key])
        assert registry.ended_writers_for(decode) == [worker.agent_id]


async def test_the_runtime_may_know_before_the_registry() -> None:
    async with detecting() as (registry, decode, detector):
        worker = registry.register(registration("p", PREFILL, VANISHED, epoch=1), 0.0)
        detector.report_ended([worker.key, decode.key])
        assert registry.get(worker.key) is None
        assert registry.ended_writers_for(decode) == [worker.agent_id]


async def test_the_same_id_elsewhere_is_not_proof() -> None:
    async with watched() as (registry, decode):
        first = registry.register(registration("p", PREFILL, VANISHED, epoch=1), 0.0)
        await asyncio.sleep(0)
        registry.register(registration("p", PREFILL, "9bd1c0ffee00.invalid:50061", epoch=2), 0.0)
        await asyncio.sleep(0.3)
        assert registry.ended_writers_for(decode) == []
        assert registry.get(first.key) is None


async def test_an_address_that_leads_to_another_machine_now_is_not_proof() -> None:
    async with watched() as (registry, decode):
        with listening() as address:
            for epoch, machine in ((1, "a"), (2, "b")):
                request = registration("p", PREFILL, address, epoch=epoch)
                request.endpoint.host_id = machine
                registry.register(request, 0.0)
                await asyncio.sleep(0)
            await asyncio.sleep(0.3)
            assert registry.ended_writers_for(decode) == []
