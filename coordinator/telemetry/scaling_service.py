"""ScalingService: signals for autoscalers, and the rotation plans that they apply."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

from google.protobuf.duration_pb2 import Duration
from typing_extensions import override

from coordinator.request.state import Estimates, Stage
from coordinator.telemetry.request_stats import PHASES, ModelStats, RequestStats, summed
from coordinator.telemetry.scaling_lease import ScalingLeases
from coordinator.telemetry.scaling_timeline import ScalingTimeline, check_decisions
from coordinator.tenants.access_control import AccessControl
from coordinator.workers.registry import Registry
from coordinator.workers.rotation import NO_PLAN, RotationPlan, checked_plan
from coordinator.workers.snapshot import PoolSnapshot, Worker, WorkerKey, WorkerState
from splitserve.client.scaling_client import MAX_DEMAND_S
from splitserve.config.engine import MAX_ADAPTERS
from splitserve.errors import InvalidArgumentError
from splitserve.histograms import LATENCY_BOUNDS_S
from splitserve.roles import ROLE_NUMBERS
from splitserve.v1 import generation_pb2, registry_pb2, scaling_pb2
from splitserve.v1.scaling_pb2_grpc import ScalingServiceServicer

MAX_ENDED_BOOTS = 4096


@dataclass(eq=False)
class ScalingService(ScalingServiceServicer):
    """Serves signals and applies plans."""

    registry: Registry
    stats: RequestStats
    estimates: Estimates
    coordinator_id: str
    access: AccessControl
    report_ended: Callable[[Sequence[WorkerKey]], None]

    def __post_init__(self) -> None:
        self.states = WorkerStates()
        self.timeline = ScalingTimeline()
        self._started_s = time.monotonic()
        self._leases = ScalingLeases(self._started_s, first_number=lambda: round(time.time() * 1e3))

    async def watch_states(self) -> None:
        """Tracks when workers change state, until cancelled."""
        while True:
            version = self.registry.version
            self.states.update(self.registry.snapshot(), time.monotonic())
            await self.registry.wait_change(version)

    @override
    async def GetSignals(
        self, request: scaling_pb2.GetSignalsRequest, context: Any
    ) -> scaling_pb2.GetSignalsResponse:
        self.access.require_reader(context)
        await self._until_demand(request)
        now = time.monotonic()
        snapshot = self.registry.snapshot()
        self.states.update(snapshot, now)
        known = self.registry.known_models()
        bases = [name for name, model in known.items() if not model.base]
        return scaling_pb2.GetSignalsResponse(
            coordinator_id=self.coordinator_id,
            uptime_seconds=now - self._started_s,
            bounds_seconds=LATENCY_BOUNDS_S,
            models=[self._model(name, snapshot, now) for name in bases if request.model in ("", name)],
            plan=_plan_in_force(self.registry.plan, now),
        )

    async def _until_demand(self, request: scaling_pb2.GetSignalsRequest) -> None:
        wait_s = _checked_wait_s(request.until_demand, "until_demand")
        if not wait_s:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not self.stats.wait_for_workers(request.model):
                    self.stats.demand.clear()
                    await self.stats.demand.wait()

    @override
    async def ApplyPlan(
        self, request: scaling_pb2.ApplyPlanRequest, context: Any
    ) -> scaling_pb2.ApplyPlanResponse:
        self.access.require_operator(context)
        self._leases.check_plan(request.lease_number, time.monotonic())
        plan = checked_plan(request, time.monotonic(), self.registry.plan)
        check_decisions(request)
        self.registry.apply_plan(plan)
        self.timeline.add(request, time.time())
        registered = {worker.worker_id for worker in self.registry.snapshot().workers}
        return scaling_pb2.ApplyPlanResponse(
            coordinator_id=self.coordinator_id,
            unknown_worker_ids=sorted((plan.standby | plan.active | plan.roles.keys()) - registered),
        )

    @override
    async def AcquireLease(
        self, request: scaling_pb2.AcquireLeaseRequest, context: Any
    ) -> scaling_pb2.AcquireLeaseResponse:
        self.access.require_operator(context)
        response = self._leases.acquire(request, time.monotonic())
        response.coordinator_id = self.coordinator_id
        return response

    @override
    async def ReportEnded(
        self, request: scaling_pb2.ReportEndedRequest, context: Any
    ) -> scaling_pb2.ReportEndedResponse:
        self.access.require_operator(context)
        if len(request.boots) > MAX_ENDED_BOOTS:
            raise InvalidArgumentError(f"boots must be at most {MAX_ENDED_BOOTS}", field="boots")
        self.report_ended([(boot.worker_id, boot.epoch) for boot in request.boots])
        return scaling_pb2.ReportEndedResponse(coordinator_id=self.coordinator_id)

    def _model(self, name: str, snapshot: PoolSnapshot, now: float) -> scaling_pb2.ModelSignals:
        known = self.registry.known_models()
        adapters = {
            other.name: other.adapter for other in known.values() if other.base == name and other.adapter
        }
        stats = summed([self.stats.of(other) for other in (name, *adapters)])
        stages, means = stats.stages, self.estimates.of_model(name)
        workers = [worker for worker in snapshot.workers if worker.model.name == name]
        return scaling_pb2.ModelSignals(
            model=name,
            arrivals=scaling_pb2.Arrivals(
                requests=stats.requests,
                prompt_tokens=stats.prompt_tokens,
                uncached_tokens=stats.uncached_tokens,
                output_tokens=stats.output_tokens,
                local_requests=stats.local_requests,
                local_tokens=stats.local_tokens,
            ),
            phases=_phases(stats),
            outcomes=[
                scaling_pb2.OutcomeCount(outcome=outcome, count=count)
                for outcome, count in stats.outcomes.items()
            ],
            in_progress=scaling_pb2.InProgress(
                admitting_requests=stages[Stage.ADMITTING],
                reserving_requests=stages[Stage.RESERVING],
                prefilling_requests=stages[Stage.PREFILLING],
                prefilling_tokens=stats.backlog_tokens,
                decoding_requests=stages[Stage.DECODING],
                waiting_for_workers=stats.waiting_for_workers,
            ),
            workers=[self._worker(worker, snapshot, now) for worker in workers],
            expected_output_tokens=means.output_tokens.value,
            cached_share=means.cached_share.value,
            served=registry_pb2.ServedModel(
                name=name,
                tokenizer_source=known[name].tokenizer_source,
                context_tokens=known[name].context_tokens,
                vocabulary_size=known[name].vocabulary_size,
                adapters=[
                    generation_pb2.AdapterRef(**adapter._asdict())
                    for adapter in list(adapters.values())[-MAX_ADAPTERS:]
                ],
                pooling=known[name].pooling,
            ),
        )

    def _worker(self, worker: Worker, snapshot: PoolSnapshot, now: float) -> scaling_pb2.WorkerSignals:
        state, since_s = self.states.since[worker.key]
        lanes = [
            lane.gb_per_second for _, lane in snapshot.handoff_lanes_of(worker) if lane.gb_per_second > 0
        ]
        return scaling_pb2.WorkerSignals(
            worker_id=worker.worker_id,
            epoch=worker.epoch,
            role=ROLE_NUMBERS[worker.role],
            state=state,
            state_seconds=now - since_s,
            load=worker.load,
            kv_capacity_tokens=worker.load.total_blocks * worker.block_size_tokens,
            block_size_tokens=worker.block_size_tokens,
            kv_bytes_per_token=worker.block_bytes // worker.block_size_tokens,
            max_running_requests=worker.max_running_requests,
            lane_gb_per_second=median(lanes) if lanes else None,
            max_step_tokens=worker.max_step_tokens,
            start=worker.start,
            changes_role=worker.changes_role,
            preempted_in_seconds=worker.preempted_in_s(now),
        )


def _checked_wait_s(wait: Duration, field: str) -> float:
    wait_s = float(wait.seconds + wait.nanos / 1e9)
    if not 0 <= wait_s <= MAX_DEMAND_S:
        raise InvalidArgumentError(f"{field} must be 0 to {MAX_DEMAND_S:g} s, not {wait_s:g} s", field=field)
    return wait_s


def _phases(stats: ModelStats) -> list[scaling_pb2.PhaseHistogram]:
    return [
        scaling_pb2.PhaseHistogram(
            phase=phase,
            counts=stats.phases[phase].warm.counts,
            sum_seconds=stats.phases[phase].warm.sum_s,
            cold_samples=stats.phases[phase].cold.total,
        )
        for phase in PHASES
    ]


def _plan_in_force(plan: RotationPlan, now: float) -> scaling_pb2.PlanInForce | None:
    if plan is NO_PLAN:
        return None
    return scaling_pb2.PlanInForce(
        standby_worker_ids=sorted(plan.standby),
        active_worker_ids=sorted(plan.active),
        expires_in_seconds=max(0.0, plan.expires_s - now),
        roles=[
            scaling_pb2.WorkerRole(worker_id=name, role=ROLE_NUMBERS[role])
            for name, role in sorted(plan.roles.items())
        ],
    )


class WorkerStates:
    """The states of all workers as of the last `update`."""

    def __init__(self) -> None:
        self.since: Mapping[WorkerKey, tuple[WorkerState, float]] = {}
        """State of each worker, and since when. The mapping is replaced, never mutated."""

    def update(self, snapshot: PoolSnapshot, now: float) -> None:
        """Takes a snapshot; a worker whose state changed gets `now` as its time."""
        states = {worker.key: snapshot.state_of(worker) for worker in snapshot.workers}
        before = self.since
        self.since = {
            key: before[key] if key in before and before[key][0] == state else (state, now)
            for key, state in states.items()
        }
