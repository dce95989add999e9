"""A turn of the vLLM benchmark against a server that streams as fast as it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import psutil
import pytest

from bench.goodput.wire import ServedAt
from bench.server_process import ServerProcess
from bench.vllm.streams import body_of, run_turn
from bench.vllm.systems import System

NO_SERVER = cast(ServerProcess, None)
PARTS = {"front": [psutil.Process()]}


@asynccontextmanager
async def streaming_server(lost: int = 0) -> AsyncIterator[tuple[System, list[dict[str, Any]]]]:
    """Answers with the wanted number of events, each of a token, `lost` fewer; the bodies that it got."""
    bodies: list[dict[str, Any]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        body = json.loads(await reader.readexactly(int(head.partition("content-length: ")[2].split()[0])))
        bodies.append(body)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for number in range(body["max_tokens"] - lost):
            event = {"choices": [{"text": "x"}], "usage": {"completion_tokens": number + 1}}
            writer.write(f"data: {json.dumps(event)}\n\n".encode())
            await writer.drain()
            while len(bodies) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await asyncio.sleep(0.001)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield System("fake", ServedAt(server.sockets[0].getsockname()[1], "m"), NO_SERVER, PARTS), bodies


async def test_a_turn_asks_all_streams_at_once() -> None:
    async with streaming_server() as (system, bodies):
        turn = await run_turn(system, [[1, 2], [3, 4]], 40, 0.8)
    assert 1.0 <= turn.tpot_ms < 1e3
    assert turn.tokens_per_s > 0
    assert turn.cpu_us["front"] >= 0
    assert sorted(body["prompt"] for body in bodies) == [[1, 2], [3, 4]]
    assert bodies[0]["temperature"] == 0.8
    assert body_of(system, [1], 3, 0.0)["temperature"] == 0.0


async def test_an_answer_that_is_not_complete_is_an_error() -> None:
    async with streaming_server(lost=1) as (system, _):
        with pytest.raises(RuntimeError, match="39 of 40 tokens"):
            await run_turn(system, [[1], [2]], 40, 0.0)
