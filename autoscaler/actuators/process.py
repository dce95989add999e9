"""Replicas as child processes of `splitserve up`. They end with their supervisor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autoscaler.actuators.actuator import ORDINARY, ActualReplica, Actuator, ReplicaKind
from autoscaler.snapshot import POOLS, PoolName
from splitserve.cluster.child_process import ChildSpec
from splitserve.cluster.placement import Inventory
from splitserve.cluster.process_specs import ClassSpecMaker, Kind
from splitserve.cluster.supervisor import LocalCluster


class ProcessActuator(Actuator):
    """Adds workers to a running `LocalCluster` and removes them.

    The cluster itself restarts a worker that died, under its name; one that keeps crashing is given up and no longer
    listed. An added worker gets GPUs of its own where there are any.
    """

    proves_end = True  # a child stays a member until it has been waited for

    def __init__(
        self,
        cluster: LocalCluster,
        inventory: Inventory,
        make_spec: ClassSpecMaker,
        make_neutral: ClassSpecMaker,
    ) -> None:
        """`make_spec`: makes the spec of a worker of a pool and a class. `make_neutral`: the same of a neutral worker,
        which leans to the given pool at first."""
        self._cluster = cluster
        self._inventory = inventory
        self._make_spec, self._make_neutral = make_spec, make_neutral
        self._next_number = Counter[str]()
        for member in cluster.processes:
            kind, number = member.child.spec.role, member.name.rpartition("-")[2]
            if _pool(member.child.spec) is not None:
                self._next_number[kind] = max(self._next_number[kind], int(number) + 1)

    async def replicas(self) -> tuple[ActualReplica, ...]:
        """See Actuator."""
        found = []
        for member in self._cluster.processes:
            pool = _pool(member.child.spec)
            if pool is None:
                continue
            place = self._inventory.place_of(member.name)
            gpu = ",".join(place.gpus or ()) if place else None
            leaving = member.leaving.is_set()
            kind = member.child.spec.replica_class
            found.append(
                ActualReplica(
                    member.name, pool, leaving, member.started_wall_s, gpu or None, replica_class=kind
                )
            )
        return tuple(sorted(found, key=lambda replica: replica.name))

    @property
    def gpu_inventory(self) -> int | None:
        """See Actuator."""
        return self._inventory.gpus.capacity or None

    async def start(self, pool: PoolName, count: int, kind: ReplicaKind = ORDINARY) -> None:
        """See Actuator. Raises UnavailableError when no process can be started."""
        self._inventory.release_except({member.name for member in self._cluster.processes})
        role: Kind = "worker" if kind.neutral else pool
        for _ in range(count):
            name = self._new_name(role)
            place = self._inventory.take(name, role, kind.gpus, kind.gpu)
            try:
                make = self._make_neutral if kind.neutral else self._make_spec
                await self._cluster.add(make(pool, name, place, kind.replica_class))
            except BaseException:
                self._inventory.release(name)
                raise

    async def stop(self, pool: PoolName, names: Sequence[str], drain_s: float) -> None:
        """See Actuator."""
        for member in self._cluster.processes:
            if _pool(member.child.spec) == pool and member.name in names:
                self._cluster.remove(member.name, drain_s)

    async def close(self) -> None:
        """The processes stay with the cluster, which ends them with itself."""

    def _new_name(self, kind: Kind) -> str:
        """A name not used before in this cluster: peers may still know workers that have left."""
        name = f"{kind}-{self._next_number[kind]}"
        self._next_number[kind] += 1
        return name


def _pool(spec: ChildSpec) -> PoolName | None:
    """The pool that a process was started for; None for one that is no worker."""
    return spec.role if spec.role in POOLS else spec.leaning
