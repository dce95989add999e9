"""Chooses how many GPUs a replica has: of the counts that hold the model, the one that needs the fewest GPUs in all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoscaler.simulation.scenario import Scenario
from autoscaler.sizing.candidates import ClusterShape
from autoscaler.sizing.model_shape import ModelShape
from autoscaler.sizing.roofline import GPU_COUNTS, GpuClass, ReplicaDesign, replica_design
from autoscaler.sizing.sizing import Sizing, SizingTerms, least_replicas, size
from splitserve.errors import FailedPreconditionError, InvalidArgumentError


@dataclass(frozen=True, slots=True)
class SizedReplica:
    """A replica, and how many of them the traffic needs."""

    design: ReplicaDesign
    sizing: Sizing

    @property
    def gpus(self) -> int:
        """GPUs of the best cluster."""
        return self.design.gpus * self.sizing.best.candidate.workers


def designs_of(model: ModelShape, gpu: GpuClass, lane_gb_per_s: float, longest: int) -> list[ReplicaDesign]:
    """The replicas of 1, 2, 4 and 8 GPUs that hold the model and a request of `longest` tokens, the smallest first.

    Raises FailedPreconditionError (MODEL_DOES_NOT_FIT) if there is none.
    """
    designs: list[ReplicaDesign] = []
    refused = None
    for gpus in GPU_COUNTS:
        try:
            candidate = replica_design(model, gpu, gpus, lane_gb_per_s)
        except FailedPreconditionError as error:
            refused = error
        except InvalidArgumentError:
            continue  # its heads do not divide among this many GPUs
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
    """The designs that reach the goal, the one with the fewest GPUs first. A design that needs at least as many GPUs as
    an earlier result is not tried.

    Raises what `size` raises if no design reaches the goal, for the design with the most GPUs.
    """
    began_s, sized = time.monotonic(), list[SizedReplica]()
    refused: FailedPreconditionError | None = None
    trials = []
    for design in designs:
        of_design = replace(scenario, engine=design.engine)
        trials.append((design.gpus * least_replicas(of_design), design, of_design))
    for least_gpus, design, of_design in sorted(trials, key=lambda trial: trial[0]):
        if sized and least_gpus >= min(replica.gpus for replica in sized):
            continue
        left_s = max(1.0, terms.limit_s - (time.monotonic() - began_s))
        try:
            sizing = size(of_design, replace(terms, limit_s=left_s), on_replayed)
            sized.append(SizedReplica(design, sizing))
        except FailedPreconditionError as error:
            refused = error if refused is None or design is designs[-1] else refused
    if refused is not None and not sized:
        raise refused
    return sorted(sized, key=lambda replica: replica.gpus)
