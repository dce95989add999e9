"""Requests that offer another protocol, as Java's HttpClient does with h2c, are served as they came, body and all."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from coordinator.entrypoints.http.exchange import HttpError, HttpExchange, error_response
from coordinator.entrypoints.http.server import MAX_HEAD_BYTES, serving_http
from coordinator.entrypoints.inference_api import InputLimits

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


async def answers(
    sent: bytes, number: int = 1, pieces: int | None = None, *, ends: bool = False
) -> list[dict[str, Any]]:
    """The first `number` responses; with `ends` there is nothing behind them."""
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
        assert not ends or not await reader.read()
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


LAST = H2C.replace(b"Connection: ", b"Connection: close, ")


async def test_a_last_request_is_served_whatever_is_behind_it() -> None:
    (seen,) = await answers(post(LAST, b"1") + b"GET /b HTTP/1.1\r\nHost: h\r\n\r\n", ends=True)
    assert (seen["status"], seen["path"], seen["body"]) == (200, "/a", "1")


@pytest.mark.parametrize("pieces", [None, 1])
@pytest.mark.parametrize("offer", [H2C, LAST])
async def test_a_chunked_body_with_a_trailer_arrives(offer: bytes, pieces: int | None) -> None:
    head = b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n" + offer
    chunks = b"2\r\n[1\r\n3\r\n,2]\r\n0\r\nX-Trailer: t\r\n\r\n"
    sent = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks
    (seen,) = await answers(sent, pieces=pieces, ends=offer == LAST)
    assert (seen["status"], seen["body"]) == (200, "[1,2]")


async def test_a_client_that_waits_for_leave_gets_it() -> None:
    sent = post(H2C, b"", b"Expect: 100-continue\r\n").replace(b"Length: 0", b"Length: 3")
    async with serving_http(echo, "127.0.0.1", 0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        writer.write(b"[1]")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_head_that_is_parsed_twice_counts_once() -> None:
    large = b"X-Large: " + b"x" * (MAX_HEAD_BYTES - 100) + b"\r\n"
    for offer in (b"", H2C):
        (seen,) = await answers(post(offer, b"1", large + b"X-Rest: " + b"x" * 300 + b"\r\n"))
        assert (seen["status"], seen["body"]) == (200, "1")


@pytest.mark.parametrize("encodings", [["gzip"], ["identity", "Zstd"], ["identity, BR"]])
async def test_a_compressed_body_is_refused(encodings: list[str]) -> None:
    lines = "".join(f"Content-Encoding: {each}\r\n" for each in encodings)
    (seen,) = await answers(post(b"", b"{}", lines.encode()))
    assert seen["status"] == 415
    assert "content-encoding" in seen["error"]["message"]


async def test_a_charset_for_an_encoding_is_taken() -> None:
    (seen,) = await answers(post(b"", b"{}", b"Content-Encoding: utf-8\r\n"))
    assert (seen["status"], seen["body"]) == (200, "{}")
