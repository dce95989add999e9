"""Reserve, Prefill and Abort at one boot of one worker: carried by a stream that they share, or calls of their own.

The stream costs a fraction of a call, so it carries all that is short, if the worker serves one. A long prompt would
hold back what comes after it, so it is a call of its own. A failure, a deadline and a cancellation are the same either
way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from coordinator.workers.snapshot import Worker
from splitserve.errors import SplitserveError, UnavailableError
from splitserve.rpc.call_stream import MAX_CARRIED_BYTES, CallStream, CarriedCall
from splitserve.rpc.credentials import Metadata
from splitserve.rpc.status import error_from_rpc
from splitserve.v1 import decode_pb2, prefill_pb2
from splitserve.v1.calls_pb2_grpc import CallServiceStub
from splitserve.v1.decode_pb2_grpc import DecodeServiceStub
from splitserve.v1.prefill_pb2_grpc import PrefillServiceStub

ARRIVE_S = 2.0
"""How long cancelling a Prefill call of its own waits for the call to reach its worker first."""

T = TypeVar("T")
OnPrefill = Callable[[prefill_pb2.PrefillResponse], None]


class WorkerCalls:
    """Calls raise the SplitserveError of the worker's status; UnavailableError (WORKER_LOST) once it is lost."""

    def __init__(self, worker: Worker, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        """`metadata` goes with each call."""
        self._worker, self._metadata = worker, metadata
        self._prefill, self._decode = PrefillServiceStub(channel), DecodeServiceStub(channel)
        self._stream = CallStream(partial(CallServiceStub(channel).Carry, metadata=metadata), worker.name)
        self._reserving: dict[str, Callable[[SplitserveError], None]] = {}
        """What fails a reservation that waits, by attempt id."""
        self._lost: UnavailableError | None = None

    async def run(self) -> None:
        """Keeps the stream open until cancelled."""
        await self._stream.run()

    async def reserve(
        self, request: decode_pb2.ReserveRequest, timeout_s: float
    ) -> decode_pb2.ReserveResponse:
        """Calls Reserve."""
        self._require_live()
        try:
            if (data := self._carried(request)) is None:
                return await self._reserve_by_itself(request, timeout_s)
            responses: list[decode_pb2.ReserveResponse] = []
            call = self._stream.begin("reserve", data, timeout_s, partial(_read_reserved, responses))
            self._reserving[request.request_id] = call.fail
            await _end_of(call)
            if not responses:
                raise UnavailableError(f"{self._worker.name} ended a reservation early", reason="WORKER_LOST")
            return responses[0]
        finally:
            self._reserving.pop(request.request_id, None)

    async def prefill(
        self, request: prefill_pb2.PrefillRequest, timeout_s: float, on_response: OnPrefill
    ) -> None:
        """Calls Prefill until its end.

        Cancelling this cancels the call once it has reached the worker: if it never arrived, decode could not tell
        whether its ticket is in use.
        """
        self._require_live()
        if (data := self._carried(request)) is None:
            await self._prefill_by_itself(request, timeout_s, on_response)
        else:
            await _end_of(self._stream.begin("prefill", data, timeout_s, partial(_read_prefill, on_response)))

    async def abort(self, request: decode_pb2.AbortRequest, timeout_s: float) -> None:
        """Calls Abort. On the stream it cannot overtake the reservation that it ends."""
        self._require_live()
        if (data := self._carried(request)) is None:
            call = self._decode.Abort(request, timeout=timeout_s, metadata=self._metadata)
            await self._response(call)
        else:
            await _end_of(self._stream.begin("abort", data, timeout_s, _ignore))

    def fail_reservation(self, attempt_id: str, error: SplitserveError) -> bool:
        """Fails the Reserve call of an attempt. False if it has none."""
        fail = self._reserving.get(attempt_id)
        if fail is not None:
            fail(error)
        return fail is not None

    def lose(self, error: UnavailableError) -> None:
        """Fails the calls on the stream, and all that come; closing the channel fails the others."""
        self._lost = error
        self._stream.fail_all(error)

    def _carried(self, request: Message) -> bytes | None:
        """The request as the stream carries it; None if it has to be a call of its own."""
        if not self._worker.carries_calls:
            return None
        data = request.SerializeToString()
        return data if len(data) <= MAX_CARRIED_BYTES else None

    async def _reserve_by_itself(
        self, request: decode_pb2.ReserveRequest, timeout_s: float
    ) -> decode_pb2.ReserveResponse:
        call = self._decode.Reserve(request, timeout=timeout_s, metadata=self._metadata)
        failed: list[SplitserveError] = []

        def fail(error: SplitserveError) -> None:
            failed.append(error)
            call.cancel()

        self._reserving[request.request_id] = fail
        try:
            return await self._response(call)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not failed or (task is not None and task.cancelling()):
                raise
            raise failed[0] from None

    async def _prefill_by_itself(
        self, request: prefill_pb2.PrefillRequest, timeout_s: float, on_response: OnPrefill
    ) -> None:
        call = self._prefill.Prefill(request, timeout=timeout_s, metadata=self._metadata)
        arrived = asyncio.ensure_future(call.initial_metadata())
        try:
            await asyncio.shield(arrived)
            async for response in call:
                on_response(response)
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            raise self._translated(error) from None
        finally:
            await self._cancel_call(call, arrived)

    async def _cancel_call(self, call: grpc.aio.Call, arrived: asyncio.Future[Any]) -> None:
        try:
            if not arrived.done() and self._lost is None:
                await asyncio.wait([arrived], timeout=ARRIVE_S)
        finally:
            call.cancel()
            arrived.cancel()

    async def _response(self, call: grpc.aio.UnaryUnaryCall[Any, T]) -> T:
        try:
            return await call
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            raise self._translated(error) from None
        finally:
            call.cancel()

    def _require_live(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _translated(self, error: grpc.aio.AioRpcError | asyncio.CancelledError) -> BaseException:
        """Translates what ended a call: its status, a cancellation from outside, or `close`, which cancels too."""
        if isinstance(error, grpc.aio.AioRpcError):
            return error_from_rpc(error)
        task = asyncio.current_task()
        cancelled_from_outside = task is None or task.cancelling() > 0
        return error if cancelled_from_outside or self._lost is None else self._lost


async def _end_of(call: CarriedCall) -> None:
    try:
        await call.ended
    finally:
        call.cancel()


def _read_reserved(responses: list[decode_pb2.ReserveResponse], data: bytes) -> None:
    responses.append(decode_pb2.ReserveResponse.FromString(data))


def _read_prefill(on_response: OnPrefill, data: bytes) -> None:
    on_response(prefill_pb2.PrefillResponse.FromString(data))


def _ignore(_response: bytes) -> None:
    """What an Abort has ended does not matter."""
