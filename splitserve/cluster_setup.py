"""What a local cluster consists of: its child processes, their cores, and when it counts as ready."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from splitserve.addresses import join_address, reachable_host
from splitserve.child_process import ChildSpec, Role
from splitserve.client import AsyncClient
from splitserve.config import ClusterConfig, CoordinatorConfig, EngineConfig, WorkerConfig
from splitserve.core_layout import format_cores
from splitserve.local_cluster import Probe
from splitserve.part_security import PartSecurity, new_token, read_token
from splitserve.placement import Inventory, Place, make_inventory
from splitserve.security_settings import CeilingConfig, TlsConfig
from splitserve.service_arguments import coordinator_arguments, worker_arguments
from splitserve.tls import client_files
from splitserve.v1 import inference_pb2

Pool = Literal["prefill", "decode"]
CommandFactory = Callable[[Role, Sequence[str]], tuple[str, ...]]
"""The program and all its arguments for a role and its options."""
WorkerSpecMaker = Callable[[Pool, str, Place], ChildSpec]
"""One worker's process, by its pool, its name and its place."""

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
    """The address at which clients on this machine reach the coordinator. The port must be set."""
    return join_address(reachable_host(config.coordinator.host), config.coordinator.grpc_port)


def parts_target(config: ClusterConfig) -> str:
    """The address at which workers and the autoscaler reach it: with TLS a port of their own. Ports must be set."""
    front = config.coordinator
    if config.tls is None:
        return cluster_target(config)
    port = front.grpc_port + 1 if front.cluster_port is None else front.cluster_port
    return join_address(reachable_host(front.host), port)


def cluster_token(config: ClusterConfig) -> str:
    """The token that all parts share: the settings', the environment's, or a new one. Raises ConfigError."""
    return read_token(config.cluster_token_file) or new_token()


def operator_security(config: ClusterConfig, token: str) -> PartSecurity:
    """What whoever runs the cluster shows to its coordinator. Raises ConfigError."""
    return PartSecurity(client_files(config.tls) if config.tls else None, token)


def openai_url(config: ClusterConfig) -> str | None:
    """Base URL for OpenAI's clients on this machine; None where there is none. The port must be set."""
    front = config.coordinator
    if front.http_port is None:
        return None
    scheme = "http" if config.tls is None and front.tls is None else "https"
    return f"{scheme}://{join_address(reachable_host(front.host), front.http_port)}/v1"


def each_coordinator(config: ClusterConfig) -> list[ClusterConfig]:
    """The cluster as each of its coordinators sees it: the same settings, ports one after the other. They must be set.

    With TLS every second port, for a coordinator then has two.
    """
    front, step = config.coordinator, 1 if config.tls is None else 2
    return [
        config.model_copy(update={"coordinator": front.model_copy(update=_ports(front, number, step))})
        for number in range(config.coordinators)
    ]


def coordinator_specs(config: ClusterConfig, command: CommandFactory = splitserve_command) -> list[ChildSpec]:
    """The coordinators' processes: `coordinator`, `coordinator-1`, …"""
    shared = {"tls": _tls(config), "cluster_token_file": config.cluster_token_file}
    specs = []
    for number, seen in enumerate(each_coordinator(config)):
        options = coordinator_arguments(seen.coordinator.model_copy(update=shared))
        name = f"coordinator-{number}" if number else "coordinator"
        specs.append(ChildSpec(name, "coordinator", command("coordinator", options)))
    return specs


def worker_spec(
    config: ClusterConfig,
    command: CommandFactory,
    pool: Pool,
    name: str,
    place: Place,
    *,
    drain_s: float | None = None,
) -> ChildSpec:
    """One worker's process in its place. `drain_s`: default as the coordinator's."""
    worker = _worker(config, name, place, drain_s)
    return ChildSpec(name, pool, command(pool, worker_arguments(worker)), _layout(worker, place))


def cluster_specs(
    config: ClusterConfig,
    cores: Sequence[int],
    command: CommandFactory = splitserve_command,
    devices: Sequence[str] = (),
) -> list[ChildSpec]:
    """The children in the order of their start, coordinator first, on these cores and GPUs."""
    workers = config.prefill + config.decode
    inventory = make_inventory(cores, workers, pin_cores=config.pin_cores, devices=devices)
    return [
        *coordinator_specs(config, command),
        *worker_specs(config, inventory, partial(worker_spec, config, command)),
    ]


def worker_specs(config: ClusterConfig, inventory: Inventory, make: WorkerSpecMaker) -> list[ChildSpec]:
    """The first workers of both pools. Where there are more of them than GPUs, they share."""
    names: list[tuple[Pool, str]] = [("prefill", f"prefill-{n}") for n in range(config.prefill)]
    names += [("decode", f"decode-{n}") for n in range(config.decode)]
    return [make(pool, name, inventory.take(name)) for pool, name in names]


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


def _worker(config: ClusterConfig, worker_id: str, place: Place, drain_s: float | None) -> WorkerConfig:
    engine: EngineConfig = config.engine
    changes: dict[str, object] = {"threads": engine.threads or place.share.threads}
    if place.device is not None:
        changes["device"] = place.device
    return WorkerConfig(
        worker_id=worker_id,
        model=config.model,
        served_model_name=config.served_model_name,
        coordinators=tuple(parts_target(seen) for seen in each_coordinator(config)),
        tls=_tls(config),
        cluster_token_file=config.cluster_token_file,
        ceilings=CeilingConfig(require_cache_salt=config.coordinator.tenants is not None),
        transport=config.transport,
        verify_kv=config.verify_kv,
        wire_dtype=config.wire_dtype,
        drain_s=config.coordinator.drain_s if drain_s is None else drain_s,
        cpus=place.share.cpus,
        engine=engine.model_copy(update=changes),
    )


def _ports(front: CoordinatorConfig, number: int, step: int) -> dict[str, int]:
    ports = {
        "grpc_port": front.grpc_port,
        "cluster_port": front.cluster_port,
        "http_port": front.http_port,
        "metrics_port": front.metrics_port,
    }
    return {
        name: port + number * (step if name != "http_port" else 1) for name, port in ports.items() if port
    }


def _tls(config: ClusterConfig) -> TlsConfig | None:
    return TlsConfig(directory=config.tls) if config.tls else None


def _layout(worker: WorkerConfig, place: Place) -> str:
    where = f"cores {format_cores(worker.cpus)}" if worker.cpus else "any cores"
    threads = worker.engine.threads
    gpu = f", {place.device}" if place.device else ""
    return f"{where}, {threads} {'thread' if threads == 1 else 'threads'}{gpu}"
