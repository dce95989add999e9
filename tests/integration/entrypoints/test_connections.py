"""Connections are bounded: more than the limit are closed at once, and those that are open work on."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from splitserve.runtime.process import LEAST_CONNECTIONS, RESERVED_FILES, connections_that_fit
from tests.support.cluster.fake_cluster import ask, expected, fake_cluster
from tests.support.journal import settled
from tests.support.waiting import PATIENCE_S

MOST = 16
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"

pytestmark = pytest.mark.timeout(120)


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def test_http_connections_beyond_the_limit_are_refused() -> None:
    async with fake_cluster(http_port=0, max_connections=MOST) as cluster:
        port = cluster.coordinator.http_port
        assert port is not None
        async with AsyncExitStack() as stack:
            idle = [await stack.enter_async_context(connected(port)) for _ in range(MOST)]
            idle[-1][1].write(HEALTH)
            assert b"200 OK" in await idle[-1][0].readline()
            for _ in range(3):
                reader, _ = await stack.enter_async_context(connected(port))
                answer = await reader.read()
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert b"too_many_connections" in answer
                assert b"retry-after: 1" in answer
            idle[-1][1].write(HEALTH)
            assert b"200 OK" in await idle[-1][0].readuntil(b"200 OK")

        async def works() -> bool:
            async with connected(port) as (reader, writer):
                with suppress(ConnectionError):  # refused before it was read
                    writer.write(HEALTH)
                    return b"200 OK" in await reader.readline()
                return False

        async with asyncio.timeout(PATIENCE_S):
            while not await works():  # noqa: ASYNC110 (each try is a connection)
                await asyncio.sleep(0.01)


async def test_grpc_connections_beyond_the_limit_are_closed() -> None:
    async with fake_cluster(max_connections=MOST) as cluster:
        port = cluster.coordinator.port
        await cluster.answer(ask(max_tokens=2))
        async with AsyncExitStack() as stack:
            strangers = [await stack.enter_async_context(connected(port)) for _ in range(2 * MOST)]
            firsts = [await reader.read(1) for reader, _ in strangers]
            assert firsts.count(b"") > MOST
            # The connections of the workers and of this client were there before.
            answer = await cluster.answer(ask(max_tokens=4))
            assert answer.token_ids == expected(4)
        await settled(lambda: all(w.accepts for w in cluster.coordinator.registry.snapshot().workers))


def test_the_limit_of_open_files_lowers_the_limit_of_connections() -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert connections_that_fit(10) == 10
    assert connections_that_fit(10**9, 2) == (soft - RESERVED_FILES) // 2
    assert connections_that_fit(10**9, 10**9) == LEAST_CONNECTIONS


def test_services_raise_the_soft_limit_of_open_files() -> None:
    code = (
        "import resource as r; from splitserve.runtime.process import raise_file_limit as up;"
        "r.setrlimit(r.RLIMIT_NOFILE, (256, 1000)); print(up(), r.getrlimit(r.RLIMIT_NOFILE)); print(up())"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert run.stdout.split("\n")[:2] == ["1000 (1000, 1000)", "1000"]
