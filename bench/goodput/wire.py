"""One streamed completion over HTTP, the same for every system, with as little work as possible while it runs.

What arrives is kept with its time and parsed when all requests are over: parsing would delay what the same process has
still to send.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.server_process import HOST

PATH = "/v1/completions"
OK = 200
REFUSALS = (429, 503)


class NotServed(Exception):
    """The server answered with another status than 200."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"{status}: {body[:200].decode(errors='replace')}")
        self.is_refusal = status in REFUSALS


@dataclass(frozen=True)
class ServedAt:
    """Where a system is asked: its port, and that of vLLM's prefill server where a pair needs two calls."""

    port: int
    model: str | None = None
    """The name to ask for; None where there is only one."""
    prefill_port: int | None = None
    names_targets: bool = False
    """Whether requests carry their targets (`ttft_ms`, `tpot_ms`)."""


Chunk = tuple[float, bytes]
"""Bytes and when they came, on the loop's clock."""


def completion_body(
    at: ServedAt, prompt: Sequence[int], output_tokens: int, targets_ms: tuple[float, float]
) -> dict[str, Any]:
    """The greedy request for exactly so many tokens."""
    body: dict[str, Any] = {
        "prompt": list(prompt),
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if at.model is not None:
        body["model"] = at.model
    if at.names_targets:
        body["ttft_ms"], body["tpot_ms"] = targets_ms
    return body


async def ask(at: ServedAt, body: dict[str, Any], chunks: list[Chunk]) -> None:
    """Adds the answer's chunks as they come. Raises NotServed, OSError, EOFError, ValueError."""
    if at.prefill_port is not None:
        wish = {"do_remote_decode": True, "do_remote_prefill": False}
        first = {name: value for name, value in body.items() if not name.startswith("stream")}
        first |= {"max_tokens": 1, "kv_transfer_params": wish}
        reply = b"".join([piece async for piece in _post(at.prefill_port, first)])
        body = body | {"kv_transfer_params": json.loads(reply)["kv_transfer_params"]}
    clock = asyncio.get_running_loop().time
    async for piece in _post(at.port, body):
        chunks.append((clock(), piece))


async def _post(port: int, body: dict[str, Any]) -> AsyncIterator[bytes]:
    payload = json.dumps(body).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(head.encode() + payload)
        status = int((await reader.readuntil(b"\n")).split()[1])
        headers = [line.lower() async for line in _head_lines(reader)]
        pieces = _chunked(reader) if any(_is_chunked(line) for line in headers) else _rest(reader)
        if status != OK:
            raise NotServed(status, b"".join([piece async for piece in pieces]))
        async for piece in pieces:
            yield piece
    finally:
        writer.close()


async def _head_lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while line := (await reader.readuntil(b"\n")).strip():
        yield line


def _is_chunked(line: bytes) -> bool:
    return line.startswith(b"transfer-encoding:") and b"chunked" in line


async def _chunked(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readuntil(b"\n"), 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(2**16):
        yield piece


@dataclass(frozen=True)
class StreamedAnswer:
    """`event_s`: times of events with text or the answer's end; `tokens` by the server's count; `error` it told."""

    event_s: tuple[float, ...]
    tokens: int
    error: str


def parsed(chunks: Sequence[Chunk]) -> StreamedAnswer:
    """The events of an answer. An event has the time of the chunk that completes its line."""
    event_s, tokens, error, rest = [], 0, "", b""
    for at_s, piece in chunks:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            try:
                event = json.loads(data)
            except ValueError:
                error = error or f"no JSON: {data[:80]!r}"
                continue
            error = error or str(event.get("error") or "")
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            if any(choice.get("text") or choice.get("finish_reason") for choice in event.get("choices", ())):
                event_s.append(at_s)
    return StreamedAnswer(tuple(event_s), tokens, error)
