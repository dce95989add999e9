"""Replicas as child processes of `splitserve up`. They end with their supervisor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from typing_extensions import override

from autoscaler.actuators.actuator import ONE_GPU, ActualReplica, Actuator, ReplicaShape
from launcher.cluster.child_process import ChildSpec
from launcher.cluster.placement import Inventory
from launcher.cluster.process_specs import WorkerSpecMaker
from launcher.cluster.supervisor import LocalCluster
from splitserve.roles import POOLS, PoolName


class ProcessActuator(Actuator):
    """Adds workers to a running `LocalCluster` and removes them.

    The cluster itself restarts a worker that died, under its name; it gives up a worker that keeps crashing, which is
    no longer listed then. An added worker gets GPUs of its own where there are any.
    """

    proves_end = True  # a child stays a member until it has been waited for

    def __init__(self, cluster: LocalCluster, inventory: Inventory, make_spec: WorkerSpecMaker) -> None:
        self._cluster, self._inventory, self._make_spec = cluster, inventory, make_spec
        self._next_number = Counter[str]()
        for member in cluster.processes:
            pool, number = _pool(member.child.spec), member.name.rpartition("-")[2]
            if pool is not None:
                self._next_number[pool] = max(self._next_number[pool], int(number) + 1)

    @override
    async def replicas(self) -> tuple[ActualReplica, ...]:
        replicas = []
        for member in self._cluster.processes:
            pool = _pool(member.child.spec)
            if pool is None:
                continue
            place = self._inventory.place_of(member.name)
            gpu = ",".join(place.gpus or ()) if place else None
            leaving = member.leaving.is_set()
            replicas.append(ActualReplica(member.name, pool, leaving, member.started_wall_s, gpu or None))
        return tuple(sorted(replicas, key=lambda replica: replica.name))

    @property
    @override
    def gpu_inventory(self) -> int | None:
        return self._inventory.gpus.capacity or None

    @override
    async def start(self, pool: PoolName, count: int, shape: ReplicaShape = ONE_GPU) -> None:
        """Raises UnavailableError when no process can be started."""
        self._inventory.release_except({member.name for member in self._cluster.processes})
        for _ in range(count):
            # A name not used before in this cluster: peers may still know workers that have left.
            name = f"{pool}-{self._next_number[pool]}"
            self._next_number[pool] += 1
            place = self._inventory.take(name, pool, shape)
            try:
                await self._cluster.add(self._make_spec(pool, name, place))
            except BaseException:
                self._inventory.release(name)
                raise

    @override
    async def stop(self, names: Sequence[str], drain_s: float) -> None:
        for member in self._cluster.processes:
            if _pool(member.child.spec) is not None and member.name in names:
                self._cluster.remove(member.name, drain_s)

    async def close(self) -> None:
        """The processes stay with the cluster, which ends them with itself."""


def _pool(spec: ChildSpec) -> PoolName | None:
    """The pool that a process was started for; None for one that is no worker."""
    return spec.role if spec.role in POOLS else None
