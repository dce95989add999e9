"""Calls that are carried by one stream: `CallStream` is the caller's end, `CarriedCalls` the end that serves them.

A gRPC call wakes gRPC's threads several times. Here many calls share one stream, and all that begins in one turn of the
event loop leaves in one message. protos/splitserve/v1/calls.proto describes the protocol. A handler behaves as in a
gRPC call: it runs in a task of its own, which its caller, its deadline or the end of the stream cancels.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import grpc
from google.rpc import status_pb2  # type: ignore[import-untyped]
from typing_extensions import override

from splitserve.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    PermissionDeniedError,
    ResourceExhaustedError,
    SplitserveError,
    UnauthenticatedError,
    UnavailableError,
)
from splitserve.logs import log_event, log_exception
from splitserve.rpc.message_bounds import UNCOUNTED_BYTES
from splitserve.rpc.server import WRITE_GRACE_S, OpenRpcs, StreamWriter, parsed
from splitserve.rpc.status import error_from_rpc, error_from_status, shown_error, status_of
from splitserve.runtime.cancellation import raise_if_cancelled
from splitserve.v1 import calls_pb2, decode_pb2, prefill_pb2
from splitserve.v1.calls_pb2_grpc import CallServiceServicer
from splitserve.v1.decode_pb2_grpc import DecodeServiceServicer
from splitserve.v1.prefill_pb2_grpc import PrefillServiceServicer

MAX_OPEN_CALLS = 2**16
"""Most calls that are open on one stream."""
MAX_HELD_RESPONSES = 2**13
"""Most responses that wait for a caller who does not read. Above it nothing is read from this caller."""
MAX_TIMEOUT_S = 86_400.0
BATCH_BYTES, BATCH_ITEMS = 48 * 2**10, 4096
"""A batch above this size goes on in a new message, so that each is parsed on the reader's event loop."""


class Sized(Protocol):
    """A protobuf message, as far as a batch is concerned."""

    def ByteSize(self) -> int:
        """Its serialized size, bytes."""
        ...


M = TypeVar("M", bound=Sized)


class BatchWriter(Generic[M]):
    """Writes small messages of many senders to one stream. Messages that are put in one turn of the event loop, during
    a write, or within `wait_s` leave in one batch. Holds any number of messages: senders look at `held`."""

    def __init__(
        self,
        write: Callable[[Any], Awaitable[None]],
        message_of: Callable[[list[M]], Any],
        wait_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`write`: see StreamWriter. `message_of` makes one message of a batch; `wait_s` returns for how many seconds a
        batch waits for further messages at present."""
        self._writer = StreamWriter(write, self._written)
        self._message_of, self._wait_s = message_of, wait_s
        self._items: list[M] = []
        self._flushing = self._left_over = False

    def put(self, item: M) -> None:
        """Adds a message; never blocks. After a failed write it is dropped."""
        if self._writer.has_failed:
            self._items.clear()
            return
        self._items.append(item)
        if not self._flushing:
            self._flushing = True
            self._flush_later()

    @property
    def held(self) -> int:
        """Messages that wait to be written."""
        return len(self._items)

    @property
    def has_failed(self) -> bool:
        """Whether a write has failed; nothing is written any more."""
        return self._writer.has_failed

    async def settle(self) -> None:
        """Waits until all messages are written, up to WRITE_GRACE_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WRITE_GRACE_S):
                while self._flushing and not self._writer.has_failed:
                    await self._writer.settle()
                    await asyncio.sleep(0)

    def _flush_later(self) -> None:
        loop, wait_s = asyncio.get_running_loop(), self._wait_s()
        if wait_s:
            loop.call_later(wait_s, self._flush)
        else:
            loop.call_soon(self._flush)

    def _written(self) -> None:
        if not self._items or not self._writer.is_ready:
            self._flushing = self._writer.has_failed
        elif self._left_over or not self._wait_s():
            self._flush()  # messages that the last batch had no room for have waited already
        else:
            self._flush_later()

    def _flush(self) -> None:
        if not self._items:  # dropped
            self._flushing = False
            return
        size = count = 0
        for item in self._items:
            size += item.ByteSize()
            if (size > BATCH_BYTES and count) or count == BATCH_ITEMS:
                break
            count += 1
        batch, self._items = self._items[:count], self._items[count:]
        self._left_over = bool(self._items)
        self._writer.begin(self._message_of(batch))


