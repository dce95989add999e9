"""The processes of a local cluster: their commands and places, and when the cluster is ready."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from autoscaler.actuators.actuator import ReplicaShape
from launcher.cluster.child_process import ChildSpec, Role
from launcher.cluster.placement import Inventory, Place
from launcher.cluster.supervisor import Probe
from splitserve.addresses import join_address, reachable_host
from splitserve.client import AsyncClient
from splitserve.config.cluster import ClusterConfig
from splitserve.config.command_line import arguments
from splitserve.config.engine import EngineConfig
from splitserve.config.security import CeilingConfig, TlsConfig
from splitserve.config.tracing import TracingConfig
from splitserve.config.worker import WorkerConfig
from splitserve.core_list import format_cores
from splitserve.errors import ConfigError, NotFoundError, ResourceExhaustedError
from splitserve.gpus.worker_gpus import check_gpu_count
from splitserve.models.sources import resolve_model
from splitserve.roles import RoleName
from splitserve.rpc.credentials import ClusterCredentials, new_token, read_token
from splitserve.runtime.child_launch import PROGRAM
from splitserve.runtime.children_end import CHILD_S, KILLED_S
from splitserve.security.tls import client_files
from splitserve.v1 import inference_pb2

Kind = Literal["prefill", "decode", "worker"]
CommandFactory = Callable[[Role, Sequence[str]], tuple[str, ...]]
"""Builds the command line of a role from its options."""
WorkerSpecMaker = Callable[[Kind, str, Place], ChildSpec]
"""Builds the spec of a worker from its kind, its name and its place."""

HUGE_PAGES: Mapping[str, str] = MappingProxyType({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})
"""Has glibc's malloc ask Linux for huge pages, from which a processor reads a model's weights in fewer steps."""
SERVING_STATES = frozenset({"ready", "slow-lane"})
"""A worker with a slow lane serves, with a warning."""


def splitserve_command(role: Role, options: Sequence[str]) -> tuple[str, ...]:
    """The production command: `python -m launcher coordinator ...`."""
    return (*PROGRAM, "coordinator" if role == "coordinator" else "worker", *options)


def cluster_target(config: ClusterConfig) -> str:
    """Address of the coordinator for clients on this machine. The port must be set."""
    return join_address(reachable_host(config.coordinator.host), config.coordinator.grpc_port)


def parts_target(config: ClusterConfig) -> str:
    """Address of the coordinator for workers and the autoscaler; with TLS a separate port. Ports must be set."""
    coordinator = config.coordinator
    if config.tls is None:
        return cluster_target(config)
    port = coordinator.grpc_port + 1 if coordinator.cluster_port is None else coordinator.cluster_port
    return join_address(reachable_host(coordinator.host), port)


def cluster_token(config: ClusterConfig) -> str:
    """The shared cluster token: from the settings, the environment, or a new one. Raises ConfigError."""
    return read_token(config.cluster_token_file) or new_token()


def operator_security(config: ClusterConfig, token: str) -> ClusterCredentials:
    """The operator's credentials for the coordinator. Raises ConfigError."""
    return ClusterCredentials(client_files(config.tls) if config.tls else None, token)


def openai_url(config: ClusterConfig) -> str | None:
    """Base URL for OpenAI clients on this machine; None without an HTTP port. The port must be set."""
    coordinator = config.coordinator
    if coordinator.http_port is None:
        return None
    scheme = "http" if config.tls is None and coordinator.tls is None else "https"
    return f"{scheme}://{join_address(reachable_host(coordinator.host), coordinator.http_port)}/v1"


