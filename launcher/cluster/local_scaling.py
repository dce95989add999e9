"""The autoscaler inside `splitserve up`: the control loop in the supervisor's process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from autoscaler.actuators.actuator import ReplicaShape
from autoscaler.policies.policy_file import ScalingPolicy
from autoscaler.policy_in_force import PolicyFile
from autoscaler.service import control_loop
from launcher.cluster.child_process import ChildSpec
from launcher.cluster.placement import Inventory, Place
from launcher.cluster.process_actuator import ProcessActuator
from launcher.cluster.process_specs import (
    CommandFactory,
    WorkerSpecMaker,
    parts_target,
    worker_count,
    worker_spec,
)
from launcher.cluster.supervisor import LocalCluster
from splitserve.config.cluster import ClusterConfig
from splitserve.errors import ConfigError
from splitserve.roles import POOLS, PoolName
from splitserve.rpc.credentials import UNSECURED, ClusterCredentials
from splitserve.runtime.loops import LoopRunner
from splitserve.runtime.reload import FileWatcher


@dataclass(frozen=True, slots=True)
class LocalScaling:
    """A local cluster that an autoscaler scales: its settings and the policy."""

    config: ClusterConfig
    """The settings, with the number of workers that each pool starts with."""
    file: PolicyFile
    security: ClusterCredentials = UNSECURED
    """Credentials for the coordinator."""

    @classmethod
    def of(cls, config: ClusterConfig, path: Path, security: ClusterCredentials = UNSECURED) -> LocalScaling:
        """Reads the policy in the file `path`. A pool without a size in `config` starts with `min_replicas`, or with
        one worker where that is 0; each replica gets the policy's `gpus_per_replica`. Raises ConfigError, also where
        the first workers need more GPUs than `gpu_budget`."""
        if config.workers is not None:
            message = "workers: an autoscaler scales pools; give prefill and decode in place of workers"
            raise ConfigError(message, field="workers")
        file = PolicyFile(path)
        policy = file.value.rules
        given = [pool for pool in POOLS if pool in config.model_fields_set]
        counts: dict[str, int] = dict(policy.least_awake.items())
        counts |= {pool: getattr(config, pool) for pool in given}
        gpus = sum(counts[name] * pool.gpus_per_replica for name, pool in policy.pools.items())
        if policy.gpu_budget is not None and gpus > policy.gpu_budget:
            field = given[0] if given else "autoscale"
            message = (
                f"{field}: the first workers take {gpus} GPUs, more than gpu_budget ({policy.gpu_budget})"
            )
            raise ConfigError(message, field=field)
        sizes = {f"{name}_gpus": pool.gpus_per_replica for name, pool in policy.pools.items()}
        return cls(config.model_copy(update={**counts, **sizes}), file, security)

    @property
    def policy(self) -> ScalingPolicy:
        """The policy in force."""
        return self.file.value.rules

    @property
    def seats(self) -> dict[str, ReplicaShape]:
        """The GPUs of the first workers, by name."""
        return {
            f"{name}-{number}": ReplicaShape(pool.gpus_per_replica, pool.gpu)
            for name, pool in self.policy.pools.items()
            for number in range(getattr(self.config, name))
        }

    @property
    def most_workers(self) -> int:
        """The most workers that both pools may have, standbys included."""
        allowed = sum(pool.max_replicas + pool.warm_standby for pool in self.policy.pools.values())
        return max(allowed, worker_count(self.config))

    def worker_spec(self, command: CommandFactory, pool: PoolName, name: str, place: Place) -> ChildSpec:
        """One worker's process, with its pool's drain deadline."""
        drain_s = self.policy.pools[pool].drain_s
        return worker_spec(self.config, command, pool, name, place, drain_s=drain_s)

    async def run(self, cluster: LocalCluster, inventory: Inventory, make: WorkerSpecMaker) -> None:
        """Runs the cluster until it is stopped, and scales it once it is ready."""
        actuator = ProcessActuator(cluster, inventory, make)
        async with asyncio.TaskGroup() as group:
            scale = partial(self._scale, cluster, actuator)
            follow = partial(FileWatcher(self.file.files).follow, hangup=False)
            loops = LoopRunner()
            scaling = group.create_task(loops.run("scaling", scale))
            following = group.create_task(loops.run("files", follow))
            ending = group.create_task(cluster.stopping.wait())
            ending.add_done_callback(lambda _: scaling.cancel())
            try:
                await cluster.run()
            finally:
                for task in (scaling, following, ending):
                    task.cancel()

    async def _scale(self, cluster: LocalCluster, actuator: ProcessActuator) -> None:
        await cluster.was_ready.wait()
        config = self.config
        async with control_loop(
            self.file,
            (parts_target(config),),
            actuator,
            security=self.security,
            window_s=config.autoscale_window_s,
        ) as loop:
            await loop.run()