class _CarriedContext:
    """The context of a carried call's handler. Initial metadata need not be sent: a carried call always begins before
    it can be cancelled."""

    async def send_initial_metadata(self, initial_metadata: Any, /) -> None:
        """Does nothing."""


class CarriedMethod(NamedTuple):
    """A method whose calls may be carried."""

    name: str
    """The full name, "/package.Service/Method"."""
    parse: Callable[[bytes], Any]
    handler: Callable[[Any, Any], Any]
    """The servicer's method. Of its context it may use `send_initial_metadata` only."""


def decode_methods(service: DecodeServiceServicer) -> dict[str, CarriedMethod]:
    """The methods of a decode worker whose calls may be carried, by the field of CarriedCall that has the request."""
    path, v1 = "/splitserve.v1.DecodeService/", decode_pb2
    return {
        "reserve": CarriedMethod(path + "Reserve", v1.ReserveRequest.FromString, service.Reserve),
        "abort": CarriedMethod(path + "Abort", v1.AbortRequest.FromString, service.Abort),
    }


def prefill_methods(service: PrefillServiceServicer) -> dict[str, CarriedMethod]:
    """The methods of a prefill worker whose calls may be carried."""
    name, parse = "/splitserve.v1.PrefillService/Prefill", prefill_pb2.PrefillRequest.FromString
    return {"prefill": CarriedMethod(name, parse, service.Prefill)}


class CarriedCalls(CallServiceServicer):
    """Serves the streams of all callers."""

    def __init__(self, methods: Mapping[str, CarriedMethod], open_rpcs: OpenRpcs) -> None:
        """`methods`: see `decode_methods`. `open_rpcs` counts each carried call."""
        self._methods, self._open_rpcs = methods, open_rpcs
        self._streams: set[_Stream] = set()
        self._closed = False

    @override
    async def Carry(  # type: ignore[override]
        self, requests: AsyncIterator[calls_pb2.CarryRequest], context: Any
    ) -> None:
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
        """Runs calls until the caller ends the stream, or `close`; then cancels the calls that are left."""
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
                # After the task's first step, which is scheduled already: a task that never ran would not clean up.
                self._loop.call_soon(task.cancel)
            return
        if number <= self._last:
            message = f"number {number} is not above {self._last}, the number of the call before"
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
    return parsed(method.parse, data)


Kind = Literal["reserve", "prefill", "abort"]
MAX_CARRIED_BYTES = 16 * 2**10
"""Most bytes of a request that callers send by the stream: calls behind a larger one would wait for it."""


