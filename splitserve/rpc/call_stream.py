"""Calls to one peer that are carried by one stream, as their caller sees them; `carried_calls` is the other end.

A call of gRPC wakes its threads several times; here many calls share one stream, and what is said in one turn of the
loop is one message. The protocol is that of protos/splitserve/v1/calls.proto.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, Literal

import grpc
from google.rpc import status_pb2  # type: ignore[import-untyped]

from splitserve.errors import (
    DeadlineExceededError,
    PermissionDeniedError,
    SplitserveError,
    UnauthenticatedError,
    UnavailableError,
)
from splitserve.logs import log_event, log_exception
from splitserve.rpc.status import error_from_rpc, error_from_status
from splitserve.rpc.writing import BatchWriter
from splitserve.runtime.cancellation import raise_if_cancelled
from splitserve.v1 import calls_pb2

Kind = Literal["reserve", "prefill", "abort"]
MAX_CARRIED_BYTES = 16 * 2**10
"""Most bytes of a request that the stream should carry: what comes after a larger one would wait for it."""


class CarriedCall:
    """A call that has begun. Wait for `ended`; `cancel` in any case."""

    __slots__ = ("_deadline", "_number", "_on_response", "_stream", "ended")

    def __init__(
        self, stream: CallStream, number: int, timeout_s: float, on_response: Callable[[bytes], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done after the last response; it raises why the call has failed."""
        self._stream, self._number, self._on_response = stream, number, on_response
        self._deadline = loop.call_later(timeout_s, self._expire)

    def fail(self, error: SplitserveError) -> None:
        """Ends the call here with an error, and cancels it there. Does nothing once it has ended."""
        if self._stream.drop(self._number):
            self.end(error)

    def cancel(self) -> None:
        """Cancels the call on both sides; the peer begins it before. Does nothing once it has ended."""
        if self._stream.drop(self._number):
            self._deadline.cancel()
            self.ended.cancel()

    def accept(self, response: calls_pb2.CarriedResponse, who: str) -> None:
        """Takes what the peer says. What cannot be read fails this call, not the stream."""
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
        """Marks the call as ended; the stream has let go of it."""
        self._deadline.cancel()
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
            return
        self.ended.set_exception(error)
        self.ended.exception()  # who waited may have been cancelled meanwhile: nobody then has to see it

    def _expire(self) -> None:
        self.fail(DeadlineExceededError("the call has not ended within its deadline"))


class CallStream:
    """The calls to one peer, on one stream after the other. It is opened by `run` once there are calls."""

    def __init__(
        self, open_stream: Callable[[], Any], who: str, wait_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        """`open_stream` calls CallService.Carry; `who` names the peer in errors; `wait_s` says for how many seconds
        what is said now may wait for others to leave with it."""
        self._open_stream, self._who, self._wait_s = open_stream, who, wait_s
        self._numbers = itertools.count(1)
        self._calls: dict[int, CarriedCall] = {}
        self._waiting: list[calls_pb2.CarriedCall] = []
        """What is said while no stream is open."""
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
        """Keeps a stream open while there are calls, until cancelled. Calls of one that breaks fail as it does."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            error: SplitserveError = UnavailableError(f"{self._who} went away", reason="WORKER_LOST")
            try:
                await self._carry()
            except SplitserveError as broken:
                error = broken
                log_event("calls.broken", peer=self._who, reason=error.reason, calls=len(self._calls))
            except Exception as unforeseen:  # calls wait for the next stream, which is to come at once
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
        """Lets go of a call and cancels it there. False if it has ended."""
        if self._calls.pop(number, None) is None:
            return False
        self._say(calls_pb2.CarriedCall(number=number, cancel=True))
        return True

    async def _carry(self) -> None:
        stream = self._open_stream()
        self._writer = BatchWriter(stream.write, _request_of, self._wait_s)
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
            # It is the stream's, and no call's: none of them was refused, and each may have been carried out.
            text = f"the calls to {self._who} have broken: {known.message}"
            raise UnavailableError(text, reason="WORKER_LOST") from None
        finally:
            self._writer = None
            stream.cancel()

    def _accept(self, response: calls_pb2.CarriedResponse) -> None:
        number = response.number
        ends = response.ended or bool(response.status)
        # One that is not known was given up here.
        call = self._calls.pop(number, None) if ends else self._calls.get(number)
        if call is not None:
            call.accept(response, self._who)

    def _say(self, message: calls_pb2.CarriedCall) -> None:
        if self._writer is not None:
            self._writer.put(message)
            return
        self._waiting.append(message)
        self._wanted.set()


def _request_of(batch: list[calls_pb2.CarriedCall]) -> calls_pb2.CarryRequest:
    return calls_pb2.CarryRequest(calls=batch)
