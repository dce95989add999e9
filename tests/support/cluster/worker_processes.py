"""An actuator whose replicas are worker processes of a test's cluster."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence

from autoscaler.actuators.actuator import ORDINARY, ActualReplica, Actuator, ReplicaKind
from autoscaler.snapshot import PoolName
from tests.support.cluster.processes import ServiceProcess
from tests.support.cluster.real_cluster import Cluster


class WorkerProcesses(Actuator):
    """Workers of one model. `started` is called after each start, before anything else happens."""

    proves_end = True

    def __init__(
        self, cluster: Cluster, model: str, options: Sequence[str], started: Callable[[], None]
    ) -> None:
        self._cluster, self._model, self._options, self._started = cluster, model, options, started
        self._ours: dict[str, tuple[PoolName, ServiceProcess, float]] = {}
        self._told: set[str] = set()
        self._number = 0

    @property
    def alive(self) -> list[str]:
        """Names of those whose processes have not ended."""
        return [name for name, (_, process, _) in self._ours.items() if process.process.poll() is None]

    def count(self, pool: PoolName) -> int:
        """Those of a pool that are not told to end."""
        return sum(self._ours[name][0] == pool and name not in self._told for name in self.alive)

    async def replicas(self) -> tuple[ActualReplica, ...]:
        """See Actuator."""
        found = []
        for name in sorted(self.alive):
            pool, _, made_s = self._ours[name]
            found.append(ActualReplica(name, pool, name in self._told, made_s))
        return tuple(found)

    async def start(self, pool: PoolName, count: int, kind: ReplicaKind = ORDINARY) -> None:
        """See Actuator."""
        for _ in range(count):
            name = f"{self._model}-{pool}-{self._number}"
            self._number += 1
            options = (*self._options, "--served-model-name", self._model)
            made = await asyncio.to_thread(self._cluster.add_worker, pool, name, *options)
            self._ours[name] = pool, made, time.time()
            self._started()

    async def stop(self, pool: PoolName, names: Sequence[str], drain_s: float) -> None:
        """See Actuator."""
        for name in set(names) & set(self.alive) - self._told:
            self._told.add(name)
            self._ours[name][1].signal(signal.SIGTERM)

    async def close(self) -> None:
        """The processes stay with the cluster, which ends them."""
