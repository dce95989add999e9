"""Replicas as child processes of `splitserve up`. They end with their supervisor."""

from __future__ import annotations

from collections.abc import Sequence

from autoscaler.actuator import ActualReplica, Actuator
from autoscaler.snapshot import POOLS, PoolName
from splitserve.cluster_setup import WorkerSpecMaker
from splitserve.local_cluster import LocalCluster
from splitserve.placement import Inventory


class ProcessActuator(Actuator):
    """Adds workers to a running `LocalCluster` and lets them go.

    The cluster itself starts a worker that died again, under its name; one that crashes again and again is given
    up and is then missing here. A worker that is added gets a GPU of its own where there are any.
    """

    def __init__(self, cluster: LocalCluster, inventory: Inventory, make_spec: WorkerSpecMaker) -> None:
        self._cluster = cluster
        self._inventory = inventory
        self._make_spec = make_spec
        self._next_number = dict.fromkeys(POOLS, 0)
        for member in cluster.members:
            pool, number = member.child.spec.role, member.name.rpartition("-")[2]
            if pool != "coordinator":
                self._next_number[pool] = max(self._next_number[pool], int(number) + 1)

    async def replicas(self) -> tuple[ActualReplica, ...]:
        """See Actuator."""
        found = []
        for member in self._cluster.members:
            pool = member.child.spec.role
            if pool == "coordinator":
                continue
            place = self._inventory.place_of(member.name)
            gpu = place.device if place else None
            leaving = member.leaving.is_set()
            found.append(ActualReplica(member.name, pool, leaving, member.started_wall_s, gpu))
        return tuple(sorted(found, key=lambda replica: replica.name))

    async def start(self, pool: PoolName, count: int) -> None:
        """See Actuator. Raises UnavailableError when no process can be started."""
        self._inventory.keep({member.name for member in self._cluster.members})
        for _ in range(count):
            name = self._new_name(pool)
            place = self._inventory.take(name, own_device=True)
            try:
                await self._cluster.add(self._make_spec(pool, name, place))
            except BaseException:
                self._inventory.release(name)
                raise

    async def stop(self, pool: PoolName, names: Sequence[str], drain_s: float) -> None:
        """See Actuator."""
        for member in self._cluster.members:
            if member.child.spec.role == pool and member.name in names:
                self._cluster.remove(member.name, drain_s)

    async def close(self) -> None:
        """The processes stay with the cluster, which ends them with itself."""

    def _new_name(self, pool: PoolName) -> str:
        """A name that no worker of this cluster has had: peers may still remember those that left."""
        name = f"{pool}-{self._next_number[pool]}"
        self._next_number[pool] += 1
        return name
