"""A neutral replica that is computed step by step."""

from __future__ import annotations

from collections.abc import Callable

from autoscaler.simulation.cluster.neutral_replica import NeutralReplica
from autoscaler.simulation.cluster.replica import EventQueue, SimulatedRequest
from autoscaler.simulation.cluster.stepped.lent_cores import LentCores
from autoscaler.simulation.cluster.stepped.stepped_replicas import SteppedDecode, SteppedPrefill
from autoscaler.simulation.cluster.stepped.virtual_engine import VirtualEngine
from autoscaler.sizing.engine_model import EngineModel
from autoscaler.snapshot import PoolName
from engine.core.types import StepResult
from engine.pacing.token_clock import ServiceTargets


def stepped_neutral(
    name: str,
    ordered_s: float,
    leans: PoolName,
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
    replica = NeutralReplica(name, ordered_s, leans)

    def stepped(result: StepResult, began_s: float, now_s: float) -> None:
        prefill.stepped(result, began_s, now_s)
        decode.stepped(result, began_s, now_s)

    slot = cores.slot(lambda: replica.is_up) if cores else None
    engine = VirtualEngine(model, events, prefix_cache, stepped, slot)
    engine.core.keep_prompt_room()
    prefill = SteppedPrefill(name, ordered_s, model, events, targets, prefix_cache, computed, engine)
    decode = SteppedDecode(name, ordered_s, model, events, targets, prefix_cache, reserved, decoded, engine)
    replica.bind(prefill, decode)
    return replica
