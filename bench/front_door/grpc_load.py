"""Load over gRPC, our API's or KServe's, parsed with as little work as possible: raw HTTP/2 frames, hardly any flow
control.

A client library takes more CPU time for a message than the coordinator does, and would be what is measured on a small
machine. Frames: RFC 9113; headers as literals without indexing: RFC 7541, 6.2.2; messages: gRPC over HTTP/2.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from bench.front_door.tally import Tally, until_broken
from splitserve.kserve import open_inference_pb2
from splitserve.v1 import generation_pb2, inference_pb2

CONNECTIONS = 8
"""Connections that share the streams, like those of a few clients."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
INITIAL_WINDOW_SIZE = 4
WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65_535
RENEW_BYTES = 2**30
"""Bytes after which the connection's flow-control window is updated. A stream's never is: no answer is that long."""
STREAM_IDS = 2


class Broken(RuntimeError):
    """The server ended a call or the connection without an answer."""


class Received(NamedTuple):
    """What a response brings: text and the number of its tokens, or the end with that of all tokens."""

    text: str
    tokens: int
    ends: bool = False


@dataclass(frozen=True)
class StreamedApi:
    """A method that streams an answer to one request."""

    path: str
    requests: Sequence[bytes]
    """Serialized, one a stream."""
    read: Callable[[bytes], Received]


def own_api(model: str, prompts: Sequence[str], max_tokens: int) -> StreamedApi:
    """Our own Generate."""
    stop = generation_pb2.StopParams(max_tokens=max_tokens, ignore_eos=True)
    requests = [
        inference_pb2.GenerateRequest(model=model, text=prompt, stop=stop).SerializeToString()
        for prompt in prompts
    ]
    return StreamedApi("/splitserve.v1.InferenceService/Generate", requests, _read_own)


def _read_own(payload: bytes) -> Received:
    response = inference_pb2.GenerateResponse.FromString(payload)
    if response.HasField("done"):
        return Received("", response.done.usage.completion_tokens, ends=True)
    return Received(response.delta.text, len(response.delta.token_ids))


def kserve_api(model: str, prompts: Sequence[str], max_tokens: int) -> StreamedApi:
    """KServe's ModelStreamInfer, one request a call, with typed tensors and the usual outputs."""
    requests = []
    for prompt in prompts:
        request = open_inference_pb2.ModelInferRequest(model_name=model)
        text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        text.contents.bytes_contents.append(prompt.encode())
        request.parameters["stream"].bool_param = True
        request.parameters["ignore_eos"].bool_param = True
        request.parameters["max_tokens"].int64_param = max_tokens
        requests.append(request.SerializeToString())
    return StreamedApi("/inference.GRPCInferenceService/ModelStreamInfer", requests, _read_kserve)


def _read_kserve(payload: bytes) -> Received:
    message = open_inference_pb2.ModelStreamInferResponse.FromString(payload)
    if message.error_message:
        raise Broken(message.error_message)
    response = message.infer_response
    if "completion_tokens" in response.parameters:
        return Received("", response.parameters["completion_tokens"].int64_param, ends=True)
    outputs = {output.name: output.contents for output in response.outputs}
    text = outputs["text_output"].bytes_contents[0].decode()
    return Received(text, len(outputs["output_ids"].int_contents))


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: str, value: str) -> bytes:
    """One header, neither indexed nor compressed; both parts shorter than 127 bytes."""
    return bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class GrpcConnection(asyncio.Protocol):
    """One connection with several streams; each sends its next request when its answer is complete."""

    def __init__(self, tally: Tally, authority: str, api: StreamedApi, requests: Sequence[bytes]) -> None:
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": api.path,
            ":authority": authority,
            "te": "trailers",
            "content-type": "application/grpc",
        }
        self._headers = b"".join(literal(name, value) for name, value in fields.items())
        self._requests = [struct.pack(">BI", 0, len(payload)) + payload for payload in requests]
        self._read = api.read
        self._tally = tally
        self._buffer = b""
        self._next_id = 1
        self._credit = 0
        self._streams: dict[int, _Stream] = {}
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Sends the connection preface and the first requests."""
        self._transport = cast(asyncio.Transport, transport)
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, WINDOW)
        window = struct.pack(">I", WINDOW - DEFAULT_WINDOW)
        self._transport.write(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, window))
        for request in self._requests:
            self._ask(request)

    def connection_lost(self, error: Exception | None) -> None:
        """The server closed the connection."""
        self._fail(error or Broken("the server closed the connection"))

    def close(self) -> None:
        """Closes the connection."""
        self.broken.cancel()
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parses complete frames and keeps the rest."""
        buffer, start = self._buffer + data if self._buffer else data, 0
        while len(buffer) - start >= 9:
            end = start + 9 + int.from_bytes(buffer[start : start + 3], "big")
            if len(buffer) < end:
                break
            stream = int.from_bytes(buffer[start + 5 : start + 9], "big") & WINDOW
            self._take(buffer[start + 3], buffer[start + 4], stream, buffer[start + 9 : end])
            start = end
        self._buffer = buffer[start:]

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == DATA:
            self._data(self._streams[number], payload)
        elif kind == SETTINGS and not flags & ACK:
            self._transport.write(frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self._transport.write(frame(PING, ACK, 0, payload))
        elif kind in (RST_STREAM, GOAWAY):
            self._fail(Broken(f"frame {kind} with {payload!r}"))
        if kind in (DATA, HEADERS) and flags & END_STREAM:
            stream = self._streams.pop(number)
            if not stream.done:
                self._fail(Broken(f"a call ended without an answer: {payload!r}"))
            else:
                self._ask(stream.request)

    def _data(self, stream: _Stream, payload: bytes) -> None:
        self._credit += len(payload)
        if self._credit > RENEW_BYTES:
            self._transport.write(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", self._credit)))
            self._credit = 0
        data, start = stream.rest + payload, 0
        while len(data) - start >= 5:
            end = start + 5 + int.from_bytes(data[start + 1 : start + 5], "big")
            if len(data) < end:
                break
            self._message(stream, self._read(data[start + 5 : end]))
            start = end
        stream.rest = data[start:]

    def _message(self, stream: _Stream, received: Received) -> None:
        if received.ends:
            stream.done = True
            self._tally.ended(received.tokens)
        elif received.text:
            if not stream.heard:
                stream.heard = True
                self._tally.began(stream.asked_s)
            self._tally.text(received.text, received.tokens)

    def _ask(self, request: bytes) -> None:
        number, self._next_id = self._next_id, self._next_id + STREAM_IDS
        self._streams[number] = _Stream(request)
        head = frame(HEADERS, END_HEADERS, number, self._headers)
        self._transport.write(head + frame(DATA, END_STREAM, number, request))

    def _fail(self, error: Exception) -> None:
        if not self.broken.done():
            self.broken.set_exception(error)


class _Stream:
    def __init__(self, request: bytes) -> None:
        self.request = request
        self.asked_s = time.monotonic()
        self.heard = self.done = False
        self.rest = b""


async def run_grpc(tally: Tally, target: str, api: StreamedApi) -> None:
    """Keeps the requests of `api` in flight, each again when it has ended, until cancelled. Raises Broken when one
    fails."""
    host, _, port = target.rpartition(":")
    loop = asyncio.get_running_loop()
    protocols = []
    for first in range(CONNECTIONS):
        protocol = GrpcConnection(tally, target, api, api.requests[first::CONNECTIONS])
        await loop.create_connection(lambda made=protocol: made, host, int(port))  # type: ignore[misc]
        protocols.append(protocol)
    await until_broken(protocols)
