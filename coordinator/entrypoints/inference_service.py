"""InferenceService: splitserve's own gRPC API for clients."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from typing_extensions import override

from coordinator.entrypoints.inference_api import InferenceApi
from coordinator.request.inference_request import Operation, RequestTrace
from coordinator.request.sending import Output
from coordinator.telemetry.explanation import Explainer
from coordinator.tenants.access_control import AccessControl
from coordinator.workers.snapshot import PoolSnapshot, Worker
from splitserve import __version__
from splitserve.generation.output_delta import TokenDelta
from splitserve.rpc.server import StreamWriter
from splitserve.v1 import inference_pb2, records_pb2, scaling_pb2
from splitserve.v1.inference_pb2_grpc import InferenceServiceServicer

if TYPE_CHECKING:
    GenerateContext = grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
TraceHeaders = tuple[str | None, str | None]
"""`traceparent` and `tracestate` as the client sent them; either may be malformed."""


def trace_headers(context: grpc.aio.ServicerContext[Any, Any]) -> TraceHeaders:
    """The trace headers of a call; None for a missing one. Several `tracestate` headers are joined."""
    headers = [(name, value) for name, value in context.invocation_metadata() or () if isinstance(value, str)]
    parents = [value for name, value in headers if name == TRACEPARENT]
    states = [value for name, value in headers if name == TRACESTATE]
    return parents[-1] if parents else None, ",".join(states) or None


async def begin_trace(
    api: InferenceApi, context: Any, operation: Operation, resumed: str = ""
) -> RequestTrace | None:
    """The trace of a call, of which its client is told. `resumed`: as of `InferenceApi.begin_trace`."""
    trace = api.begin_trace(*trace_headers(context), operation, resumed)
    if trace is not None and api.traces:
        await context.send_initial_metadata(((TRACEPARENT, trace.context.traceparent),))
    return trace


@dataclass(eq=False)
class InferenceService(InferenceServiceServicer):
    """The servicer, on top of InferenceApi."""

    api: InferenceApi
    access: AccessControl
    explainer: Explainer

    @override
    async def Generate(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: GenerateContext
    ) -> None:
        caller = self.access.caller(context)
        operation: Operation = "chat" if request.HasField("chat") else "text_completion"
        trace = await begin_trace(self.api, context, operation, request.resume.traceparent)
        writer = StreamWriter(context.write)
        try:
            await self.api.generate(request, caller, _Stream(writer), context.time_remaining(), trace)
        finally:
            if not writer.is_ready:  # gRPC accepts no status while a write is in progress
                await writer.settle()

    @override
    async def GetServerInfo(
        self, request: inference_pb2.GetServerInfoRequest, context: Any
    ) -> inference_pb2.GetServerInfoResponse:
        self.access.require_reader(context)
        snapshot = self.api.registry.snapshot()
        return inference_pb2.GetServerInfoResponse(
            version=__version__,
            workers=[_worker_info(worker, snapshot) for worker in snapshot.workers],
            uptime_seconds=self.api.uptime_s,
            running_requests=self.api.running,
            background_tasks=self.api.background.count,
        )

    @override
    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        caller = self.access.caller(context)
        return inference_pb2.ListModelsResponse(models=await self.api.models(caller))

    @override
    async def GetRequestRecord(
        self, request: records_pb2.GetRequestRecordRequest, context: Any
    ) -> records_pb2.GetRequestRecordResponse:
        return self.explainer.record(request, self.access.caller(context))

    @override
    async def ListRequestRecords(
        self, request: records_pb2.ListRequestRecordsRequest, context: Any
    ) -> records_pb2.ListRequestRecordsResponse:
        return self.explainer.records(request, self.access.caller(context))


@dataclass(frozen=True, slots=True)
class _Stream(Output):
    """The output of a gRPC stream."""

    writer: StreamWriter

    @override
    async def send(self, delta: TokenDelta, started: inference_pb2.GenerationStart | None) -> None:
        await self.writer.write(inference_pb2.GenerateResponse(delta=delta.to_proto(), started=started))

    @override
    async def end(self, done: inference_pb2.GenerationDone) -> None:
        await self.writer.write(inference_pb2.GenerateResponse(done=done))

    @override
    def takes_now(self) -> bool:
        return self.writer.is_ready

    @override
    def send_now(self, delta: TokenDelta) -> None:
        response = inference_pb2.GenerateResponse()
        delta.write_to(response.delta)
        self.writer.begin(response)


def _worker_info(worker: Worker, snapshot: PoolSnapshot) -> inference_pb2.WorkerInfo:
    load, lanes, circuits = worker.load, snapshot.lanes_of(worker), dict(worker.circuit.pairs)
    return inference_pb2.WorkerInfo(
        worker_id=worker.worker_id,
        role=worker.role,
        address=worker.address,
        model=worker.model.name,
        state=_state(worker, snapshot),
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        total_blocks=load.total_blocks,
        free_blocks=load.free_blocks,
        reserved_blocks=load.reserved_blocks,
        quarantined_blocks=load.quarantined_blocks,
        referenced_blocks=load.referenced_blocks,
        transport=worker.transport,
        rss_bytes=load.rss_bytes,
        open_rpcs=load.open_rpcs,
        transfers_in_flight=load.transfers_in_flight,
        waiting_reservations=load.waiting_reservations,
        rejected_handoffs=load.rejected_handoffs,
        lanes=[
            inference_pb2.LaneInfo(
                peer=peer.worker_id,
                gb_per_second=lane.gb_per_second,
                latency_ms=lane.latency_ms,
                lane=lane.lane,
                problem=lane.problem,
                refused=lane.refused,
                circuit=circuits.get(peer.agent_id, "closed"),
            )
            for peer, lane in lanes
        ],
        circuit=worker.circuit.state,
        tripped=worker.circuit.tripped,
        experimental=worker.experimental,
        start=worker.start,
        preempted_in_seconds=worker.preempted_in_s(time.monotonic()),
    )


def _state(worker: Worker, snapshot: PoolSnapshot) -> str:
    match snapshot.state_of(worker):
        case scaling_pb2.WORKER_STATE_DRAINING:
            return "draining"
        case scaling_pb2.WORKER_STATE_STANDBY:
            return "standby"
    if worker.circuit.tripped:
        return "circuit-open"
    if any(lane.problem for _, lane in snapshot.handoff_lanes_of(worker)):
        return "slow-lane"
    return "ready" if snapshot.is_ready(worker) else "connecting"
