"""Replicas as processes of a test's cluster."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from autoscaler.actuators.actuator import ActualReplica, Actuator
from autoscaler.snapshot import POOLS, PoolName
from tests.support.cluster.processes import ServiceProcess
from tests.support.cluster.real_cluster import Cluster


class ClusterActuator(Actuator):
    """Adds workers to a running cluster, and ends them. Those that the cluster began with are not its own."""

    proves_end = True

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._made: dict[str, tuple[PoolName, ServiceProcess, float]] = {}
        self._stopping: set[str] = set()
        self.started = dict.fromkeys(POOLS, 0)

    async def replicas(self) -> tuple[ActualReplica, ...]:
        alive = {name: each for name, each in self._made.items() if each[1].process.poll() is None}
        return tuple(
            ActualReplica(name, pool, name in self._stopping, since_s)
            for name, (pool, _, since_s) in sorted(alive.items())
        )

    async def start(self, pool: PoolName, count: int, gpus_each: int = 1, *, neutral: bool = False) -> None:
        for _ in range(count):
            name = f"{pool}-made-{self.started[pool]}"
            self.started[pool] += 1
            options = ("--leaning", pool) if neutral else ()
            kind = "neutral" if neutral else pool
            self._made[name] = pool, self._cluster.add_worker(kind, name, *options), time.time()

    async def stop(self, pool: PoolName, names: Sequence[str], drain_s: float) -> None:
        for name in names:
            if name in self._made and name not in self._stopping:
                self._stopping.add(name)
                self._made[name][1].signal(signal.SIGTERM)

    async def close(self) -> None:
        """The processes are the cluster's."""
