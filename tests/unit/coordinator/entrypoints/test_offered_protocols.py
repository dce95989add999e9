"""Requests that offer another protocol, as Java's HttpClient does with h2c, are served as they came, body and all."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from coordinator.entrypoints.http.errors import HttpError, error_response
from coordinator.entrypoints.http.exchange import HttpExchange
from coordinator.entrypoints.http.server import serving_http
from coordinator.entrypoints.input_limits import InputLimits

pytestmark = pytest.mark.timeout(20)
H2C = b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
WEBSOCKET = b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with method, path, headers and body."""
    unused: Any = None
    limits = InputLimits(dict, 2**20)
    exchange = HttpExchange(unused, limits, scope, receive, send)
    try:
        body = await exchange.json_body() if scope["method"] == "POST" else b""
    except HttpError as error:
        response = error_response(error)
        await exchange.respond(response.status, response.body)
        return
    names = sorted(name.decode() for name, _ in scope["headers"])
    seen = {"method": scope["method"], "path": scope["path"], "headers": names, "body": body.decode()}
    await exchange.respond(200, json.dumps(seen).encode())


async def answers(sent: bytes, number: int = 1, pieces: int | None = None) -> list[dict[str, Any]]:
    async with serving_http(echo, "127.0.0.1", 0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for at in range(0, len(sent), pieces or len(sent)):
            writer.write(sent[at : at + (pieces or len(sent))])
            await writer.drain()
            if pieces:
                await asyncio.sleep(0)
        got = []
        for _ in range(number):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().partition("content-length: ")[2].partition("\r")[0])
            got.append({"status": int(head.split()[1]), **json.loads(await reader.readexactly(length))})
        writer.close()
        return got


def post(offer: bytes, body: bytes, more: bytes = b"") -> bytes:
    length = b"Content-Length: %d\r\n" % len(body)
    return (
        b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        + offer
        + length
        + more
        + b"\r\n"
        + body
    )


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET, b""], ids=["h2c", "websocket", "none"])
@pytest.mark.parametrize("pieces", [None, 1, 7])
async def test_body_and_headers_arrive_without_the_offer(offer: bytes, pieces: int | None) -> None:
    body = b'{"a": 1}'
    (seen,) = await answers(post(offer, body), pieces=pieces)
    assert (seen["status"], seen["method"], seen["path"], seen["body"]) == (200, "POST", "/a", body.decode())
    assert not {"upgrade", "http2-settings"} & set(seen["headers"])
    assert {"host", "content-type", "content-length"} <= set(seen["headers"])


async def test_requests_behind_it_on_the_connection_are_served() -> None:
    sent = post(H2C, b"1") + b"GET /b HTTP/1.1\r\nHost: h\r\n" + WEBSOCKET + b"\r\n" + post(H2C, b"22")
    seen = await answers(sent, 3)
    assert [(each["path"], each["body"]) for each in seen] == [("/a", "1"), ("/b", ""), ("/a", "22")]


async def test_a_compressed_body_is_refused() -> None:
    (seen,) = await answers(post(b"", b"{}", b"Content-Encoding: gzip\r\n"))
    assert seen["status"] == 415
    assert "content-encoding" in seen["error"]["message"]
