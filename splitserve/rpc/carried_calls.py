"""Serves calls that are carried by streams, by the handlers of the calls that they stand for; see `call_stream`.

What a handler refuses, awaits or raises is what it does in a call of its own: it runs in a task of its own, which is
cancelled by its caller, at its deadline, and with the stream.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from splitserve.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from splitserve.rpc.message_bounds import UNCOUNTED_BYTES
from splitserve.rpc.server import OpenRpcs
from splitserve.rpc.status import shown_error, status_of
from splitserve.rpc.writing import BATCH_ITEMS, BatchWriter
from splitserve.v1 import calls_pb2, decode_pb2, prefill_pb2
from splitserve.v1.calls_pb2_grpc import CallServiceServicer
from splitserve.v1.decode_pb2_grpc import DecodeServiceServicer
from splitserve.v1.prefill_pb2_grpc import PrefillServiceServicer

MAX_OPEN_CALLS = 2**16
"""Of one stream."""
MAX_HELD_RESPONSES = 2**13
"""That wait for a caller who does not read. With more nothing is read from that one."""
MAX_TIMEOUT_S = 86_400.0


class _CarriedContext:
    """What the handler of a carried call has of its context: nothing is to be told, as it begins before it can be
    cancelled."""

    async def send_initial_metadata(self, initial_metadata: Any, /) -> None:
        """Does nothing."""


class CarriedMethod(NamedTuple):
    """A method whose calls may be carried."""

    name: str
    """The full one, "/package.Service/Method"."""
    parse: Callable[[bytes], Any]
    handler: Callable[[Any, Any], Any]
    """That of a call. It may send initial metadata; of its context it gets no more than that."""


def decode_methods(service: DecodeServiceServicer) -> dict[str, CarriedMethod]:
    """What a decode worker is carried."""
    path, v1 = "/splitserve.v1.DecodeService/", decode_pb2
    return {
        "reserve": CarriedMethod(path + "Reserve", v1.ReserveRequest.FromString, service.Reserve),
        "abort": CarriedMethod(path + "Abort", v1.AbortRequest.FromString, service.Abort),
    }


def prefill_methods(service: PrefillServiceServicer) -> dict[str, CarriedMethod]:
    """What a prefill worker is carried."""
    name, parse = "/splitserve.v1.PrefillService/Prefill", prefill_pb2.PrefillRequest.FromString
    return {"prefill": CarriedMethod(name, parse, service.Prefill)}


class CarriedCalls(CallServiceServicer):
    """Serves the streams of all callers."""

    def __init__(self, methods: Mapping[str, CarriedMethod], open_rpcs: OpenRpcs) -> None:
        """`methods`: by the field of CarriedCall that has the request. `open_rpcs` counts each call that is carried."""
        self._methods, self._open_rpcs = methods, open_rpcs
        self._streams: set[_Stream] = set()
        self._closed = False

    async def Carry(  # type: ignore[override]
        self, requests: AsyncIterator[calls_pb2.CarryRequest], context: Any
    ) -> None:
        """See CallService.Carry in the proto."""
        stream = _Stream(self._methods, self._open_rpcs, context.write)
        self._streams.add(stream)
        if self._closed:
            stream.close()
        try:
            await stream.serve(requests)
        finally:
            self._streams.discard(stream)

    def close(self) -> None:
        """Ends each stream as soon as it carries no call, also those that are opened later."""
        self._closed = True
        for stream in self._streams:
            stream.close()


class _Stream:
    def __init__(self, methods: Mapping[str, CarriedMethod], open_rpcs: OpenRpcs, write: Any) -> None:
        self._methods, self._open_rpcs = methods, open_rpcs
        self._writer: BatchWriter[calls_pb2.CarriedResponse] = BatchWriter(
            write, lambda batch: calls_pb2.CarryResponse(responses=batch)
        )
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._last = 0
        """Number of the last call that began."""
        self._reading: asyncio.Task[None] | None = None
        self._closing = False
        self._loop = asyncio.get_running_loop()

    async def serve(self, requests: AsyncIterator[calls_pb2.CarryRequest]) -> None:
        """Runs calls until the caller ends the stream, or `close`; then cancels those that are left."""
        try:
            async with asyncio.TaskGroup() as group:
                self._reading = group.create_task(self._read(requests, group))
                self._close_if_idle()
        finally:
            await self._writer.settle()

    def close(self) -> None:
        self._closing = True
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._closing and not self._tasks and self._reading is not None:
            self._reading.cancel()

    async def _read(self, requests: AsyncIterator[calls_pb2.CarryRequest], group: asyncio.TaskGroup) -> None:
        async for message in requests:
            if len(message.calls) > BATCH_ITEMS:
                text = f"a message has {len(message.calls)} calls; at most {BATCH_ITEMS} are allowed"
                raise InvalidArgumentError(text, field="calls")
            for call in message.calls:
                self._accept(call, group)
            while self._writer.held > MAX_HELD_RESPONSES and not self._writer.has_failed:
                await self._writer.settle()
            if self._writer.has_failed:
                break
        for task in self._tasks.values():
            task.cancel()

    def _accept(self, call: calls_pb2.CarriedCall, group: asyncio.TaskGroup) -> None:
        number, kind = call.number, call.WhichOneof("request")
        if kind == "cancel":
            if (task := self._tasks.get(number)) is not None:
                # After its first step, which was scheduled before: a task that never ran would leave nothing behind.
                self._loop.call_soon(task.cancel)
            return
        if number <= self._last:
            message = f"number {number} is not above {self._last}, that of the call before"
            raise InvalidArgumentError(message, field="calls.number")
        self._last = number
        self._tasks[number] = group.create_task(self._run(number, kind or "nothing", call))

    async def _run(self, number: int, kind: str, call: calls_pb2.CarriedCall) -> None:
        error = None
        try:
            method = self._method(kind)
            with self._open_rpcs.track(method.name):
                await self._call(method, number, _parsed(method, getattr(call, kind)), _timeout_s(call))
        except Exception as raised:
            error = shown_error(raised)
        finally:
            del self._tasks[number]
            self._close_if_idle()
        if error is not None:
            status = status_of(error).SerializeToString()
            self._writer.put(calls_pb2.CarriedResponse(number=number, ended=True, status=status))

    async def _call(self, method: CarriedMethod, number: int, request: Any, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                await self._respond(number, method.handler(request, _CONTEXT))
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeadlineExceededError("the call has not ended within its deadline") from None

    async def _respond(self, number: int, result: Any) -> None:
        if not inspect.isasyncgen(result):
            data = (await result).SerializeToString()
            self._writer.put(calls_pb2.CarriedResponse(number=number, response=data, ended=True))
            return
        response: Any
        async with aclosing(result) as responses:
            async for response in responses:
                data = response.SerializeToString()
                self._writer.put(calls_pb2.CarriedResponse(number=number, response=data))
        self._writer.put(calls_pb2.CarriedResponse(number=number, ended=True))

    def _method(self, kind: str) -> CarriedMethod:
        if len(self._tasks) > MAX_OPEN_CALLS:
            text = f"more than {MAX_OPEN_CALLS} calls are open on this stream"
            raise ResourceExhaustedError(text, reason="TOO_MANY_CALLS")
        if (method := self._methods.get(kind)) is None:
            raise InvalidArgumentError(f"{kind} is not carried here", reason="NOT_CARRIED")
        return method


_CONTEXT = _CarriedContext()


def _timeout_s(call: calls_pb2.CarriedCall) -> float:
    timeout_s = call.timeout.ToNanoseconds() / 1e9
    if not 0.0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidArgumentError(f"timeout must be in (0, {MAX_TIMEOUT_S:g}] s", field="calls.timeout")
    return timeout_s


def _parsed(method: CarriedMethod, data: bytes) -> Any:
    if len(data) > UNCOUNTED_BYTES:
        text = f"the request has {len(data)} bytes; carried ones have at most {UNCOUNTED_BYTES}"
        raise InvalidArgumentError(text, reason="REQUEST_TOO_LARGE")
    try:
        return method.parse(data)
    except DecodeError as error:
        raise InvalidArgumentError(f"message cannot be parsed: {error}", reason="MALFORMED_MESSAGE") from None
