"""Load reports of simulated replicas, as workers make them."""

from __future__ import annotations

from autoscaler.simulation.cluster.replica import DecodeReplica, PrefillReplica
from autoscaler.simulation.engine_model import EngineModel
from engine.worker.messages import prompt_fit_message, step_fit_message
from splitserve.v1 import registry_pb2


def add_prompts(load: registry_pb2.WorkerLoad, replica: PrefillReplica) -> None:
    """Adds what a replica computes for others."""
    load.waiting_requests += replica.waiting
    load.running_requests += replica.load - replica.waiting
    load.waiting_tokens += replica.queued_tokens
    load.prefill_tokens_per_second = replica.prefill_tokens_per_s
    if (fit := prompt_fit_message(replica.prompt_fit)) is not None:
        load.prompt_fit.CopyFrom(fit)


def decode_load(
    replica: DecodeReplica, engine: EngineModel, step_s: float, block_tokens: int
) -> registry_pb2.WorkerLoad:
    """The report of a decode replica."""
    used = int(replica.context_tokens) // block_tokens
    total = int(engine.kv_capacity_tokens * replica.speed) // block_tokens
    return registry_pb2.WorkerLoad(
        total_blocks=total,
        free_blocks=max(0, total - used),
        referenced_blocks=used,
        running_requests=replica.running,
        streams=replica.running,
        waiting_reservations=replica.waiting_reservations,
        waiting_tokens=replica.local_tokens,
        decode_step_ms=step_s * 1e3,
        prompt_fit=prompt_fit_message(replica.prompt_fit),
        step_fit=step_fit_message(replica.step_fit),
    )
