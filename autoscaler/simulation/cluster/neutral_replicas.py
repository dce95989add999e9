"""Neutral replicas: one engine that computes prompts for others and decodes, as two replicas of one name, and leans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from autoscaler.simulation.cluster.replica import EventQueue, SimulatedRequest
from autoscaler.simulation.cluster.stepped.lent_cores import LentCores
from autoscaler.simulation.cluster.stepped.stepped_replicas import SteppedDecode, SteppedPrefill
from autoscaler.simulation.cluster.stepped.virtual_engine import VirtualEngine
from autoscaler.sizing.engine_model import EngineModel
from coordinator.leanings.leaning_planner import LOOK_EVERY_S, LeaningMemory, plan_leanings
from coordinator.leanings.pressure import pressure_on, work_of
from coordinator.workers.load_ledger import LoadLedger
from coordinator.workers.snapshot import PoolName, Worker
from engine.core.types import StepResult
from engine.pacing.token_clock import ServiceTargets


class NeutralReplica(NamedTuple):
    """Its two parts. Prompts that stay are computed by the decode part, as on decode replicas."""

    prefill: SteppedPrefill
    decode: SteppedDecode


def neutral_replica(
    name: str,
    ordered_s: float,
    model: EngineModel,
    events: EventQueue,
    targets: ServiceTargets | None,
    prefix_cache: bool,
    computed: Callable[[SimulatedRequest, float, float], None],
    reserved: Callable[[SimulatedRequest, float], None],
    decoded: Callable[[SimulatedRequest, float], None],
    cores: LentCores | None = None,
) -> NeutralReplica:
    """A replica whose parts call `computed` as SteppedPrefill does, and `reserved` and `decoded` as SteppedDecode.
    `cores`: see SteppedPrefill."""
    parts: list[NeutralReplica] = []

    def stepped(result: StepResult, began_s: float, now_s: float) -> None:
        for part in parts[0]:
            part.stepped(result, began_s, now_s)

    slot = cores.slot(lambda: any(part.is_up for part in parts[0])) if cores else None
    engine = VirtualEngine(model, events, prefix_cache, stepped, slot)
    engine.core.keep_prompt_room()
    prefill = SteppedPrefill(name, ordered_s, model, events, targets, prefix_cache, computed, engine)
    decode = SteppedDecode(name, ordered_s, model, events, targets, prefix_cache, reserved, decoded, engine)
    parts.append(NeutralReplica(prefill, decode))
    return parts[0]


class SimulatedLeanings:
    """The coordinator's planner on neutral replicas, which follow at once. It looks at the first request after each
    second, because nothing else needs to know."""

    def __init__(self, targets: ServiceTargets | None) -> None:
        self._targets = targets
        self._memory, self._look_s = LeaningMemory(), 0.0
        self.first: Mapping[str, PoolName] = {}
        """Where replicas lean at first, by name; empty: there are no neutral ones."""
        self.moves = 0
        """How often one has been moved."""

    def look(self, workers: Sequence[Worker], loads: LoadLedger, now_s: float) -> tuple[str, PoolName] | None:
        """The replica that leans elsewhere from now on."""
        targets = self._targets
        if not self.first or targets is None or now_s < self._look_s:
            return None
        self._look_s = now_s + LOOK_EVERY_S
        works = [work_of(worker, loads.prefill[worker.key].report) for worker in workers]
        pressure = None
        if targets.ttft_s is not None and targets.tpot_s is not None:
            pressure = pressure_on(works, targets.ttft_s, targets.tpot_s)
        before, self._memory = self._memory.order, plan_leanings(self._memory, works, pressure, now_s)
        order = self._memory.order
        if order is None or order == before:
            return None
        self.moves += 1
        return order.key[0], order.pool