def each_coordinator(config: ClusterConfig) -> list[ClusterConfig]:
    """The cluster's settings for each of its coordinators. They are equal except for consecutive ports, which must be
    set, and for the request log's file and the folder of batches, to whose names further coordinators add -1, -2, …

    With TLS the gRPC and metrics ports advance by two, as each coordinator then has two gRPC ports.
    """
    coordinator, step = config.coordinator, 1 if config.tls is None else 2
    steps = {"grpc_port": step, "cluster_port": step, "http_port": 1, "metrics_port": step}
    numbered = []
    for number in range(config.coordinators):
        ports = ((name, getattr(coordinator, name), by) for name, by in steps.items())
        changes: dict[str, object] = {name: port + number * by for name, port, by in ports if port}
        for name in ("request_log", "batch_folder") if number else ():
            if (path := getattr(coordinator, name)) is not None:
                changes[name] = path.with_stem(f"{path.stem}-{number}")
        numbered.append(config.model_copy(update={"coordinator": coordinator.model_copy(update=changes)}))
    return numbered


def coordinator_specs(config: ClusterConfig, command: CommandFactory = splitserve_command) -> list[ChildSpec]:
    """The coordinators' specs: `coordinator`, `coordinator-1`, …"""
    shared: dict[str, object] = {"tls": _tls(config), "cluster_token_file": config.cluster_token_file}
    shared["tokenizers"] = (*config.coordinator.tokenizers, *_own_tokenizer(config))
    specs = []
    for number, numbered in enumerate(each_coordinator(config)):
        options = arguments(numbered.coordinator.model_copy(update=shared))
        name = f"coordinator-{number}" if number else "coordinator"
        specs.append(ChildSpec(name, "coordinator", command("coordinator", options)))
    return specs


def _own_tokenizer(config: ClusterConfig) -> tuple[str, ...]:
    """The tokenizer that the workers are going to name, if it is on this machine."""
    if config.engine.kind == "simulated":
        return ()
    try:
        source = resolve_model(config.model)
    except (ConfigError, NotFoundError):
        return ()
    return (source.tokenizer_source,) if source.is_local else ()


def worker_spec(
    config: ClusterConfig,
    command: CommandFactory,
    kind: Kind,
    name: str,
    place: Place,
    *,
    drain_s: float | None = None,
) -> ChildSpec:
    """The spec of one worker. `kind` names its role; kind `worker` stands for role both. `drain_s` defaults to the
    coordinator's. Raises ConfigError for more GPUs than its engine computes on."""
    check_gpu_count(config.engine.kind, config.engine.engine_args, len(place.gpus or ()))
    worker = _worker(config, name, place, drain_s, "both" if kind == "worker" else kind)
    cores = f"cores {format_cores(worker.cpus)}" if worker.cpus else "any cores"
    threads = f"{worker.engine.threads} {'thread' if worker.engine.threads == 1 else 'threads'}"
    gpus = f", GPU {','.join(place.gpus)}" if place.gpus else ""
    start_s = worker.engine.stop_in_start_s
    return ChildSpec(
        name,
        kind,
        command(kind, arguments(worker)),
        f"{cores}, {threads}{gpus}",
        least_stop_s=start_s + CHILD_S + KILLED_S if start_s else 0.0,
        environment=HUGE_PAGES if worker.engine.kind == "torch" else {},
    )


def check_workers(config: ClusterConfig) -> None:
    """Raises ConfigError for `workers` beside numbers of workers of one role."""
    given: list[str] = [name for name in ("prefill", "decode") if name in config.model_fields_set]
    if config.workers is not None and given:
        message = (
            f"workers: {config.workers} workers of role both and {' and '.join(given)} at once; a local cluster has "
            "either these, or prefill and decode workers"
        )
        raise ConfigError(message, field="workers")


def worker_count(config: ClusterConfig) -> int:
    """The number of workers that the cluster starts with."""
    return config.workers or config.prefill + config.decode


