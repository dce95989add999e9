"""The coordinator's planner of leanings on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from autoscaler.simulation.cluster.replica import EventQueue
from autoscaler.simulation.cluster.simulated_registry import MODEL, SimulatedRegistry
from autoscaler.snapshot import PoolName
from coordinator.admission.entry import Held
from coordinator.leanings.leaning_planner import LOOK_EVERY_S, LeaningMemory, plan_leanings
from coordinator.leanings.pressure import Pressure, WorkerWork, pressure_on, work_of
from coordinator.workers.rotation import NO_PLAN, RotationPlan
from engine.pacing.token_clock import ServiceTargets


class SimulatedLeanings:
    """Looks once a second, as long as `is_busy` at that time, and asks replicas to lean elsewhere by `ask`."""

    def __init__(
        self,
        events: EventQueue,
        registry: SimulatedRegistry,
        targets: ServiceTargets | None,
        held: Callable[[], Held],
        is_busy: Callable[[float], bool],
        ask: Callable[[str, PoolName, float], None],
    ) -> None:
        """`targets`: of the coordinator's settings; without both of them nobody is moved. `held`: what admission
        holds."""
        self._events, self._registry, self._targets, self._held = events, registry, targets, held
        self._is_busy, self._ask = is_busy, ask
        self._memory = LeaningMemory()
        self._is_looking = False
        self._plan = NO_PLAN

    def follow(self, leanings: Mapping[str, PoolName], movable: Collection[str]) -> None:
        """A plan of the autoscaler says where replicas lean, and which of them the planner may move."""
        self._plan = RotationPlan(leanings=leanings, movable=frozenset(movable))

    def wake(self, now_s: float) -> None:
        """Begins to look, unless it does already."""
        if not self._is_looking:
            self._is_looking = True
            self._events.at(now_s, self._look)

    def _look(self, now_s: float) -> None:
        self._registry.take_reports(now_s)
        loads = self._registry.loads
        works = [work_of(one, loads.prefill[one.key].report) for one in self._registry.snapshot.workers]
        pressure, workers = self._pressure(works), self._registry.snapshot.workers
        movable = self._plan.movable_of(MODEL.name, workers)
        before = self._memory.order
        self._memory = plan_leanings(self._memory, works, pressure, now_s, movable)
        order = self._memory.order
        if order is not None and order != before:
            self._ask(order.key[0], order.pool, now_s)
        self._is_looking = self._is_busy(now_s)
        if self._is_looking:
            self._events.at(now_s + LOOK_EVERY_S, self._look)

    def _pressure(self, works: Sequence[WorkerWork]) -> Pressure | None:
        targets = self._targets
        if targets is None or targets.ttft_s is None or targets.tpot_s is None:
            return None
        rates = [work.prompt_tokens_per_s for work in works if work.prompt_tokens_per_s]
        rate = sum(rates) / len(rates) if rates else 0.0
        return pressure_on(works, targets.ttft_s, targets.tpot_s, self._held(), rate)
