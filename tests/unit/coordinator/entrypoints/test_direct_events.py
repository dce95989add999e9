"""Events that are written without a wait: when they may be, and that nothing waits unnoticed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.entrypoints.http import exchange
from coordinator.entrypoints.http.exchange import HttpExchange
from splitserve.errors import InvalidArgumentError

pytestmark = pytest.mark.timeout(10)


class Server:
    """An ASGI server whose client reads or does not."""

    def __init__(self, **state: Any) -> None:
        self.reads = True
        self.sent: list[bytes] = []
        self.resumed = asyncio.Event()
        self.aborted = False
        scope = {
            "headers": [],
            "state": state
            or {
                "is_writable": lambda: self.reads,
                "write_chunk": self.sent.append,
                "abort_connection": self.abort,
            },
        }
        unused: Any = None
        self.exchange = HttpExchange(unused, unused, scope, unused, self.send)

    def abort(self) -> None:
        self.aborted = True

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
    assert not server.exchange.started
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


async def test_none_is_taken_after_the_end() -> None:
    server = Server()
    await server.exchange.event(b"1")
    await server.exchange.end_events()
    assert not server.exchange.takes_events


async def test_the_choices_of_an_answer_wait_for_its_head() -> None:
    server = Server()
    server.reads = False
    first, second = (asyncio.create_task(server.exchange.event(data)) for data in (b"1", b"2"))
    for _ in range(3):
        await asyncio.sleep(0)
    server.resumed.set()
    await asyncio.gather(first, second)
    assert server.sent[0] == b"head"
    assert sorted(server.sent[1:]) == [b"1", b"2"]


async def test_a_choice_sends_the_head_if_the_one_that_began_to_is_cancelled() -> None:
    server = Server()
    server.reads = False
    first, second = (asyncio.create_task(server.exchange.event(data)) for data in (b"1", b"2"))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    server.resumed.set()
    await second
    assert server.sent == [b"head", b"2"]


async def test_an_error_before_the_head_is_a_response_of_its_own() -> None:
    server = Server()
    server.reads = False
    begun = asyncio.create_task(server.exchange.event(b"1"))
    await asyncio.sleep(0)
    begun.cancel()
    await asyncio.gather(begun, return_exceptions=True)
    server.resumed.set()
    await failed(server)
    assert server.sent[0] == b"head"
    assert b"n must be" in server.sent[1]
    assert not server.sent[1].startswith(b"data:")


@pytest.mark.parametrize("has_begun", [False, True])
async def test_no_error_waits_for_a_client_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    monkeypatch.setattr(exchange, "ERROR_WRITE_S", 0.01)
    server = Server()
    if has_begun:
        await server.exchange.event(b"1")
    server.reads = False
    await failed(server)
    assert server.aborted


async def failed(server: Server) -> None:
    try:
        raise InvalidArgumentError("n must be 1..128", field="n")
    except InvalidArgumentError as error:
        await server.exchange.fail(error)
