"""Load over HTTP: streaming chat completions, parsed with as little work as possible."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import cast

from bench.front_door.tally import Tally, until_broken

CONTENT = re.compile(rb'"content": ?"((?:[^"\\]|\\.)*)"')
USAGE = re.compile(rb'"completion_tokens": ?(\d+)')


class SseRefused(RuntimeError):
    """The server did not answer with a stream."""


class SseStream(asyncio.Protocol):
    """One connection that sends one request after the other."""

    def __init__(self, tally: Tally, host: str, model: str, prompt: str, max_tokens: int) -> None:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": max_tokens,
            "ignore_eos": True,
        }
        payload = json.dumps(body).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\n\r\n"
        )
        self._request = head.encode() + payload
        self._tally = tally
        self._rest = b""
        self._heard = False
        self._tokens = 0
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the first request."""
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def close(self) -> None:
        """Closes the connection."""
        self.broken.cancel()
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parses complete lines and keeps the rest."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line)
            elif line.startswith(b"HTTP/1.1 ") and b" 200" not in line:
                self._fail(SseRefused(line.decode(errors="replace")))
            elif line == b"0\r" and self._done:
                self._ask()

    def connection_lost(self, error: Exception | None) -> None:
        """The server closed the connection."""
        self._fail(error or SseRefused("the server closed the connection"))

    def _ask(self) -> None:
        self._heard = self._done = False
        self._tokens = 0
        self._asked_s = time.monotonic()
        self._transport.write(self._request)

    def _event(self, line: bytes) -> None:
        if b"[DONE]" in line:
            self._tally.ended(self._tokens)
            self._done = True
            return
        if b'"error"' in line:
            self._fail(SseRefused(line.decode(errors="replace")))
        if usage := USAGE.search(line):
            self._tokens = int(usage.group(1))
        content = CONTENT.search(line)
        if content and content.group(1):
            if not self._heard:
                self._heard = True
                self._tally.began(self._asked_s)
            self._tally.text(content.group(1).decode())

    def _fail(self, error: Exception) -> None:
        if not self.broken.done():
            self.broken.set_exception(error)


async def run_sse(tally: Tally, target: str, model: str, streams: int, prompt: str, max_tokens: int) -> None:
    """Keeps `streams` requests in flight until cancelled. Raises SseRefused when the server does not stream."""
    host, _, port = target.rpartition(":")
    loop = asyncio.get_running_loop()
    protocols = []
    for number in range(streams):
        _, protocol = await loop.create_connection(
            lambda n=number: SseStream(tally, target, model, f"{prompt} {n}", max_tokens),  # type: ignore[misc]
            host,
            int(port),
        )
        protocols.append(protocol)
    await until_broken(protocols)