class CarriedCall:
    """A call that has begun. Wait for `ended`; `cancel` in any case."""

    __slots__ = ("_deadline", "_number", "_on_response", "_stream", "ended")

    def __init__(
        self, stream: CallStream, number: int, timeout_s: float, on_response: Callable[[bytes], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done after the last response; raises the error of a call that has failed."""
        self._stream, self._number, self._on_response = stream, number, on_response
        self._deadline = loop.call_later(timeout_s, self._expire)

    def fail(self, error: SplitserveError) -> None:
        """Ends the call on this side with an error, and cancels it at the peer. Does nothing once the call has
        ended."""
        if self._stream.drop(self._number):
            self.end(error)

    def _expire(self) -> None:
        self.fail(DeadlineExceededError("the call has not ended within its deadline"))

    def cancel(self) -> None:
        """Cancels the call on both sides; the peer has begun it by then. Does nothing once the call has ended."""
        if self._stream.drop(self._number):
            self._deadline.cancel()
            self.ended.cancel()

    def accept(self, response: calls_pb2.CarriedResponse, who: str) -> None:
        """Takes a response of the peer. A response that cannot be read fails this call, not the stream."""
        try:
            if response.HasField("response"):
                self._on_response(response.response)
            if response.status:
                self.end(error_from_status(status_pb2.Status.FromString(response.status)))
            elif response.ended:
                self.end(None)
        except Exception as error:
            log_exception("call.malformed_response", error)
            self._stream.drop(self._number)
            self.end(SplitserveError(f"{who} has sent a response that cannot be read"))

    def end(self, error: SplitserveError | None) -> None:
        """Marks the call as ended, after the stream has forgotten it."""
        self._deadline.cancel()
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
            return
        self.ended.set_exception(error)
        self.ended.exception()  # retrieved here, because whoever waited for it may have been cancelled meanwhile


class CallStream:
    """The calls to one peer, on one stream after the other. `run` opens a stream once there are calls."""

    def __init__(
        self, open_stream: Callable[[], Any], who: str, wait_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        """`open_stream` calls CallService.Carry; `who` names the peer in errors; `wait_s`: see BatchWriter."""
        self._open_stream, self._who, self._wait_s = open_stream, who, wait_s
        self._numbers = itertools.count(1)
        self._calls: dict[int, CarriedCall] = {}
        self._waiting: list[calls_pb2.CarriedCall] = []
        """Messages that wait while no stream is open."""
        self._writer: BatchWriter[calls_pb2.CarriedCall] | None = None
        self._wanted = asyncio.Event()

    def begin(
        self, kind: Kind, request: bytes, timeout_s: float, on_response: Callable[[bytes], None]
    ) -> CarriedCall:
        """Begins a call with a serialized request. `on_response` gets each response, serialized."""
        number = next(self._numbers)
        call = self._calls[number] = CarriedCall(self, number, timeout_s, on_response)
        message = calls_pb2.CarriedCall(number=number)
        setattr(message, kind, request)
        message.timeout.FromNanoseconds(int(timeout_s * 1e9))
        self._say(message)
        return call

    async def run(self) -> None:
        """Keeps a stream open while there are calls, until cancelled. The calls of a stream that breaks fail with its
        error."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            error: SplitserveError = UnavailableError(f"{self._who} went away", reason="WORKER_LOST")
            try:
                await self._carry()
            except SplitserveError as broken:
                error = broken
                log_event("calls.broken", peer=self._who, reason=error.reason, calls=len(self._calls))
            except Exception as unforeseen:  # goes on: later calls need the next stream at once
                log_exception("calls.broken", unforeseen)
            finally:
                self.fail_all(error)
            raise_if_cancelled()

    def fail_all(self, error: SplitserveError) -> None:
        """Fails all calls that have begun."""
        calls, self._calls = self._calls, {}
        self._waiting.clear()
        for call in calls.values():
            call.end(error)

    def drop(self, number: int) -> bool:
        """Forgets a call and cancels it at the peer. False if it has ended."""
        if self._calls.pop(number, None) is None:
            return False
        self._say(calls_pb2.CarriedCall(number=number, cancel=True))
        return True

    async def _carry(self) -> None:
        stream = self._open_stream()
        self._writer = BatchWriter(
            stream.write, lambda batch: calls_pb2.CarryRequest(calls=batch), self._wait_s
        )
        try:
            for message in self._waiting:
                self._writer.put(message)
            self._waiting.clear()
            async for message in stream:
                for response in message.responses:
                    self._accept(response)
            raise UnavailableError(f"{self._who} has closed its calls", reason="WORKER_LOST")
        except grpc.aio.AioRpcError as error:
            known = error_from_rpc(error)
            if isinstance(known, UnauthenticatedError | PermissionDeniedError):
                raise known from None
            # The stream's error is no call's error: no call was refused, and each may have been carried out.
            text = f"the calls to {self._who} have broken: {known.message}"
            raise UnavailableError(text, reason="WORKER_LOST") from None
        finally:
            self._writer = None
            stream.cancel()

    def _accept(self, response: calls_pb2.CarriedResponse) -> None:
        number = response.number
        ends = response.ended or bool(response.status)
        # A response to an unknown call: this side has given the call up.
        call = self._calls.pop(number, None) if ends else self._calls.get(number)
        if call is not None:
            call.accept(response, self._who)

    def _say(self, message: calls_pb2.CarriedCall) -> None:
        if self._writer is not None:
            self._writer.put(message)
            return
        self._waiting.append(message)
        self._wanted.set()
