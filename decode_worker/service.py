"""The gRPC service of a decode worker: reservations, aborts, output streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import grpc
from google.protobuf import duration_pb2
from typing_extensions import override

from decode_worker.kv_consumer import KvConsumer, Outputs
from decode_worker.output_streams import OutputStreams
from decode_worker.requests import Granted, Reply, WaitingReservation
from kv_transfer.transports.polling import PollDealer
from splitserve.errors import FailedPreconditionError, InvalidArgumentError, SplitserveError
from splitserve.rpc.carried_calls import CarriedMethod, decode_methods
from splitserve.v1 import decode_pb2
from splitserve.v1.decode_pb2_grpc import DecodeServiceServicer, add_DecodeServiceServicer_to_server
from worker.build import EngineParts
from worker.messages import engine_request
from worker.process import PoolService, WorkerProcess

Context = grpc.aio.ServicerContext[Any, Any]


class DecodeService(DecodeServiceServicer, PoolService):
    """Reserves blocks, aborts requests and streams outputs. Request ids are unique per coordinator."""

    pool = "decode"
    consumer: KvConsumer
    """Set when the engine is built. Its methods are for the engine thread, but for `status`."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._lease = duration_pb2.Duration()
        self._lease.FromNanoseconds(round(worker.config.lease_s * 1e9))
        self._streams = OutputStreams(self._on_coordinator_lost, worker.config.lease_s)
        self._reserving = 0
        """Number of open Reserve calls."""

    @override
    def make_connector(
        self, parts: EngineParts, epoch: int, on_idle: Callable[[], None], polls: PollDealer | None = None
    ) -> KvConsumer:
        self.consumer = KvConsumer(parts, epoch, self._emit, on_idle, self._worker.spans, polls)
        return self.consumer

    @override
    def add_to(self, server: grpc.aio.Server) -> str:
        add_DecodeServiceServicer_to_server(self, server)
        return decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name

    @override
    def carried_methods(self) -> Mapping[str, CarriedMethod]:
        return decode_methods(self)

    @override
    def on_ended_writers(self, agent_ids: Sequence[str]) -> None:
        """Shortens the quarantine of blocks that these workers were writing."""
        now = time.monotonic()
        self._worker.engine.post(lambda _core: self.consumer.writers_lost(agent_ids, now))

    @override
    def busy(self) -> bool:
        return self._reserving > 0 or self.consumer.status.in_progress > 0

    @override
    def close(self) -> None:
        """Ends the output streams and leases."""
        self._streams.close_all()

    def _emit(self, outputs: Outputs) -> None:
        """Passes a step's outputs from the engine's thread to their streams."""
        self._loop.call_soon_threadsafe(self._streams.deliver, outputs)

    @override
    async def Reserve(
        self, request: decode_pb2.ReserveRequest, context: Context
    ) -> decode_pb2.ReserveResponse:
        """Reserves blocks, or queues for them, and answers with their ticket."""
        # Awaited here: between the check of the stream and the queued reservation the stream must not be lost
        # unnoticed.
        tenant = request.precedence.tenant_key
        grammar = await self._worker.parts.grammars.compiled(request.sampling, tenant)
        self._worker.require_accepting("decode")
        if not self._streams.takes(request.coordinator_id, request.attachment):
            raise FailedPreconditionError(
                f"coordinator {request.coordinator_id!r} has no output stream open here",
                reason="NO_OUTPUT_STREAM",
            )
        now = time.monotonic()
        engine_id = _engine_id(request.coordinator_id, request.request_id)
        prompt = engine_request(
            request,
            engine_id=engine_id,
            facts=self._worker.parts.facts,
            now=now,
            prefill_only=False,
            grammar=grammar,
            ceilings=self._worker.config.ceilings,
        )
        reply: asyncio.Future[Granted] = self._loop.create_future()
        entry = WaitingReservation(
            prompt,
            request.coordinator_id,
            request.writer_agent_id,
            now,
            self._replying(reply),
            local_prefill_tokens=request.local_prefill_tokens,
        )
        self._reserving += 1
        response = None
        try:
            await self._worker.engine.call(lambda core: self.consumer.reserve(core, entry, time.monotonic()))
            granted = await reply
            ticket = granted.ticket.to_proto(time.monotonic()) if granted.ticket is not None else None
            response = decode_pb2.ReserveResponse(ticket=ticket, wait_ms=granted.wait_s * 1e3)
        finally:
            self._reserving -= 1
            if not self._reserving:
                self._worker.service_idle()
            if response is None:
                # Cancelled or failed: the caller has no ticket, so nobody can write.
                ended_s, coordinator_id = time.monotonic(), request.coordinator_id
                self._worker.engine.post(
                    lambda core: self.consumer.abort(core, engine_id, coordinator_id, True, ended_s)
                )
        return response

    @override
    async def Abort(self, request: decode_pb2.AbortRequest, context: Context) -> decode_pb2.AbortResponse:
        """Ends a request in any state."""
        engine_id = _engine_id(request.coordinator_id, request.request_id)
        now = time.monotonic()
        call = self._worker.engine.call(
            lambda core: self.consumer.abort(core, engine_id, request.coordinator_id, request.no_writer, now)
        )
        # Shielded: a step may last longer than the caller waits, and a call that is cancelled before it begins does not
        # run.
        return decode_pb2.AbortResponse(aborted=await asyncio.shield(call))

    @override
    async def StreamOutputs(
        self, request: decode_pb2.StreamOutputsRequest, context: Context
    ) -> AsyncIterator[decode_pb2.StreamOutputsResponse]:
        """Streams the outputs of a coordinator's requests; ends the requests that the coordinator names no more."""
        coordinator_id = _checked_id(request.coordinator_id)
        if not request.attachment:
            raise InvalidArgumentError("attachment must be at least 1", field="attachment")
        positions = {attached.request_id: attached.next_position for attached in request.requests}
        stream = self._streams.open(coordinator_id, request.attachment)
        # Queued before the coordinator can know that the stream is open, so before any reservation that names it.
        joining = asyncio.ensure_future(self._keep_requests(coordinator_id, frozenset(positions)))
        try:
            yield decode_pb2.StreamOutputsResponse(epoch=self._worker.epoch, lease=self._lease)
            # What the engine had emitted before it answered has been delivered by now.
            live = await joining
            if lost := stream.rewind(positions, live):
                yield decode_pb2.StreamOutputsResponse(lost_request_ids=lost)
            async for message in stream.messages():
                yield message
        finally:
            joining.cancel()
            self._streams.release(stream)

    @override
    async def AcknowledgeOutputs(
        self, request: decode_pb2.AcknowledgeOutputsRequest, context: Context
    ) -> decode_pb2.AcknowledgeOutputsResponse:
        """Forgets messages that the coordinator has received."""
        self._streams.acknowledge(_checked_id(request.coordinator_id), request.attachment, request.messages)
        return decode_pb2.AcknowledgeOutputsResponse()

    async def _keep_requests(self, coordinator_id: str, request_ids: frozenset[str]) -> frozenset[str]:
        now = time.monotonic()
        return await self._worker.engine.call(
            lambda core: self.consumer.keep_requests(core, coordinator_id, request_ids, now)
        )

    def _replying(self, reply: asyncio.Future[Granted]) -> Reply:
        """A callback for the engine thread that sets the future on the event loop."""

        def settle(result: Granted | SplitserveError) -> None:
            if reply.done():
                return
            if isinstance(result, SplitserveError):
                reply.set_exception(result)
            else:
                reply.set_result(result)

        return lambda result: self._loop.call_soon_threadsafe(settle, result)

    def _on_coordinator_lost(self, coordinator_id: str) -> None:
        """Ends all requests of a coordinator that has not read its outputs for the length of its lease."""
        now, none = time.monotonic(), frozenset[str]()
        self._worker.engine.post(lambda core: self.consumer.keep_requests(core, coordinator_id, none, now))


def _engine_id(coordinator_id: str, request_id: str) -> str:
    """An id that is unique in this worker: coordinators choose request ids independently."""
    return f"{coordinator_id}/{request_id}"


def _checked_id(coordinator_id: str) -> str:
    """Raises InvalidArgumentError for an id with which `_engine_id` would be ambiguous."""
    if not coordinator_id or "/" in coordinator_id:
        message = 'coordinator_id must not be empty and not contain "/"'
        raise InvalidArgumentError(message, field="coordinator_id")
    return coordinator_id
