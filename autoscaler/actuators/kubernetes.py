"""Replicas as pods of one Deployment or StatefulSet per pool, or per class of a pool, scaled through the scale
subresource.

Pods follow the replica count with a delay. Meanwhile an ordered pod that does not exist yet is listed under a
placeholder name, and a surplus pod as stopping, so that nothing is ordered twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoscaler.actuators.actuator import ORDINARY, ActualReplica, Actuator, ReplicaKind
from autoscaler.actuators.kubernetes_api import KubernetesApi, Pod, Scale
from autoscaler.actuators.worker_kind import check_kind
from autoscaler.snapshot import POOLS, PoolName
from splitserve.config.autoscaler import KubernetesConfig
from splitserve.errors import FailedPreconditionError, NotFoundError
from splitserve.gpus.engine_command import check_command
from splitserve.logs import log_event

CHOSEN_COST = -1000
"""Deletion cost of the pod to remove; the default is 0."""


class KubernetesActuator(Actuator):
    """Pod names are worker ids. How long a drain may take is the pods' `terminationGracePeriodSeconds`.

    A Deployment removes the chosen pod, unless another one is not ready: Kubernetes removes those first. A StatefulSet
    always removes its highest ordinal. GPUs are assigned by the Kubernetes scheduler.
    """

    def __init__(
        self, api: KubernetesApi, workloads: Mapping[PoolName, str], classes: Sequence[str] = ()
    ) -> None:
        """`classes` have workloads of their own, named after those of the pools, which need not exist then."""
        self._api = api
        self._workloads = {
            pool: {"": name} | {kind: f"{name}-{kind}" for kind in classes}
            for pool, name in workloads.items()
        }
        """By pool and class."""
        self._has_classes = bool(classes)
        self._warned = False

    @classmethod
    def connect(cls, settings: KubernetesConfig) -> KubernetesActuator:
        """Reads the configuration; calls nothing yet. Raises ConfigError."""
        workloads: dict[PoolName, str] = {"prefill": settings.prefill, "decode": settings.decode}
        return cls(KubernetesApi(settings), workloads, settings.classes)

    async def replicas(self) -> tuple[ActualReplica, ...]:
        """See Actuator."""
        found = []
        for pool in POOLS:
            for kind, seen in (await self._look(pool)).items():
                for pod in seen.pods:
                    stopping = pod.deleting or pod in seen.leaving
                    found.append(
                        ActualReplica(pod.name, pool, stopping, pod.created_wall_s, replica_class=kind)
                    )
                found += [
                    ActualReplica(name, pool, False, time.time(), placeholder=True, replica_class=kind)
                    for name in seen.pending
                ]
        return tuple(sorted(found, key=lambda replica: replica.name))

    async def start(self, pool: PoolName, count: int, kind: ReplicaKind = ORDINARY) -> None:
        """See Actuator. Never NO_GPU: a pod without a GPU waits in the scheduler's queue.

        Raises FailedPreconditionError (REPLICA_CLASSES) for a class that has no workload of its own, (NO_TEMPLATE)
        where that does not exist, and (GPUS_PER_REPLICA) where its pods are limited to another number of GPUs than
        `kind.gpus`, ConfigError where their engine cannot use so many.
        """
        workload = self._workload(pool, kind.replica_class)
        try:
            scale = await self._api.scale(workload)
        except NotFoundError as error:
            if not kind.replica_class:
                raise
            raise FailedPreconditionError(error.message, reason="NO_TEMPLATE") from None
        if pods := await self._api.pods(scale.selector):
            newest = max(pods, key=lambda pod: pod.created_wall_s)
            check_kind(f"the pods of {workload}", newest.command, kind.neutral)
            _check_gpus(workload, newest, kind.gpus)
        await self._api.set_replicas(workload, scale.replicas + count, scale.version)

    def _workload(self, pool: PoolName, kind: str) -> str:
        if kind not in self._workloads[pool]:
            message = (
                f"{pool}.classes: a pool is one workload of equal pods, and {kind} has none of its own; name it in "
                "kubernetes.classes (--workload-class)"
            )
            raise FailedPreconditionError(message, reason="REPLICA_CLASSES", field="classes")
        return self._workloads[pool][kind]

    async def stop(self, pool: PoolName, names: Sequence[str], drain_s: float) -> None:
        """See Actuator."""
        for seen in (await self._look(pool)).values():
            await self._stop(seen, names, drain_s)

    async def _stop(self, seen: _Seen, names: Sequence[str], drain_s: float) -> None:
        chosen = [pod for pod in seen.staying if pod.name in names]
        fewer = len(chosen) + len(seen.pending & set(names))
        if not fewer:
            return
        if not seen.ordinal:
            for pod in seen.staying:
                if pod in chosen:
                    await self._api.set_deletion_cost(pod.name, CHOSEN_COST)
                elif pod.chosen:  # by an earlier, incomplete attempt
                    await self._api.set_deletion_cost(pod.name, None)
        await self._api.set_replicas(seen.workload, seen.scale.replicas - fewer, seen.scale.version)
        self._check_grace(chosen, drain_s)

    async def close(self) -> None:
        """See Actuator. Pods stay."""
        self._api.close()

    async def _look(self, pool: PoolName) -> dict[str, _Seen]:
        """By class; with classes only those that exist. Raises NotFoundError where none does."""
        found: dict[str, _Seen] = {}
        for kind, workload in self._workloads[pool].items():
            try:
                scale = await self._api.scale(workload)
            except NotFoundError:
                if not self._has_classes:
                    raise
                continue
            found[kind] = _Seen(workload, scale, await self._api.pods(scale.selector))
        if not found:
            names = ", ".join(self._workloads[pool].values())
            raise NotFoundError(f"kubernetes: none of the workloads of {pool} exists: {names}")
        return found

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


def _check_gpus(workload: str, pod: Pod, gpus_each: int) -> None:
    """The number of the policy counts against the budget, that of the pod decides what it gets."""
    if pod.gpus != gpus_each and max(pod.gpus, gpus_each) > 1:
        message = (
            f"gpus_per_replica is {gpus_each}, but the pods of {workload} are limited to {pod.gpus} GPUs; make "
            "`resources.limits` and the policy agree"
        )
        raise FailedPreconditionError(message, reason="GPUS_PER_REPLICA", field="gpus_per_replica")
    check_command(pod.command, pod.environment, pod.gpus)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A workload and its pods at one moment."""

    workload: str
    scale: Scale
    pods: Sequence[Pod]

    @property
    def ordinal(self) -> bool:
        """Whether the highest ordinal goes first."""
        return self.workload.startswith("statefulset/")

    @property
    def leaving(self) -> list[Pod]:
        """Surplus pods that are not deleted yet, in the controller's order of removal."""
        alive = [pod for pod in self.pods if not pod.deleting]
        return sorted(alive, key=self._goes_first)[: max(0, len(alive) - self.scale.replicas)]

    @property
    def staying(self) -> list[Pod]:
        """Pods within the ordered count."""
        return [pod for pod in self.pods if not pod.deleting and pod not in self.leaving]

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
