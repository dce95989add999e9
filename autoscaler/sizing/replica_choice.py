"""How many GPUs a replica has: of the counts that hold the model, that with which a traffic takes the fewest in all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoscaler.simulation.scenario import Scenario
from autoscaler.sizing.candidates import ClusterShape
from autoscaler.sizing.model_shape import ModelShape
from autoscaler.sizing.roofline import GPU_COUNTS, GpuClass, ReplicaDesign, design
from autoscaler.sizing.sizing import Sizing, SizingTerms, least_replicas, size
from splitserve.errors import FailedPreconditionError, InvalidArgumentError


@dataclass(frozen=True, slots=True)
class SizedReplica:
    """A replica, and how many of it a traffic takes."""

    design: ReplicaDesign
    sizing: Sizing

    @property
    def gpus(self) -> int:
        """Of the best cluster."""
        return self.design.gpus * self.sizing.best.candidate.workers


def designs_of(model: ModelShape, gpu: GpuClass, lane_gb_per_s: float, longest: int) -> list[ReplicaDesign]:
    """The replicas of 1, 2, 4 and 8 GPUs that hold the model and a request of `longest` tokens, the smallest first.

    Raises FailedPreconditionError (MODEL_DOES_NOT_FIT) if there is none.
    """
    designs: list[ReplicaDesign] = []
    refused = None
    for gpus in GPU_COUNTS:
        try:
            candidate = design(model, gpu, gpus, lane_gb_per_s)
        except FailedPreconditionError as error:
            refused = error
        except InvalidArgumentError:
            continue  # its heads do not divide among so many
        else:
            designs += [candidate] if candidate.engine.kv_capacity_tokens >= longest else []
    if designs:
        return designs
    if refused is not None and refused.reason == "MODEL_DOES_NOT_FIT":
        raise refused
    message = (
        f"gpu: no replica of up to {GPU_COUNTS[-1]} x {gpu.name} has KV for a request of {longest} tokens"
    )
    raise FailedPreconditionError(message, reason="MODEL_DOES_NOT_FIT", field="gpu")


def cheapest(
    designs: Sequence[ReplicaDesign],
    scenario: Scenario,
    terms: SizingTerms,
    on_replayed: Callable[[ClusterShape], None] | None = None,
) -> list[SizedReplica]:
    """The designs with which the goal is reached, that with the fewest GPUs first. Those that must take as many as one
    that was found already are not tried.

    Raises what `size` does if no design reaches the goal, for the one with the most GPUs.
    """
    began_s, sized_replicas = time.monotonic(), list[SizedReplica]()
    refused: FailedPreconditionError | None = None
    scenarios = [(candidate, replace(scenario, engine=candidate.engine)) for candidate in designs]
    for candidate, its_scenario in sorted(scenarios, key=lambda pair: pair[0].gpus * least_replicas(pair[1])):
        if sized_replicas and candidate.gpus * least_replicas(its_scenario) >= min(
            sized.gpus for sized in sized_replicas
        ):
            continue
        left_s = max(1.0, terms.limit_s - (time.monotonic() - began_s))
        try:
            sized_replicas.append(
                SizedReplica(candidate, size(its_scenario, replace(terms, limit_s=left_s), on_replayed))
            )
        except FailedPreconditionError as error:
            refused = error if refused is None or candidate is designs[-1] else refused
    if refused is not None and not sized_replicas:
        raise refused
    return sorted(sized_replicas, key=lambda sized: sized.gpus)
