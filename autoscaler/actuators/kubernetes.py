"""Replicas as pods of one Deployment or StatefulSet per pool, scaled through the scale subresource.

Pods follow the replica count with a delay. Meanwhile an ordered pod that does not exist yet is listed under a
placeholder name, and a surplus pod as stopping, so that nothing is ordered twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import override

from autoscaler.actuators.actuator import ONE_GPU, ActualReplica, Actuator, ReplicaShape
from autoscaler.actuators.kubernetes_api import KubernetesApi, Pod, Scale
from splitserve.config.autoscaler import KubernetesConfig
from splitserve.errors import FailedPreconditionError
from splitserve.gpus.worker_gpus import check_command
from splitserve.logs import log_event
from splitserve.roles import POOLS, PoolName

CHOSEN_COST = -1000
"""Deletion cost of the pod to remove; the default is 0."""


class KubernetesActuator(Actuator):
    """Pod names are worker ids. How long a drain may take is the pods' `terminationGracePeriodSeconds`.

    A Deployment removes the chosen pod, unless another one is not ready: Kubernetes removes those first. A StatefulSet
    always removes its highest ordinal. GPUs are assigned by the Kubernetes scheduler.
    """

    def __init__(self, api: KubernetesApi, workloads: Mapping[PoolName, str]) -> None:
        self._api, self._workloads = api, workloads
        self._warned = False

    @classmethod
    def connect(cls, settings: KubernetesConfig) -> KubernetesActuator:
        """Reads the configuration; calls nothing yet. Raises ConfigError."""
        workloads: dict[PoolName, str] = {"prefill": settings.prefill, "decode": settings.decode}
        return cls(KubernetesApi(settings), workloads)

    @override
    async def replicas(self) -> tuple[ActualReplica, ...]:
        replicas = []
        for pool in POOLS:
            pods = await self._look(pool)
            for pod in pods.all:
                stopping = pod.deleting or pod in pods.leaving
                replicas.append(ActualReplica(pod.name, pool, stopping, pod.created_wall_s))
            replicas += [
                ActualReplica(name, pool, False, time.time(), placeholder=True) for name in pods.pending
            ]
        return tuple(sorted(replicas, key=lambda replica: replica.name))

    @override
    async def start(self, pool: PoolName, count: int, shape: ReplicaShape = ONE_GPU) -> None:
        """Never raises NO_GPU: a pod without a GPU waits in the queue of the Kubernetes scheduler.

        Raises NotFoundError when the workload does not exist, FailedPreconditionError (GPUS_PER_REPLICA) when its pods
        are limited to another number of GPUs than `shape.gpus`, ConfigError when their engine cannot use that many.
        """
        workload = self._workloads[pool]
        scale = await self._api.scale(workload)
        if pods := await self._api.pods(scale.selector):
            newest = max(pods, key=lambda pod: pod.created_wall_s)
            _check_gpus(workload, newest, shape.gpus)
        await self._api.set_replicas(workload, scale.replicas + count, scale.version)

    @override
    async def stop(self, names: Sequence[str], drain_s: float) -> None:
        for pool in POOLS:
            await self._stop(await self._look(pool), names, drain_s)

    async def _stop(self, pods: _WorkloadPods, names: Sequence[str], drain_s: float) -> None:
        chosen = [pod for pod in pods.staying if pod.name in names]
        fewer = len(chosen) + len(pods.pending & set(names))
        if not fewer:
            return
        if not pods.ordinal:
            for pod in pods.staying:
                if pod in chosen:
                    await self._api.set_deletion_cost(pod.name, CHOSEN_COST)
                elif pod.chosen:  # by an earlier, incomplete attempt
                    await self._api.set_deletion_cost(pod.name, None)
        await self._api.set_replicas(pods.workload, pods.scale.replicas - fewer, pods.scale.version)
        self._check_grace(chosen, drain_s)

    @override
    async def close(self) -> None:
        """Pods keep running."""
        self._api.close()

    async def _look(self, pool: PoolName) -> _WorkloadPods:
        workload = self._workloads[pool]
        scale = await self._api.scale(workload)
        return _WorkloadPods(workload, scale, await self._api.pods(scale.selector))

    def _check_grace(self, pods: Sequence[Pod], drain_s: float) -> None:
        short = [pod for pod in pods if pod.grace_s < drain_s]
        if short and not self._warned:
            self._warned = True
            log_event(
                "scaling.short_grace",
                level=logging.WARNING,
                pod=short[0].name,
                grace_s=short[0].grace_s,
                drain_s=drain_s,
            )


def _check_gpus(workload: str, pod: Pod, gpus_per_replica: int) -> None:
    """Compares the policy's number of GPUs, which counts against the budget, with the number that the pod gets."""
    if pod.gpus != gpus_per_replica and max(pod.gpus, gpus_per_replica) > 1:
        message = (
            f"gpus_per_replica is {gpus_per_replica}, but the pods of {workload} are limited to {pod.gpus} GPUs; make "
            "`resources.limits` and the policy agree"
        )
        raise FailedPreconditionError(message, reason="GPUS_PER_REPLICA", field="gpus_per_replica")
    check_command(pod.command, pod.environment, pod.gpus)


@dataclass(frozen=True, slots=True)
class _WorkloadPods:
    """A workload and its pods at one moment."""

    workload: str
    scale: Scale
    all: Sequence[Pod]

    @property
    def ordinal(self) -> bool:
        """Whether Kubernetes removes the pod with the highest ordinal first."""
        return self.workload.startswith("statefulset/")

    @property
    def leaving(self) -> list[Pod]:
        """Surplus pods that are not deleted yet, in the controller's order of removal."""
        alive = [pod for pod in self.all if not pod.deleting]
        return sorted(alive, key=self._goes_first)[: max(0, len(alive) - self.scale.replicas)]

    @property
    def staying(self) -> list[Pod]:
        """Pods within the ordered count."""
        return [pod for pod in self.all if not pod.deleting and pod not in self.leaving]

    @property
    def pending(self) -> frozenset[str]:
        """Placeholder names of ordered pods that do not exist yet."""
        missing = self.scale.replicas - len(self.staying)
        name = self.workload.partition("/")[2]
        return frozenset(f"{name}-pending-{number}" for number in range(missing))

    def _goes_first(self, pod: Pod) -> tuple[float, ...]:
        if self.ordinal:
            return (-float(pod.name.rpartition("-")[2]),)
        return pod.ready, not pod.chosen, -pod.created_wall_s
