"""The autoscaler inside `splitserve up`: the control loop in the supervisor's process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from autoscaler.actuators.process import ProcessActuator
from autoscaler.classes.class_demand import gpus_of
from autoscaler.policies.first_workers import first_workers
from autoscaler.policies.policy_file import AnyPool, ScalingPolicy
from autoscaler.policy_in_force import PolicyFile
from autoscaler.service import control_loop
from autoscaler.snapshot import POOLS, PoolName
from splitserve.cluster.child_process import ChildSpec
from splitserve.cluster.placement import GpuWish, Inventory, Place
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
from splitserve.runtime.reload import FileWatcher


@dataclass(frozen=True, slots=True)
class LocalScaling:
    """A local cluster's settings under a policy."""

    config: ClusterConfig
    """With the first number of workers in each pool."""
    file: PolicyFile
    security: ClusterCredentials = UNSECURED
    """Credentials for the coordinator."""
    first: Mapping[str, str] = field(default_factory=dict)
    """The class of each first worker, by its name, where the pools have classes."""

    @classmethod
    def of(cls, config: ClusterConfig, path: Path, security: ClusterCredentials = UNSECURED) -> LocalScaling:
        """Reads the policy. Pools without a given size start with `min_replicas`, or with what it takes to serve where
        that is 0, neutral workers without a given number with those of both; each replica gets the policy's
        `gpus_per_replica`, or its class's. Raises ConfigError, also where they do not fit the policy's budgets."""
        file = PolicyFile(path)
        policy = file.value.rules
        if config.workers is not None and policy.workers == "pinned":
            message = f"workers: {path} starts pinned workers; write `workers: neutral` into it"
            raise ConfigError(message, field="workers")
        fields = [name for name in ("workers", *POOLS) if name in config.model_fields_set]
        values = {name: getattr(config, name) for name in fields}
        first = first_workers(policy, {name: value for name, value in values.items() if value is not None})
        changes: dict[str, int]
        if policy.workers == "neutral":
            changes = {"workers": len(first["worker"]), "worker_gpus": gpus_of(policy.prefill, "")}
        else:
            changes = {pool: len(first[pool]) for pool in POOLS if pool not in config.model_fields_set}
            changes |= {f"{name}_gpus": gpus_of(pool, "") for name, pool in policy.pools.items()}
        config = config.model_copy(update=changes)
        check_workers(config)
        classes = {
            f"{kind}-{number}": each for kind, all_ in first.items() for number, each in enumerate(all_)
        }
        return cls(config, file, security, {name: each for name, each in classes.items() if each})

    @property
    def policy(self) -> ScalingPolicy:
        """The policy as of now."""
        return self.file.value.rules

    @property
    def seats(self) -> dict[str, GpuWish]:
        """The GPUs of the first workers, by their classes."""
        found = {}
        for name, kind in self.first.items():
            # Both pools of neutral workers have the same classes, but for their speeds.
            rules = self.policy.decode if name.startswith("decode-") else self.policy.prefill
            found[name] = GpuWish(gpus_of(rules, kind), rules.class_named(kind).gpu)
        return found

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
        return _of_class(spec, rules, replica_class or self.first.get(name, ""))

    def neutral_spec(
        self, command: CommandFactory, leaning: PoolName, name: str, place: Place, replica_class: str = ""
    ) -> ChildSpec:
        """One neutral worker's process. It drains for as long as that pool may which may longer: it serves both."""
        drain_s = max(self.policy.prefill.drain_s, self.policy.decode.drain_s)
        spec = neutral_spec(self.config, command, leaning, name, place, drain_s=drain_s)
        return _of_class(spec, self.policy.pools[leaning], replica_class or self.first.get(name, ""))

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
            follow = partial(FileWatcher(self.file.files).follow, hangup=False)
            loops = LoopRunner()
            scaling = group.create_task(loops.run("scaling", scale))
            following = group.create_task(loops.run("files", follow))
            ending = group.create_task(_cancel_after(cluster.stopping, scaling))
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
