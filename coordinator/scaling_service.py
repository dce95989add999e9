"""The gRPC face towards autoscalers."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from coordinator.access import Access
from coordinator.phase_counts import PHASES
from coordinator.pools import PoolSnapshot, Worker
from coordinator.registry import Registry
from coordinator.rotation import NO_PLAN, RotationPlan, checked_plan
from coordinator.signal_book import ModelBook, SignalBook, Stage
from coordinator.worker_states import WorkerStates
from splitserve.latency_bounds import LATENCY_BOUNDS_S
from splitserve.logs import log_event
from splitserve.v1 import registry_pb2, scaling_pb2
from splitserve.v1.scaling_pb2_grpc import ScalingServiceServicer

_POOLS = {"prefill": registry_pb2.POOL_PREFILL, "decode": registry_pb2.POOL_DECODE}


class ScalingService(ScalingServiceServicer):
    """Gives the signals away and takes plans."""

    def __init__(self, registry: Registry, book: SignalBook, coordinator_id: str, access: Access) -> None:
        self._registry = registry
        self._access = access
        self._book = book
        self._coordinator_id = coordinator_id
        self._states = WorkerStates()
        self._started_s = time.monotonic()

    async def watch_states(self) -> None:
        """Keeps the times of the workers' states, until cancelled."""
        while True:
            version = self._registry.version
            self._states.update(self._registry.snapshot(), time.monotonic())
            await self._registry.wait_change(version)

    async def GetSignals(
        self, request: scaling_pb2.GetSignalsRequest, context: Any
    ) -> scaling_pb2.GetSignalsResponse:
        """See ScalingService.GetSignals in the proto."""
        self._access.require_operator(context)
        now = time.monotonic()
        self._registry.expire(now)
        snapshot = self._registry.snapshot()
        self._states.update(snapshot, now)
        names = [request.model] if request.model else list(self._registry.known_models())
        known = self._registry.known_models()
        return scaling_pb2.GetSignalsResponse(
            coordinator_id=self._coordinator_id,
            uptime_seconds=now - self._started_s,
            bounds_seconds=LATENCY_BOUNDS_S,
            models=[self._model(name, snapshot, now) for name in names if name in known],
            plan=_plan_in_force(self._registry.plan, now),
        )

    async def ApplyPlan(
        self, request: scaling_pb2.ApplyPlanRequest, context: Any
    ) -> scaling_pb2.ApplyPlanResponse:
        """See ScalingService.ApplyPlan in the proto."""
        self._access.require_operator(context)
        plan = checked_plan(request, time.monotonic())
        if plan.lend != self._registry.plan.lend:
            log_event("plan.lending", lent=plan.lend)
        self._registry.apply_plan(plan)
        here = {worker.worker_id for worker in self._registry.snapshot().workers}
        return scaling_pb2.ApplyPlanResponse(
            coordinator_id=self._coordinator_id,
            unknown_worker_ids=sorted((plan.standby | plan.active) - here),
        )

    def _model(self, name: str, snapshot: PoolSnapshot, now: float) -> scaling_pb2.ModelSignals:
        book = self._book.of(name)
        stages = book.stages
        workers = [worker for worker in snapshot.workers if worker.model.name == name]
        return scaling_pb2.ModelSignals(
            model=name,
            arrivals=scaling_pb2.Arrivals(
                requests=book.requests,
                prompt_tokens=book.prompt_tokens,
                uncached_tokens=book.uncached_tokens,
                output_tokens=book.output_tokens,
            ),
            phases=_phases(book),
            outcomes=[
                scaling_pb2.OutcomeCount(outcome=outcome, count=count)
                for outcome, count in book.outcomes.items()
            ],
            in_progress=scaling_pb2.InProgress(
                admitting_requests=stages[Stage.ADMITTING],
                reserving_requests=stages[Stage.RESERVING],
                prefilling_requests=stages[Stage.PREFILLING],
                prefilling_tokens=book.backlog_tokens,
                decoding_requests=stages[Stage.DECODING],
            ),
            workers=[self._worker(worker, snapshot, now) for worker in workers],
            expected_output_tokens=book.expected_output.value,
            cached_share=book.cached_share.value,
        )

    def _worker(self, worker: Worker, snapshot: PoolSnapshot, now: float) -> scaling_pb2.WorkerSignals:
        state, since_s = self._states.of(worker.key)
        lanes = [lane.gb_per_second for _, lane in snapshot.lanes_of(worker) if lane.gb_per_second > 0]
        return scaling_pb2.WorkerSignals(
            worker_id=worker.worker_id,
            epoch=worker.epoch,
            pool=_POOLS[worker.pool],
            state=state,
            state_seconds=now - since_s,
            load=worker.load,
            kv_capacity_tokens=worker.load.total_blocks * worker.block_size_tokens,
            block_size_tokens=worker.block_size_tokens,
            kv_bytes_per_token=worker.block_bytes // worker.block_size_tokens,
            max_running_requests=worker.max_running_requests,
            lane_gb_per_second=median(lanes) if lanes else None,
        )


def _phases(book: ModelBook) -> list[scaling_pb2.PhaseHistogram]:
    return [
        scaling_pb2.PhaseHistogram(
            phase=phase,
            counts=book.phases[phase].warm.counts,
            sum_seconds=book.phases[phase].warm.sum_s,
            cold_samples=book.phases[phase].cold.total,
        )
        for phase in PHASES
    ]


def _plan_in_force(plan: RotationPlan, now: float) -> scaling_pb2.PlanInForce | None:
    if plan is NO_PLAN:
        return None
    return scaling_pb2.PlanInForce(
        standby_worker_ids=sorted(plan.standby),
        active_worker_ids=sorted(plan.active),
        lend_decode_to_prefill=plan.lend,
        expires_in_seconds=plan.expires_s - now,
    )
