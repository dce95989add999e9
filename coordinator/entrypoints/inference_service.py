"""InferenceService: splitserve's own gRPC API for clients."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from coordinator.entrypoints.grpc_trace import TRACEPARENT, trace_headers
from coordinator.entrypoints.inference_api import InferenceApi
from coordinator.records.explanation import Explainer
from coordinator.records.traffic_stream import TrafficStream
from coordinator.request.request_trace import Operation
from coordinator.tenants.access_control import AccessControl
from coordinator.workers.snapshot import PoolSnapshot, Worker
from splitserve import __version__
from splitserve.rpc.writing import StreamWriter
from splitserve.v1 import generation_pb2, inference_pb2, records_pb2, registry_pb2, scaling_pb2, traffic_pb2
from splitserve.v1.inference_pb2_grpc import InferenceServiceServicer

if TYPE_CHECKING:
    from coordinator.records.traffic_stream import RecordContext

    GenerateContext = grpc.aio.ServicerContext[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]


class InferenceService(InferenceServiceServicer):
    """The servicer, on top of InferenceApi."""

    def __init__(
        self, api: InferenceApi, access: AccessControl, explainer: Explainer, traffic: TrafficStream
    ) -> None:
        self._api = api
        self._access = access
        self._explainer = explainer
        self._traffic = traffic

    async def Generate(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: GenerateContext
    ) -> None:
        """See InferenceService.Generate in the proto."""
        caller = self._access.caller(context)
        operation: Operation = "chat" if request.HasField("chat") else "text_completion"
        trace = self._api.begin_trace(*trace_headers(context), operation, request.resume.traceparent)
        if trace is not None and self._api.traces:
            await context.send_initial_metadata(((TRACEPARENT, trace.context.traceparent),))
        writer = StreamWriter(context.write)
        try:
            await self._api.generate(
                request, caller, writer.write, context.time_remaining(), trace, _DirectDeltas(writer)
            )
        finally:
            if not writer.is_ready:  # gRPC accepts no status while a write is in progress
                await writer.settle()

    async def GetServerInfo(
        self, request: inference_pb2.GetServerInfoRequest, context: Any
    ) -> inference_pb2.GetServerInfoResponse:
        """See InferenceService.GetServerInfo in the proto."""
        self._access.require_reader(context)
        snapshot = self._api.snapshot()
        return inference_pb2.GetServerInfoResponse(
            version=__version__,
            workers=[_worker_info(worker, snapshot) for worker in snapshot.workers],
            uptime_seconds=self._api.uptime_s,
            running_requests=self._api.running,
            background_tasks=self._api.background_tasks,
        )

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Any
    ) -> inference_pb2.ListModelsResponse:
        """See InferenceService.ListModels in the proto."""
        caller = self._access.caller(context)
        return inference_pb2.ListModelsResponse(models=await self._api.models(caller))

    async def GetRequestRecord(
        self, request: records_pb2.GetRequestRecordRequest, context: Any
    ) -> records_pb2.GetRequestRecordResponse:
        """See InferenceService.GetRequestRecord in the proto."""
        return self._explainer.record(request, self._access.caller(context))

    async def ListRequestRecords(
        self, request: records_pb2.ListRequestRecordsRequest, context: Any
    ) -> records_pb2.ListRequestRecordsResponse:
        """See InferenceService.ListRequestRecords in the proto."""
        return self._explainer.records(request, self._access.caller(context))

    async def RecordTraffic(  # type: ignore[override]
        self, request: traffic_pb2.RecordTrafficRequest, context: RecordContext
    ) -> None:
        """See InferenceService.RecordTraffic in the proto."""
        self._access.require_reader(context)
        await self._traffic.serve(request, context)


@dataclass(frozen=True, slots=True)
class _DirectDeltas:
    """The DirectSend of a stream."""

    writer: StreamWriter

    def is_ready(self) -> bool:
        return self.writer.is_ready

    def send(self, delta: generation_pb2.OutputDelta) -> None:
        self.writer.begin(inference_pb2.GenerateResponse(delta=delta))


def _worker_info(worker: Worker, snapshot: PoolSnapshot) -> inference_pb2.WorkerInfo:
    load, lanes, circuits = worker.load, snapshot.lanes_of(worker), dict(worker.circuit.pairs)
    return inference_pb2.WorkerInfo(
        worker_id=worker.worker_id,
        pool=worker.pool,
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
        lanes=[_lane_info(peer, lane, circuits.get(peer.agent_id, "closed")) for peer, lane in lanes],
        circuit=worker.circuit.state,
        tripped=worker.circuit.tripped,
        experimental=worker.experimental,
        neutral=worker.neutral,
        start=worker.start,
        preempted_in_seconds=worker.preempted_in_s(time.monotonic()),
        wake_seconds=worker.wake_s,
    )


def _state(worker: Worker, snapshot: PoolSnapshot) -> str:
    match snapshot.state_of(worker):
        case scaling_pb2.WORKER_STATE_DRAINING:
            return "draining"
        case scaling_pb2.WORKER_STATE_STANDBY:
            return "standby"
        case scaling_pb2.WORKER_STATE_SLEEPING:
            return "sleeping"
    if worker.circuit.tripped:
        return "circuit-open"
    if any(lane.problem for _, lane in snapshot.handoff_lanes_of(worker)):
        return "slow-lane"
    return "ready" if snapshot.is_ready(worker) else "connecting"


def _lane_info(peer: Worker, lane: registry_pb2.LaneReport, circuit: str) -> inference_pb2.LaneInfo:
    return inference_pb2.LaneInfo(
        peer=peer.worker_id,
        gb_per_second=lane.gb_per_second,
        latency_ms=lane.latency_ms,
        lane=lane.lane,
        problem=lane.problem,
        refused=lane.refused,
        circuit=circuit,
    )
