"""A metadata server that answers as a cloud's does, or badly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Answer = tuple[int, Mapping[str, str], bytes]
"""Status, headers, body."""
Handle = Callable[[str, str, Mapping[str, str]], Answer]
"""From method, path and headers, whose names are in lower case."""


@dataclass
class FakeMetadataServer:
    """`url` is where it is. `handle` answers, until `fail` says otherwise."""

    handle: Handle
    url: str = ""
    asked: list[tuple[str, str]] = field(default_factory=list)
    _how: str = ""
    _server: asyncio.Server | None = None

    async def fail(self, how: str) -> None:
        """From now on it is silent, refusing, overloaded or closing."""
        self._how = how
        if how == "refusing" and self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, path, _ = head[0].split(" ")
            headers = {
                name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])
            }
            self.asked.append((method, path))
            if self._how == "silent":
                await reader.read()  # until the client gives up
                return
            if self._how == "closing":
                return
            answer: Answer = (
                (503, {}, b"") if self._how == "overloaded" else self.handle(method, path, headers)
            )
            status, more, body = answer
            lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", "Connection: close"]
            lines += [f"{name}: {value}" for name, value in more.items()]
            writer.write("\r\n".join([*lines, "", ""]).encode() + body)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has had enough
        finally:
            writer.close()


@asynccontextmanager
async def metadata_server(handle: Handle) -> AsyncIterator[FakeMetadataServer]:
    """Serves on loopback while the context is open."""
    fake = FakeMetadataServer(handle)
    fake._server = server = await asyncio.start_server(fake._serve, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.close()
