"""What a local cluster consists of: its child processes, their cores, and when it counts as ready."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from splitserve.addresses import join_address, reachable_host
from splitserve.child_process import ChildSpec, Role
from splitserve.client import AsyncClient
from splitserve.config import ClusterConfig, EngineConfig, WorkerConfig
from splitserve.core_layout import CoreShare, format_cores, layout_cores, unpinned_cores
from splitserve.local_cluster import Probe
from splitserve.service_arguments import coordinator_arguments, worker_arguments
from splitserve.v1 import inference_pb2

CommandFactory = Callable[[Role, Sequence[str]], tuple[str, ...]]
"""The program and all its arguments for a role and its options."""

SERVING_STATES = frozenset({"ready", "slow-lane"})
"""A slow lane is told of loudly, but the worker serves."""
_COMMANDS: dict[Role, str] = {
    "coordinator": "coordinator",
    "prefill": "prefill-worker",
    "decode": "decode-worker",
}


def splitserve_command(role: Role, options: Sequence[str]) -> tuple[str, ...]:
    """The real thing: `python -m splitserve coordinator ...`."""
    return (sys.executable, "-m", "splitserve", _COMMANDS[role], *options)


def cluster_target(config: ClusterConfig) -> str:
    """The address at which clients and workers of this machine reach the coordinator. The port must be set."""
    return join_address(reachable_host(config.coordinator.host), config.coordinator.grpc_port)


def cluster_specs(
    config: ClusterConfig, cores: Sequence[int], command: CommandFactory = splitserve_command
) -> list[ChildSpec]:
    """The children in the order of their start, coordinator first, on these cores."""
    workers = config.prefill + config.decode
    shares = layout_cores(cores, workers) if config.pin_cores else unpinned_cores(cores, workers)
    prefill: list[Role] = ["prefill"] * config.prefill
    decode: list[Role] = ["decode"] * config.decode
    specs = [
        ChildSpec(
            "coordinator", "coordinator", command("coordinator", coordinator_arguments(config.coordinator))
        )
    ]
    numbers: dict[Role, int] = {"prefill": 0, "decode": 0}
    for role, share in zip(prefill + decode, shares, strict=True):
        worker = _worker(config, f"{role}-{numbers[role]}", share)
        numbers[role] += 1
        specs.append(
            ChildSpec(worker.worker_id, role, command(role, worker_arguments(worker)), _layout(worker))
        )
    return specs


def ready_model(
    models: Sequence[inference_pb2.ModelInfo],
    info: inference_pb2.GetServerInfoResponse,
    config: ClusterConfig,
) -> str | None:
    """The served model's name once it is ready and all workers of both pools are; else None."""
    wanted = {"prefill": config.prefill, "decode": config.decode}
    for model in models:
        workers = [w for w in info.workers if w.model == model.name and w.state in SERVING_STATES]
        counts = {pool: sum(worker.pool == pool for worker in workers) for pool in wanted}
        if model.ready and all(counts[pool] >= wanted[pool] for pool in wanted):
            return model.name
    return None


def cluster_probe(client: AsyncClient, config: ClusterConfig) -> Probe:
    """A probe that asks the coordinator."""

    async def probe() -> str | None:
        return ready_model(await client.models(), await client.server_info(), config)

    return probe


def _worker(config: ClusterConfig, worker_id: str, share: CoreShare) -> WorkerConfig:
    engine: EngineConfig = config.engine
    return WorkerConfig(
        worker_id=worker_id,
        model=config.model,
        served_model_name=config.served_model_name,
        coordinators=(cluster_target(config),),
        transport=config.transport,
        verify_kv=config.verify_kv,
        drain_s=config.coordinator.drain_s,
        cpus=share.cpus,
        engine=engine.model_copy(update={"threads": engine.threads or share.threads}),
    )


def _layout(worker: WorkerConfig) -> str:
    where = f"cores {format_cores(worker.cpus)}" if worker.cpus else "any cores"
    threads = worker.engine.threads
    return f"{where}, {threads} {'thread' if threads == 1 else 'threads'}"
