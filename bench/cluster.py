"""A real cluster for measurements: workers on their own cores, behind one coordinator for each way of serving."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

import psutil
from typing_extensions import override

from launcher.cluster.child_process import ChildSpec, Event
from launcher.cluster.placement import available_cores, machine_gpus, make_inventory
from launcher.cluster.process_specs import (
    cluster_probe,
    cluster_target,
    coordinator_specs,
    splitserve_command,
    worker_count,
    worker_spec,
    worker_specs,
)
from launcher.cluster.supervisor import ClusterObserver, ClusterTimes, LocalCluster
from splitserve.addresses import claim_port, join_address
from splitserve.client import AsyncClient
from splitserve.config.cluster import ClusterConfig
from splitserve.config.command_line import arguments
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.gpus.inventory import GpuInventory
from splitserve.logs import LOG_LEVEL_VARIABLE

HOST = "127.0.0.1"


@dataclass
class Watcher(ClusterObserver):
    """Hands the log events of all processes to `on_event`, and keeps the served model once the cluster is ready."""

    model: str = ""
    is_ready: asyncio.Event = field(default_factory=asyncio.Event)
    on_event: Callable[[Event], None] = lambda _event: None

    @override
    def message(self, text: str) -> None:
        pass

    @override
    def ready(self, model: str) -> None:
        self.model = model
        self.is_ready.set()

    @override
    def line(self, spec: ChildSpec, line: str, event: Event | None) -> None:
        if event is not None:
            self.on_event(event)


@dataclass(frozen=True)
class Fronts:
    """Clients of the coordinators, by name, the served model, and the workers' process ids by worker id."""

    clients: Mapping[str, AsyncClient]
    model: str
    pids: Mapping[str, int]


@asynccontextmanager
async def running_cluster(
    config: ClusterConfig, coordinators: Mapping[str, CoordinatorConfig], on_event: Callable[[Event], None]
) -> AsyncIterator[Fronts]:
    """Runs the workers of `config` behind every one of the named coordinators; all processes end with the block.

    `on_event` gets the log events of all processes, debug level included.
    """
    fronts = {
        name: front.model_copy(update={"host": HOST, "grpc_port": claim_port(HOST, 0), "http_port": None})
        for name, front in coordinators.items()
    }
    first, *others = fronts.values()
    config = config.model_copy(update={"coordinator": first})
    specs = _specs(config, others)
    watcher = Watcher(on_event=on_event)
    os.environ[LOG_LEVEL_VARIABLE] = "debug"
    async with AsyncClient(cluster_target(config)) as client:
        probe = cluster_probe(client, config)
        times = ClusterTimes(ready_s=config.ready_timeout_s, drain_s=1.0)
        cluster = LocalCluster(specs, probe, watcher, times=times)
        async with asyncio.TaskGroup() as group:
            group.create_task(cluster.run())
            try:
                await watcher.is_ready.wait()
                async with _clients(fronts) as clients:
                    yield Fronts(clients, watcher.model, _worker_pids())
            finally:
                cluster.request_stop()


def cluster_specs(
    config: ClusterConfig, cores: Sequence[int], gpus: GpuInventory | None = None
) -> list[ChildSpec]:
    """All specs in start order, coordinators first, on these cores and GPUs."""
    inventory = make_inventory(cores, worker_count(config), pin_cores=config.pin_cores, gpus=gpus)
    workers = worker_specs(config, inventory, partial(worker_spec, config, splitserve_command))
    return [*coordinator_specs(config), *workers]


def _specs(config: ClusterConfig, others: list[CoordinatorConfig]) -> list[ChildSpec]:
    """The cluster's processes, and further coordinators to which its workers report too."""
    specs = cluster_specs(config, available_cores(), gpus_of(config))
    extra = [
        argument for front in others for argument in ("--coordinator", join_address(HOST, front.grpc_port))
    ]
    workers = [
        replace(spec, command=(*spec.command, *extra)) if spec.role != "coordinator" else spec
        for spec in specs
    ]
    fronts = [
        ChildSpec(
            f"coordinator-{number}",
            "coordinator",
            splitserve_command("coordinator", arguments(front)),
        )
        for number, front in enumerate(others, 1)
    ]
    return [*fronts, *workers]


@cache
def _gpus(kind: str, device: str, replicas_per_gpu: int) -> GpuInventory:
    return machine_gpus(kind, device, replicas_per_gpu)


def gpus_of(config: ClusterConfig) -> GpuInventory:
    """The GPUs of the cluster's workers. The machine is asked only at the first call."""
    return _gpus(config.engine.kind, config.engine.device, config.replicas_per_gpu)


def pin(pid: int, core: int) -> None:
    """Pins all threads of a process to one core."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # a thread may have ended meanwhile
            os.sched_setaffinity(int(task.name), {core})


def _worker_pids() -> dict[str, int]:
    pids: dict[str, int] = {}
    for child in psutil.Process().children():
        command = child.cmdline()
        if "--worker-id" in command:
            pids[command[command.index("--worker-id") + 1]] = child.pid
    return pids


@asynccontextmanager
async def _clients(fronts: Mapping[str, CoordinatorConfig]) -> AsyncIterator[Mapping[str, AsyncClient]]:
    clients = {
        name: AsyncClient(join_address(HOST, front.grpc_port), timeout_s=front.request_timeout_s)
        for name, front in fronts.items()
    }
    for client in clients.values():
        await client.__aenter__()
    try:
        for client in clients.values():
            await client.wait_ready()
        yield clients
    finally:
        for client in clients.values():
            await client.__aexit__(None, None, None)
