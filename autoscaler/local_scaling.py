"""The autoscaler inside `splitserve up`: the control loop in the supervisor's process."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from autoscaler.actuators.process import ProcessActuator
from autoscaler.classes.class_demand import gpus_of
from autoscaler.policies.policy_file import AnyPool, ScalingPolicy
from autoscaler.policy_in_force import PolicyFile
from autoscaler.service import control_loop
from autoscaler.snapshot import POOLS, PoolName
from splitserve.cluster.child_process import ChildSpec
from splitserve.cluster.placement import Inventory, Place
from splitserve.cluster.process_specs import (
    ClassSpecMaker,
    CommandFactory,
    check_workers,
    neutral_spec,
    parts_target,
    worker_count,
    worker_spec,
)
from splitserve.cluster.supervisor import LocalCluster
from splitserve.config.cluster import ClusterConfig
from splitserve.errors import ConfigError
from splitserve.rpc.credentials import UNSECURED, ClusterCredentials
from splitserve.runtime.loops import LoopRunner


@dataclass(frozen=True, slots=True)
class LocalScaling:
    """A local cluster's settings under a policy."""

    config: ClusterConfig
    """With the first number of workers in each pool."""
    file: PolicyFile
    security: ClusterCredentials = UNSECURED
    """Credentials for the coordinator."""

    @classmethod
    def of(cls, config: ClusterConfig, path: Path, security: ClusterCredentials = UNSECURED) -> LocalScaling:
        """Reads the policy. Pools without a given size start with `min_replicas`, or with what it takes to serve where
        that is 0, neutral workers without a given number with those of both; each replica gets the policy's
        `gpus_per_replica`. Raises ConfigError."""
        file = PolicyFile(path)
        policy = file.value.rules
        least = dict(zip(POOLS, policy.least_awake, strict=True))
        if config.workers is not None and policy.workers == "pinned":
            message = f"workers: {path} starts pinned workers; write `workers: neutral` into it"
            raise ConfigError(message, field="workers")
        for pool, rules in policy.pools.items():
            if rules.classes:  # counts are units
                least[pool] = math.ceil(least[pool] / rules.classes[0].speed)
        if policy.workers == "neutral":
            neutral = {
                "workers": config.workers or sum(least.values()),
                "worker_gpus": gpus_of(policy.prefill, ""),
            }
            config = config.model_copy(update=neutral)
            check_workers(config)
            return cls(config, file, security)
        first: dict[str, int] = {
            pool: count for pool, count in least.items() if pool not in config.model_fields_set
        }
        first |= {
            "prefill_gpus": gpus_of(policy.prefill, ""),
            "decode_gpus": gpus_of(policy.decode, ""),
        }
        return cls(config.model_copy(update=first), file, security)

    @property
    def policy(self) -> ScalingPolicy:
        """The policy as of now."""
        return self.file.value.rules

    @property
    def gpu_kinds(self) -> dict[PoolName, str]:
        """Of the GPUs of the first workers, which are of the default class."""
        return {pool: rules.classes[0].gpu for pool, rules in self.policy.pools.items() if rules.classes}

    @property
    def most_workers(self) -> int:
        """Most workers of both pools, standbys included."""
        pools = (self.policy.prefill, self.policy.decode)
        return max(
            sum(pool.max_replicas + pool.warm_standby for pool in pools),
            worker_count(self.config),
        )

    def worker_spec(
        self, command: CommandFactory, pool: PoolName, name: str, place: Place, replica_class: str = ""
    ) -> ChildSpec:
        """One worker's process, with its pool's drain deadline and the options of its class."""
        rules = self.policy.pools[pool]
        spec = worker_spec(self.config, command, pool, name, place, drain_s=rules.drain_s)
        return _of_class(spec, rules, replica_class)

    def neutral_spec(
        self, command: CommandFactory, leaning: PoolName, name: str, place: Place, replica_class: str = ""
    ) -> ChildSpec:
        """One neutral worker's process. It drains for as long as that pool may which may longer: it serves both."""
        drain_s = max(self.policy.prefill.drain_s, self.policy.decode.drain_s)
        spec = neutral_spec(self.config, command, leaning, name, place, drain_s=drain_s)
        return _of_class(spec, self.policy.pools[leaning], replica_class)

    async def run(
        self,
        cluster: LocalCluster,
        inventory: Inventory,
        make: ClassSpecMaker,
        make_neutral: ClassSpecMaker,
    ) -> None:
        """Runs the cluster until it is stopped, and scales it once it is ready. `make_neutral`: see ProcessActuator."""
        actuator = ProcessActuator(cluster, inventory, make, make_neutral)
        async with asyncio.TaskGroup() as group:
            scale = partial(self._scale, cluster, actuator)
            scaling = group.create_task(LoopRunner().run("scaling", scale))
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
            self.file,
            (parts_target(config),),
            actuator,
            security=self.security,
            interval_s=config.autoscale_interval_s,
            window_s=config.autoscale_window_s,
        ) as loop:
            await loop.run()


def _of_class(spec: ChildSpec, rules: AnyPool, replica_class: str) -> ChildSpec:
    """With the options of its class, where the pool has classes."""
    if not rules.classes:
        return spec
    kind = rules.class_named(replica_class)
    options = ("--replica-class", kind.name, *kind.worker_options)
    return replace(spec, command=(*spec.command, *options), replica_class=kind.name)


async def _cancel_after(event: asyncio.Event, task: asyncio.Task[None]) -> None:
    await event.wait()
    task.cancel()