def worker_specs(
    config: ClusterConfig,
    inventory: Inventory,
    make: WorkerSpecMaker,
    seats: Mapping[str, ReplicaShape] = MappingProxyType({}),
) -> list[ChildSpec]:
    """The specs of the first workers. A worker that `seats` names gets the GPUs given there, the others those of the
    settings.

    Raises ConfigError for a number of GPUs that the engine cannot use, ResourceExhaustedError (NO_GPU) where the
    machine has too few, FailedPreconditionError (GPU_KIND) where it has none of a kind.
    """
    sizes: dict[Kind, tuple[int, int]] = {
        "prefill": (config.prefill, config.prefill_gpus),
        "decode": (config.decode, config.decode_gpus),
    }
    if config.workers is not None:
        sizes = {"worker": (config.workers, config.worker_gpus)}
    specs = []
    for kind, (workers, gpus) in sizes.items():
        for number in range(workers):
            name = f"{kind}-{number}"
            place = _take(inventory, config, kind, name, seats.get(name, ReplicaShape(gpus)))
            specs.append(make(kind, name, place))
    return specs


def _take(inventory: Inventory, config: ClusterConfig, kind: Kind, name: str, seat: ReplicaShape) -> Place:
    if inventory.gpus.gpus:
        check_gpu_count(config.engine.kind, config.engine.engine_args, seat.gpus, f"{kind}_gpus")
    try:
        return inventory.take(name, kind, seat)
    except ResourceExhaustedError as error:
        workers = f"{config.prefill} prefill and {config.decode} decode"
        gpus = config.prefill * config.prefill_gpus + config.decode * config.decode_gpus
        if config.workers is not None:
            workers, gpus = f"{config.workers}", config.workers * config.worker_gpus
        message = (
            f"{name}: {error.message}; {workers} workers take {gpus}. Start fewer, or let them share GPUs with "
            "--replicas-per-gpu"
        )
        raise ResourceExhaustedError(message, reason=error.reason) from None


def ready_model(
    models: Sequence[inference_pb2.ModelInfo],
    info: inference_pb2.GetServerInfoResponse,
    config: ClusterConfig,
) -> str | None:
    """The served model's name once the model and all workers are ready; else None."""
    wanted = {"prefill": config.prefill, "decode": config.decode} if config.workers is None else {}
    for model in models:
        roles = Counter(
            worker.role
            for worker in info.workers
            if worker.model == model.name and worker.state in SERVING_STATES
        )
        enough = roles.total() >= worker_count(config) and all(roles[pool] >= wanted[pool] for pool in wanted)
        if model.ready and enough:
            return model.name
    return None


def cluster_probe(client: AsyncClient, config: ClusterConfig) -> Probe:
    """A probe that asks the coordinator."""

    async def probe() -> str | None:
        return ready_model(await client.models(), await client.server_info(), config)

    return probe


def _worker(
    config: ClusterConfig, worker_id: str, place: Place, drain_s: float | None, role: RoleName
) -> WorkerConfig:
    engine: EngineConfig = config.engine
    changes: dict[str, object] = {"threads": engine.threads or place.share.threads}
    if place.gpus is not None and config.replicas_per_gpu > 1:
        changes["device_memory_share"] = engine.device_memory_share / config.replicas_per_gpu
    if place.gpus == ():
        changes["device"] = "cpu"
    return WorkerConfig(
        worker_id=worker_id,
        model=config.model,
        served_model_name=config.served_model_name,
        coordinators=tuple(parts_target(numbered) for numbered in each_coordinator(config)),
        tls=_tls(config),
        cluster_token_file=config.cluster_token_file,
        ceilings=CeilingConfig(require_cache_salt=config.coordinator.tenants is not None),
        transport=config.transport,
        verify_kv=config.verify_kv,
        tracing=TracingConfig(
            endpoint=config.coordinator.tracing.endpoint, authority=config.coordinator.tracing.authority
        ),
        drain_s=config.coordinator.drain_s if drain_s is None else drain_s,
        cpus=place.share.cpus,
        gpus=place.gpus or (),
        role=role,
        engine=engine.model_copy(update=changes),
    )


def _tls(config: ClusterConfig) -> TlsConfig | None:
    return TlsConfig(directory=config.tls) if config.tls else None
