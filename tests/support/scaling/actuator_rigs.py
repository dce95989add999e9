"""Every kind of actuator over a backend that a test may disturb, for the contract suite.

A further kind: write a `Rig` and a function that opens it, and put that into `RIGS` (or, where it needs something
that is not on every machine, let the function call `pytest.skip`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from autoscaler.actuators.actuator import Actuator
from autoscaler.actuators.hosts.host_watch import HostWatch
from autoscaler.actuators.hosts.hosts_actuator import HostsActuator
from autoscaler.actuators.kubernetes import KubernetesActuator
from launcher.cluster.child_process import ChildSpec, Event, RestartPolicy
from launcher.cluster.placement import Inventory, Place, make_inventory
from launcher.cluster.process_actuator import ProcessActuator
from launcher.cluster.supervisor import ClusterTimes, LocalCluster
from splitserve.config.autoscaler import KubernetesConfig
from splitserve.gpus.inventory import GpuInventory
from splitserve.roles import PoolName
from tests.support.kubernetes.kubernetes_api import FakeKubernetes, Workload, serving_kubernetes
from tests.support.scaling.memory_host import MemoryHost

STUB = Path(__file__).resolve().parents[1] / "cluster" / "stub_worker.py"


def numbered_gpus(count: int | None) -> GpuInventory:
    """So many GPUs, all linked."""
    return GpuInventory.of_groups([[str(number) for number in range(count or 0)]])


class Rig(ABC):
    """An actuator, and hands on what is behind it."""

    actuator: Actuator
    gives_gpus = True
    """Whether the actuator itself gives GPUs out, from an inventory."""
    keeps_deadline = True
    """Whether the actuator itself, and not the platform, kills what does not end in time."""

    @abstractmethod
    def again(self) -> Actuator:
        """A second actuator over the same replicas, as after a restart. It remembers nothing."""

    @abstractmethod
    async def vanish(self, name: str) -> None:
        """This replica dies."""

    @abstractmethod
    def make_stubborn(self, name: str) -> None:
        """This replica does not end when it is told to."""


OpenRig = Callable[[Path, int | None], AbstractAsyncContextManager[Rig]]
"""Folder of one's own and number of GPUs (None: no inventory)."""


class Silent:
    """Shows nobody anything."""

    def message(self, text: str) -> None:
        pass

    def ready(self, model: str) -> None:
        pass

    def line(self, spec: ChildSpec, line: str, event: Event | None) -> None:
        pass


class ProcessRig(Rig):
    def __init__(self, cluster: LocalCluster, folder: Path, inventory: Inventory) -> None:
        self.cluster, self._folder, self._inventory = cluster, folder, inventory
        self.actuator = self.again()

    def again(self) -> Actuator:
        return ProcessActuator(self.cluster, self._inventory, self._make)

    async def vanish(self, name: str) -> None:
        member = next(member for member in self.cluster.processes if member.name == name)
        assert member.child.pid is not None
        os.kill(member.child.pid, signal.SIGKILL)
        await member.child.wait()

    def make_stubborn(self, name: str) -> None:
        (self._folder / f"{name}.stubborn").touch()

    def _make(self, pool: PoolName, name: str, place: Place) -> ChildSpec:
        return ChildSpec(name, pool, self._command(name))

    def _command(self, name: str) -> tuple[str, ...]:
        return sys.executable, "-I", "-S", str(STUB), str(self._folder), name


@asynccontextmanager
async def open_process(folder: Path, gpus: int | None) -> AsyncIterator[Rig]:
    async def probe() -> str:
        return "stub"

    inventory = make_inventory([0], 4, pin_cores=False, gpus=numbered_gpus(gpus))
    times = ClusterTimes(unready_drain_s=0.0, drain_s=0.0, drain_margin_s=0.1)
    policy = RestartPolicy(first_delay_s=0.05, last_delay_s=0.1)
    cluster = LocalCluster([], probe, Silent(), times=times, policy=policy)
    running = asyncio.create_task(cluster.run())
    await cluster.was_ready.wait()
    try:
        yield ProcessRig(cluster, folder, inventory)
    finally:
        cluster.request_stop()
        await running


class KubernetesRig(Rig):
    gives_gpus = False
    keeps_deadline = False

    def __init__(self, kubernetes: FakeKubernetes, kubeconfig: Path, kind: str) -> None:
        self.kubernetes = kubernetes
        self._settings = KubernetesConfig(
            kubeconfig=kubeconfig, prefill=f"{kind}/prefill", decode=f"{kind}/decode"
        )
        self.actuator = self.again()

    def again(self) -> KubernetesActuator:
        return KubernetesActuator.connect(self._settings)

    async def vanish(self, name: str) -> None:
        self.kubernetes.vanish(name)

    def make_stubborn(self, name: str) -> None:
        raise AssertionError("the kubelet kills what does not end in time")


@asynccontextmanager
async def open_deployments(folder: Path, gpus: int | None) -> AsyncIterator[Rig]:
    async with _kubernetes("deployment", folder) as rig:
        yield rig


@asynccontextmanager
async def open_stateful_sets(folder: Path, gpus: int | None) -> AsyncIterator[Rig]:
    async with _kubernetes("statefulset", folder) as rig:
        yield rig


@asynccontextmanager
async def _kubernetes(kind: str, folder: Path) -> AsyncIterator[KubernetesRig]:
    kubernetes = FakeKubernetes(Workload(kind, "prefill"), Workload(kind, "decode"))
    with serving_kubernetes(kubernetes, folder) as kubeconfig:
        rig = KubernetesRig(kubernetes, kubeconfig, kind)
        try:
            yield rig
        finally:
            await rig.actuator.close()


@asynccontextmanager
async def open_docker(folder: Path, gpus: int | None) -> AsyncIterator[Rig]:
    from tests.support.scaling.docker_rig import docker_rig  # it needs the extra `docker`

    async with docker_rig(gpus) as rig:
        yield rig


class HostsRig(Rig):
    """Two hosts with one half of the GPUs each."""

    def __init__(self, gpus: int | None) -> None:
        self._hosts = [MemoryHost(name, gpus // 2 if gpus is not None else None) for name in ("a", "b")]
        self.actuator = self.again()

    def again(self) -> HostsActuator:
        return HostsActuator([HostWatch(host.name, host) for host in self._hosts])

    async def vanish(self, name: str) -> None:
        for host in self._hosts:
            host.there.pop(name, None)

    def make_stubborn(self, name: str) -> None:
        for host in self._hosts:
            host.stubborn.add(name)


@asynccontextmanager
async def open_hosts(folder: Path, gpus: int | None) -> AsyncIterator[Rig]:
    rig = HostsRig(gpus)
    yield rig
    await rig.actuator.close()


RIGS: dict[str, OpenRig] = {
    "process": open_process,
    "docker": open_docker,
    "hosts": open_hosts,
    "kubernetes-deployment": open_deployments,
    "kubernetes-statefulset": open_stateful_sets,
}
