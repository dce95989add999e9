"""A client that goes while its request is served: the request learns of it, whatever its connection did before."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from coordinator.entrypoints.http.exchange import ClientGoneError, HttpExchange
from coordinator.entrypoints.http.server import serving_http

pytestmark = pytest.mark.timeout(20)
GET = b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n"


class App:
    """Answers each path once `may_end` has it; keeps what each request has come to."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[str] = asyncio.Queue()
        self.ended: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.may_end: dict[str, asyncio.Event] = {f"/{number}": asyncio.Event() for number in range(3)}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        unused: Any = None
        exchange, path = HttpExchange(unused, unused, scope, receive, send), scope["path"]
        try:
            async with exchange.while_connected():
                self.begun.put_nowait(path)
                await self.may_end[path].wait()
                await exchange.respond(200, b"{}")
            self.ended.put_nowait((path, "answered"))
        except ClientGoneError:
            self.ended.put_nowait((path, "gone"))


@asynccontextmanager
async def connected(app: App) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with serving_http(app, "127.0.0.1", 0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield reader, writer
        finally:
            writer.close()


async def test_a_request_ends_with_its_connection() -> None:
    app = App()
    async with connected(app) as (_, writer):
        writer.write(GET % 0)
        assert await app.begun.get() == "/0"
        writer.close()
        assert await app.ended.get() == ("/0", "gone")


async def test_the_next_request_of_a_connection_learns_of_its_end_too() -> None:
    app = App()
    async with connected(app) as (reader, writer):
        app.may_end["/0"].set()
        writer.write(GET % 0)
        assert await app.ended.get() == ("/0", "answered")
        await reader.readuntil(b"{}")
        writer.write(GET % 1)
        assert [await app.begun.get() for _ in range(2)] == ["/0", "/1"]
        writer.transport.abort()
        assert await app.ended.get() == ("/1", "gone")


async def test_requests_that_came_together_are_told_one_by_one() -> None:
    app = App()
    async with connected(app) as (reader, writer):
        writer.write(GET % 0 + GET % 1 + GET % 2)
        assert await app.begun.get() == "/0"
        app.may_end["/0"].set()
        assert await app.ended.get() == ("/0", "answered")
        assert await app.begun.get() == "/1"
        await reader.readuntil(b"{}")
        writer.transport.abort()
        assert await app.ended.get() == ("/1", "gone")
