"""The gRPC service of a decode worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf import duration_pb2

from decode_worker.attachment import UNNUMBERED
from decode_worker.kv_consumer import KvConsumer, Outputs
from decode_worker.output_streams import OutputStreams
from decode_worker.reservation_queue import Granted, Reply, WaitingReservation
from engine.worker.messages import check_wanted, engine_request
from engine.worker.role import WorkerHost
from splitserve.errors import FailedPreconditionError, InvalidArgumentError, SplitserveError
from splitserve.v1 import decode_pb2
from splitserve.v1.decode_pb2_grpc import DecodeServiceServicer

MAX_LANE_GB_PER_S = 1e6
Context = grpc.aio.ServicerContext[Any, Any]


class DecodeService(DecodeServiceServicer):
    """Reserves blocks, aborts requests and streams outputs. Request ids are unique per coordinator."""

    def __init__(
        self, worker: WorkerHost[KvConsumer], loop: asyncio.AbstractEventLoop, *, prefixes_only: bool = False
    ) -> None:
        """`prefixes_only`: it takes prefixes, and refuses requests (PREFIXES_ONLY)."""
        self._worker = worker
        self._prefixes_only = prefixes_only
        self._loop = loop
        self._lease = duration_pb2.Duration()
        self._lease.FromNanoseconds(round(worker.config.lease_s * 1e9))
        self._streams = OutputStreams(self._on_coordinator_lost, worker.config.lease_s)
        self._reserving = 0

    @property
    def reserving(self) -> int:
        """Number of open Reserve calls."""
        return self._reserving

    def deliver(self, outputs: Outputs) -> None:
        """Passes a step's outputs to their streams; for the engine's thread."""
        self._loop.call_soon_threadsafe(self._streams.deliver, outputs)

    def close(self) -> None:
        """Ends the output streams and leases."""
        self._streams.close_all()

    async def Reserve(
        self, request: decode_pb2.ReserveRequest, context: Context
    ) -> decode_pb2.ReserveResponse:
        """See DecodeService.Reserve in the proto."""
        check_wanted(request, self._prefixes_only)
        # Awaited here: between the check of the stream and the queued reservation the stream must not be lost
        # unnoticed.
        grammar = await self._worker.parts.grammars.compiled(request.sampling)
        self._worker.require_accepting()
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
            local_prefill_tokens=0 if request.prefix_only else request.local_prefill_tokens,
            lane_bytes_per_s=_lane_bytes_per_s(request),
        )
        self._reserving += 1
        response = None
        try:
            await self._worker.engine.call(
                lambda core, consumer: consumer.reserve(core, entry, time.monotonic())
            )
            granted = await reply
            ticket = granted.ticket.to_proto(time.monotonic()) if granted.ticket is not None else None
            response = decode_pb2.ReserveResponse(ticket=ticket, wait_ms=granted.wait_s * 1e3)
        finally:
            self._reserving -= 1
            if not self._reserving:
                self._worker.service_idle()
            if response is None:
                # Cancelled or failed: the caller has no ticket, so nobody can write.
                self._abort_later(engine_id, request.coordinator_id)
        return response

    async def Abort(self, request: decode_pb2.AbortRequest, context: Context) -> decode_pb2.AbortResponse:
        """See DecodeService.Abort in the proto."""
        engine_id = _engine_id(request.coordinator_id, request.request_id)
        now = time.monotonic()
        call = self._worker.engine.call(
            lambda core, consumer: consumer.abort(
                core, engine_id, request.coordinator_id, request.no_writer, now
            )
        )
        # A step may outlast the caller's patience, and a call that is cancelled before it begins does not run.
        return decode_pb2.AbortResponse(aborted=await asyncio.shield(call))

    async def StreamOutputs(
        self, request: decode_pb2.StreamOutputsRequest, context: Context
    ) -> AsyncIterator[decode_pb2.StreamOutputsResponse]:
        """See DecodeService.StreamOutputs in the proto."""
        coordinator_id = _checked_id(request.coordinator_id)
        positions = {attached.request_id: attached.next_position for attached in request.requests}
        stream = self._streams.open(coordinator_id, request.attachment)
        # Queued before the coordinator can know that the stream is open, so before any reservation under it.
        joining = asyncio.ensure_future(self._keep_requests(coordinator_id, frozenset(positions)))
        try:
            resumes = request.attachment != UNNUMBERED
            yield decode_pb2.StreamOutputsResponse(
                epoch=self._worker.epoch, lease=self._lease if resumes else None
            )
            # What the engine had emitted before it answered has been delivered by now.
            live = await joining
            if lost := stream.rewind(positions, live):
                yield decode_pb2.StreamOutputsResponse(lost_request_ids=lost)
            async for message in stream.messages():
                yield message
        finally:
            joining.cancel()
            self._streams.release(stream)

    async def AcknowledgeOutputs(
        self, request: decode_pb2.AcknowledgeOutputsRequest, context: Context
    ) -> decode_pb2.AcknowledgeOutputsResponse:
        """See DecodeService.AcknowledgeOutputs in the proto."""
        self._streams.acknowledge(_checked_id(request.coordinator_id), request.attachment, request.messages)
        return decode_pb2.AcknowledgeOutputsResponse()

    async def _keep_requests(self, coordinator_id: str, request_ids: frozenset[str]) -> frozenset[str]:
        now = time.monotonic()
        return await self._worker.engine.call(
            lambda core, consumer: consumer.keep_requests(core, coordinator_id, request_ids, now)
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

        def post(result: Granted | SplitserveError) -> None:
            self._loop.call_soon_threadsafe(settle, result)

        return post

    def _abort_later(self, engine_id: str, coordinator_id: str) -> None:
        now = time.monotonic()
        self._worker.engine.post(
            lambda core, consumer: consumer.abort(core, engine_id, coordinator_id, True, now)
        )

    def _on_coordinator_lost(self, coordinator_id: str) -> None:
        now = time.monotonic()
        self._worker.engine.post(lambda core, consumer: consumer.coordinator_lost(core, coordinator_id, now))


def _engine_id(coordinator_id: str, request_id: str) -> str:
    """An id that is unique in this worker: coordinators choose request ids independently."""
    return f"{coordinator_id}/{request_id}"


def _lane_bytes_per_s(request: decode_pb2.ReserveRequest) -> float:
    """Raises InvalidArgumentError for a speed that no lane has."""
    if not 0 <= request.lane_gb_per_second <= MAX_LANE_GB_PER_S:
        message = f"lane_gb_per_second: must be 0..{MAX_LANE_GB_PER_S:g}, not {request.lane_gb_per_second}"
        raise InvalidArgumentError(message, field="lane_gb_per_second")
    return request.lane_gb_per_second * 1e9


def _checked_id(coordinator_id: str) -> str:
    """Raises InvalidArgumentError where the ids of requests here would be ambiguous."""
    if not coordinator_id or "/" in coordinator_id:
        message = 'coordinator_id must not be empty and not contain "/"'
        raise InvalidArgumentError(message, field="coordinator_id")
    return coordinator_id
