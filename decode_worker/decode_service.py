"""The gRPC face of a decode worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from decode_worker.output_streams import OutputStreams
from decode_worker.receive_listener import Outputs, ReceiveListener
from decode_worker.waiting_room import Answer, Granted, WaitingReservation
from engine.host import WorkerHost
from engine.messages import engine_request
from splitserve.errors import FailedPreconditionError, InvalidArgumentError, SplitserveError
from splitserve.v1 import decode_pb2
from splitserve.v1.decode_pb2_grpc import DecodeServiceServicer

Context = grpc.aio.ServicerContext[Any, Any]


class DecodeService(DecodeServiceServicer):
    """Reserves, aborts and streams. Ids of coordinators keep their requests apart."""

    def __init__(self, worker: WorkerHost[ReceiveListener], loop: asyncio.AbstractEventLoop) -> None:
        self._worker = worker
        self._loop = loop
        self._streams = OutputStreams(self._on_stream_lost)
        self._reserving = 0

    @property
    def reserving(self) -> int:
        """Reserve calls that are open."""
        return self._reserving

    def deliver(self, outputs: Outputs) -> None:
        """Hands a step's outputs to their streams; runs on the event loop."""
        self._streams.deliver(outputs)

    def close(self) -> None:
        """Ends the output streams."""
        self._streams.close_all()

    async def Reserve(
        self, request: decode_pb2.ReserveRequest, context: Context
    ) -> decode_pb2.ReserveResponse:
        """See DecodeService.Reserve in the proto."""
        # First, because the stream must not break unnoticed between the look at it and the reservation.
        grammar = await self._worker.parts.grammars.compiled(request.sampling)
        self._worker.require_accepting()
        if not self._streams.is_open(request.coordinator_id):
            raise FailedPreconditionError(
                f"coordinator {request.coordinator_id!r} has no output stream open here",
                reason="NO_OUTPUT_STREAM",
            )
        now = time.monotonic()
        engine_id = _engine_id(request.coordinator_id, request.request_id)
        prompt = engine_request(
            request,
            engine_id=engine_id,
            facts=self._worker.parts.runner.facts,
            now=now,
            prefill_only=False,
            grammar=grammar,
            ceilings=self._worker.config.ceilings,
        )
        answer: asyncio.Future[Granted] = self._loop.create_future()
        entry = WaitingReservation(
            prompt,
            request.coordinator_id,
            request.writer_agent_id,
            now,
            self._answering(answer),
            local_prefill_tokens=request.local_prefill_tokens,
        )
        self._reserving += 1
        granted = None
        try:
            await self._worker.engine.call(lambda core, receiver: receiver.reserve(core, entry))
            granted = await answer
        finally:
            self._reserving -= 1
            if granted is None:
                # Cancelled or failed: the caller has no ticket, so nobody can write.
                self._abort_later(engine_id, request.coordinator_id)
        ticket = granted.ticket.to_proto(time.monotonic()) if granted.ticket is not None else None
        return decode_pb2.ReserveResponse(ticket=ticket, wait_ms=granted.wait_s * 1e3)

    async def Abort(self, request: decode_pb2.AbortRequest, context: Context) -> decode_pb2.AbortResponse:
        """See DecodeService.Abort in the proto."""
        engine_id = _engine_id(request.coordinator_id, request.request_id)
        now = time.monotonic()
        aborted = await self._worker.engine.call(
            lambda core, receiver: receiver.abort(
                core, engine_id, request.coordinator_id, request.no_writer, now
            )
        )
        return decode_pb2.AbortResponse(aborted=aborted)

    async def StreamOutputs(
        self, request: decode_pb2.StreamOutputsRequest, context: Context
    ) -> AsyncIterator[decode_pb2.StreamOutputsResponse]:
        """See DecodeService.StreamOutputs in the proto."""
        if not request.coordinator_id:
            raise InvalidArgumentError("coordinator_id must not be empty", field="coordinator_id")
        stream = self._streams.open(request.coordinator_id)
        try:
            yield decode_pb2.StreamOutputsResponse(epoch=self._worker.epoch)
            async for outputs in stream.batches():
                yield decode_pb2.StreamOutputsResponse(outputs=outputs)
        finally:
            self._streams.release(request.coordinator_id, stream)

    def _answering(self, answer: asyncio.Future[Granted]) -> Answer:
        def settle(result: Granted | SplitserveError) -> None:
            if answer.done():
                return
            if isinstance(result, SplitserveError):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        def post(result: Granted | SplitserveError) -> None:
            self._loop.call_soon_threadsafe(settle, result)

        return post

    def _abort_later(self, engine_id: str, coordinator_id: str) -> None:
        now = time.monotonic()
        self._worker.engine.post(
            lambda core, receiver: receiver.abort(core, engine_id, coordinator_id, True, now)
        )

    def _on_stream_lost(self, coordinator_id: str) -> None:
        now = time.monotonic()
        self._worker.engine.post(lambda core, receiver: receiver.coordinator_lost(core, coordinator_id, now))


def _engine_id(coordinator_id: str, request_id: str) -> str:
    """Unique in this worker: coordinators choose request ids without asking each other."""
    return f"{coordinator_id}/{request_id}"
