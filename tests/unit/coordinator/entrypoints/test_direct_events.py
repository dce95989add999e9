"""Events that are written without a wait: when they may be, and that nothing waits unnoticed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.entrypoints.http.exchange import HttpExchange

pytestmark = pytest.mark.timeout(10)


class Server:
    """An ASGI server whose client reads or does not."""

    def __init__(self, **state: Any) -> None:
        self.reads = True
        self.sent: list[bytes] = []
        self.resumed = asyncio.Event()
        scope = {"headers": [], "state": state or {"is_writable": lambda: self.reads}}
        unused: Any = None
        self.exchange = HttpExchange(unused, unused, scope, unused, self.send)

    async def send(self, message: Any) -> None:
        if not self.reads:
            await self.resumed.wait()
        self.sent.append(message.get("body", b"head"))


async def test_an_event_is_written_before_the_call_returns() -> None:
    server = Server()
    await server.exchange.event(b"1")
    assert server.exchange.takes_events
    server.exchange.event_now(b"2")
    assert server.sent == [b"head", b"1", b"2"]


async def test_none_is_taken_before_the_head_or_while_the_client_does_not_read() -> None:
    server = Server()
    assert not server.exchange.takes_events
    server.reads = False
    begun = asyncio.create_task(server.exchange.event(b"1"))
    await asyncio.sleep(0)
    server.reads = True
    assert server.exchange.started
    assert not server.exchange.takes_events, "another choice of the answer would be written before the head"
    server.resumed.set()
    await begun
    assert server.exchange.takes_events
    server.reads = False
    assert not server.exchange.takes_events


async def test_a_server_that_does_not_tell_is_always_waited_for() -> None:
    server = Server(other=None)
    await server.exchange.event(b"1")
    assert not server.exchange.takes_events


async def test_a_server_that_waits_although_the_client_reads_is_an_error() -> None:
    server = Server()
    await server.exchange.event(b"1")
    server.reads = False
    with pytest.raises(RuntimeError, match="waits"):
        server.exchange.event_now(b"2")
