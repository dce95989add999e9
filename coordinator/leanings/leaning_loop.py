"""Looks at the neutral workers once a second, and asks them to lean elsewhere where the planner says so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from coordinator.admission.entry import Held
from coordinator.leanings.leaning_planner import LOOK_EVERY_S, LeaningMemory, plan_leanings
from coordinator.leanings.pressure import Pressure, pressure_on, work_of_model
from coordinator.workers.registry import Registry
from coordinator.workers.snapshot import PoolName, PoolSnapshot, WorkerKey
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.logs import log_event


class LeaningLoop:
    """The planners of a coordinator, one for each base model that has neutral workers.

    Under a plan in force that says where workers of its model lean one moves only those that the plan leaves to it. It
    rests while another coordinator moves any of them: so two that have a worker in common never move two at once. All
    do without targets of both kinds in the settings, and with `leanings: fixed`. `held` says what admission holds of
    a model.
    """

    def __init__(self, config: CoordinatorConfig, registry: Registry, held: Callable[[str], Held]) -> None:
        self._registry, self._held = registry, held
        self._ttft_s, self._tpot_s = config.admission.ttft_slo_s, config.admission.tpot_slo_s
        self._is_on = config.leanings == "auto"
        self._memories: dict[str, LeaningMemory] = {}

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            self.look(time.monotonic())
            await asyncio.sleep(LOOK_EVERY_S)

    def look(self, now: float) -> None:
        """One look at all models."""
        snapshot = self._registry.snapshot()
        models = {worker.model.name for worker in snapshot.workers if worker.neutral}
        self._memories = {model: self._looked_at(model, snapshot, now) for model in sorted(models)}
        orders = [memory.order for memory in self._memories.values() if memory.order is not None]
        asked: dict[WorkerKey, PoolName] = {order.key: order.pool for order in orders}
        self._registry.ask_leanings(asked)

    def _looked_at(self, model: str, snapshot: PoolSnapshot, now: float) -> LeaningMemory:
        works, before = work_of_model(snapshot, model), self._memories.get(model, LeaningMemory())
        pressure: Pressure | None = None
        movable = self._registry.plan.movable_of(model, snapshot.workers)
        led_elsewhere = any(w.neutral and w.led_elsewhere for w in snapshot.workers if w.model.name == model)
        if self._is_on and not led_elsewhere and self._ttft_s is not None and self._tpot_s is not None:
            ours = [w.load.prefill_tokens_per_second for w in snapshot.workers if w.model.name == model]
            rates = [rate for rate in ours if rate]
            rate = sum(rates) / len(rates) if rates else 0.0
            pressure = pressure_on(works, self._ttft_s, self._tpot_s, self._held(model), rate)
        after = plan_leanings(before, works, pressure, now, movable)
        order = after.order
        if order is not None and order != before.order and pressure is not None:
            log_event(
                "leaning.asked",
                worker_id=order.key[0],
                pool=order.pool,
                prefill_pressure=round(pressure.prefill, 3),
                decode_pressure=round(pressure.decode, 3),
            )
        return after
