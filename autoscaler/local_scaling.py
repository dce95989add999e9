"""The autoscaler inside `splitserve up`: the control loop beside the supervisor, in its process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from autoscaler.actuators.process import ProcessActuator
from autoscaler.policy_file import ScalingPolicy, load_policy
from autoscaler.service import control_loop
from autoscaler.snapshot import PoolName
from splitserve.child_process import ChildSpec
from splitserve.cluster_setup import CommandFactory, WorkerSpecMaker, parts_target, worker_spec
from splitserve.config import ClusterConfig
from splitserve.local_cluster import LocalCluster
from splitserve.part_security import UNSECURED, PartSecurity
from splitserve.placement import Inventory, Place


@dataclass(frozen=True, slots=True)
class LocalScaling:
    """A local cluster's settings under a policy."""

    config: ClusterConfig
    """With the first number of workers in each pool."""
    policy: ScalingPolicy
    security: PartSecurity = UNSECURED
    """What the coordinator wants to see."""

    @classmethod
    def of(cls, config: ClusterConfig, path: Path, security: PartSecurity = UNSECURED) -> LocalScaling:
        """Reads the policy. Pools whose size is not given begin at the policy's least. Raises ConfigError."""
        policy = load_policy(path)
        least = {"prefill": policy.prefill.min_replicas, "decode": policy.decode.min_replicas}
        first = {pool: count for pool, count in least.items() if pool not in config.model_fields_set}
        return cls(config.model_copy(update=first), policy, security)

    @property
    def most_workers(self) -> int:
        """Of both pools, standbys included."""
        pools = (self.policy.prefill, self.policy.decode)
        return max(
            sum(pool.max_replicas + pool.warm_standby for pool in pools),
            self.config.prefill + self.config.decode,
        )

    def worker_spec(self, command: CommandFactory, pool: PoolName, name: str, place: Place) -> ChildSpec:
        """One worker's process, with its pool's drain deadline."""
        drain_s = (self.policy.prefill if pool == "prefill" else self.policy.decode).drain_s
        return worker_spec(self.config, command, pool, name, place, drain_s=drain_s)

    async def run(self, cluster: LocalCluster, inventory: Inventory, make: WorkerSpecMaker) -> None:
        """Runs the cluster until it is told to stop, and from its readiness on scales it."""
        actuator = ProcessActuator(cluster, inventory, make)
        async with asyncio.TaskGroup() as group:
            scaling = group.create_task(self._scale(cluster, actuator))
            ending = group.create_task(_cancel_after(cluster.stopping, scaling))
            try:
                await cluster.run()
            finally:
                scaling.cancel()
                ending.cancel()

    async def _scale(self, cluster: LocalCluster, actuator: ProcessActuator) -> None:
        await cluster.was_ready.wait()
        config = self.config
        async with control_loop(
            self.policy,
            (parts_target(config),),
            actuator,
            security=self.security,
            interval_s=config.autoscale_interval_s,
            window_s=config.autoscale_window_s,
        ) as loop:
            await loop.run()


async def _cancel_after(event: asyncio.Event, task: asyncio.Task[None]) -> None:
    await event.wait()
    task.cancel()
