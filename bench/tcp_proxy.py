"""A TCP proxy that resets its connections when it is told to, for tests and for `bench.chaos`."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER on, for 0 seconds: closing sends RST."""
CHUNK_BYTES = 2**16


class TcpProxy:
    """Forwards connections from `port` to `target_port`, both on loopback."""

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self._target_port = target_port
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return len(self._writers) // 2

    def reset(self) -> None:
        """Resets all connections, on both sides."""
        for writer in self._writers:
            connection: socket.socket = writer.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            writer.transport.abort()
        self._writers.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards one connection until one side ends it."""
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.close()
            return
        ends = {writer, far_writer}
        self._writers |= ends
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_forward(reader, far_writer))
                group.create_task(_forward(far_reader, writer))
        finally:
            self._writers -= ends


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def tcp_proxy(target_port: int) -> AsyncIterator[TcpProxy]:
    """A proxy that listens while the context is open."""
    proxy = TcpProxy(target_port)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        proxy.reset()
