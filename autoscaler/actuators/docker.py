"""Replicas of compose services on one Docker host.

A pool's containers carry the label `splitserve.pool`. All state, drains and their deadlines included, is read from the
Engine every time: a restarted autoscaler continues where the last one stopped, and containers that compose started
count like those of the autoscaler. A new replica is a copy of the pool's newest container.

The last container of a pool is kept after it has ended, as the template for the next one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from docker import APIClient
from docker.errors import APIError, NotFound
from typing_extensions import override

from autoscaler.actuators.actuator import ONE_GPU, ActualReplica, ReplicaShape, Room, RoomActuator
from autoscaler.actuators.docker_engine import DockerEngine, last_lines, may_be_gone
from autoscaler.actuators.docker_room import HostLimits, free_room, readiness
from autoscaler.actuators.docker_template import (
    MODEL_LABEL,
    POOL_LABEL,
    PROJECT_LABEL,
    Container,
    Seat,
    choose_seat,
    command_of,
    further_networks,
    gpus_of,
    has_host_network,
    ports_of,
    replica_body,
    worker_id,
)
from splitserve.errors import FailedPreconditionError
from splitserve.gpus.inventory import GpuInventory
from splitserve.gpus.placement import GpuUse, choose_gpus, taken
from splitserve.gpus.worker_gpus import check_command, environment_of
from splitserve.logs import log_event
from splitserve.roles import POOLS, PoolName

MAX_DRAIN_S = 86_400.0
"""The longest drain of a policy. A container's name may hold a later deadline, written by a wall clock that was ahead;
this bounds it."""
LOG_LINES = 20
"""Log lines of a failed replica that are copied to the autoscaler's log before its container is removed."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """What inspecting a container shows, as far as it never changes."""

    name: str
    """The worker's id."""
    gpus: tuple[str, ...]
    ports: tuple[int, ...]


class DockerActuator(RoomActuator):
    """Scales the pools of one compose project. `gpus` are the GPUs that replicas may use; empty: replicas need none.

    With `model`, only containers with this label `splitserve.model` are replicas; other containers are left alone.
    `limits` are given when this host is one of several.
    """

    proves_end = True  # the Engine lists a container until its processes have ended

    def __init__(
        self,
        engine: DockerEngine,
        project: str,
        gpus: GpuInventory | None = None,
        model: str = "",
        limits: HostLimits | None = None,
    ) -> None:
        self._engine = engine
        self._project = project
        self._gpus = gpus or GpuInventory()
        self._model = model
        self._limits = limits
        self._ask_gpus = limits.ask_gpus if limits is not None else None
        self._has_own_gpus = self._ask_gpus is not None
        self._taken_by_others = 0
        """GPUs of the inventory that replicas of other models use, counted as its `capacity` counts."""
        self._facts: dict[str, _Facts] = {}
        """By container id."""
        self._drain_ends: dict[str, float] = {}
        """Drain deadlines by container id, on the monotonic clock: setting the wall clock moves none of them."""
        self._ended: list[Container] = []
        """Containers that had ended at the latest list, without templates; `tidy` removes them."""
        self._overrun: list[Container] = []
        """Containers past their drain deadline at the latest list; `tidy` kills them."""
        self._stuck: set[str] = set()
        """Ids of containers that the Engine failed to remove or kill."""

    @override
    async def replicas(self) -> tuple[ActualReplica, ...]:
        return await self._engine.call("list replicas", self._look)

    @override
    async def tidy(self) -> None:
        if self._ended or self._overrun:
            await self._engine.call("tidy", self._tidy)

    @property
    @override
    def gpu_inventory(self) -> int | None:
        """GPUs that replicas of other models use are left out."""
        return max(0, self._gpus.capacity - self._taken_by_others) if self._gpus.gpus else None

    @override
    async def start(self, pool: PoolName, count: int, shape: ReplicaShape = ONE_GPU) -> None:
        """Raises FailedPreconditionError (NO_TEMPLATE) for a pool without any container, ConfigError
        (field `gpus_per_replica`) for more GPUs than the worker's engine computes on."""
        await self._engine.call(f"start {pool}", lambda client: self._start(client, pool, count, shape))

    @override
    async def stop(self, names: Sequence[str], drain_s: float) -> None:
        await self._engine.call("stop replicas", lambda client: self._stop(client, names, drain_s))

    @override
    async def room(self, pool: PoolName, shape: ReplicaShape) -> Room:
        return await self._engine.call(f"room for {pool}", lambda client: self._room(client, pool, shape))

    @override
    async def close(self) -> None:
        """Replicas keep running."""
        await self._engine.close()

    def _look(self, client: APIClient) -> tuple[ActualReplica, ...]:
        if self._ask_gpus is not None and (inventory := self._ask_gpus(client)) is not None:
            self._gpus, self._ask_gpus = inventory, None
        living = []
        containers = self._containers(client)
        ids = {container.id for container in containers}
        self._facts = {id_: facts for id_, facts in self._facts.items() if id_ in ids}
        self._drain_ends = {id_: end_s for id_, end_s in self._drain_ends.items() if id_ in ids}
        self._stuck &= ids
        if self._gpus.gpus and self._model:
            others = [container for container in containers if container.model != self._model]
            self._taken_by_others = taken(self._gpus, self._uses(client, others))
        for container in self._living(self._ours(containers)):
            if (facts := self._facts_of(client, container)) is not None:
                stopping, gpu = container.drain_until_s is not None, ",".join(facts.gpus) or None
                living.append(
                    ActualReplica(facts.name, container.pool, stopping, container.created_wall_s, gpu)
                )
        return tuple(sorted(living, key=lambda replica: replica.name))

    def _ours(self, containers: Sequence[Container]) -> list[Container]:
        return [container for container in containers if self._model in ("", container.model)]

    def _containers(self, client: APIClient) -> list[Container]:
        labels = [f"{PROJECT_LABEL}={self._project}", POOL_LABEL]
        entries: list[dict[str, Any]] = client.containers(all=True, filters={"label": labels})
        containers = [Container.of(entry) for entry in entries]
        return [
            container for container in containers if container is not None and container.state != "removing"
        ]

    def _living(self, containers: Sequence[Container]) -> list[Container]:
        """Running containers. Notes what `tidy` has to do: ended containers, and those past their drain deadline."""
        living, self._ended = [], []
        for pool in POOLS:
            members = [container for container in containers if container.pool == pool]
            gone = [container for container in members if container.gone]
            template = max(gone, key=_age) if len(gone) == len(members) and gone else None
            for container in members:
                if not container.gone:
                    living.append(container)
                elif container is not template:
                    self._ended.append(container)
        self._overrun = [container for container in living if self._has_overrun(container)]
        return living

    def _tidy(self, client: APIClient) -> None:
        """Goes on with the other containers when the Engine refuses one."""
        for container in self._ended:
            with self._unless_stuck(container):
                self._remove(client, container)
        for container in self._overrun:
            with self._unless_stuck(container), may_be_gone():
                if container.id not in self._stuck:
                    log_event("replica.overran", level=logging.WARNING, container=container.name)
                client.kill(container.id)
        self._ended, self._overrun = [], []

    @contextmanager
    def _unless_stuck(self, container: Container) -> Iterator[None]:
        """Logs once a container that the Engine fails to remove or kill."""
        try:
            yield
        except APIError as error:
            if container.id not in self._stuck:
                self._stuck.add(container.id)
                fields = {"container": container.name, "pool": container.pool, "error": str(error)}
                log_event("replica.stuck", level=logging.WARNING, **fields)

    def _has_overrun(self, container: Container) -> bool:
        """Whether a container is past its drain deadline: the one that this process set, else the one in its name."""
        if container.drain_until_s is None:
            return False
        left_s = min(container.drain_until_s - time.time(), MAX_DRAIN_S)
        now_s = time.monotonic()
        return self._drain_ends.setdefault(container.id, now_s + left_s) < now_s

    def _facts_of(self, client: APIClient, container: Container) -> _Facts | None:
        if container.id not in self._facts:
            try:
                inspected = client.inspect_container(container.id)
            except NotFound:
                return None
            name = worker_id(inspected, container.pool)
            self._facts[container.id] = _Facts(name, gpus_of(inspected), ports_of(inspected))
        return self._facts[container.id]

    def _remove(self, client: APIClient, container: Container) -> None:
        with may_be_gone():
            state = client.inspect_container(container.id)["State"]
            failed = state["ExitCode"] != 0 and container.drain_until_s is None
            log = last_lines(client, container.id, LOG_LINES) if failed else ""
            client.remove_container(container.id, v=True)
            log_event(
                "replica.removed",
                level=logging.WARNING if failed else logging.INFO,
                container=container.name,
                pool=container.pool,
                exit_code=state["ExitCode"],
                out_of_memory=state["OOMKilled"],
                log=log,
            )

    def _start(self, client: APIClient, pool: PoolName, count: int, shape: ReplicaShape) -> None:
        for _ in range(count):
            containers = self._containers(client)
            members = [container for container in self._ours(containers) if container.pool == pool]
            if not members:
                labels = f"{POOL_LABEL}={pool}" + (f" and {MODEL_LABEL}={self._model}" if self._model else "")
                message = (
                    f"project {self._project} has no container with the label {labels} to copy; "
                    "`docker compose up` makes the first one"
                )
                raise FailedPreconditionError(message, reason="NO_TEMPLATE")
            template = max(members, key=_age)
            inspected = client.inspect_container(template.id)
            number = 1 + max(c.number for c in containers if c.service == template.service)
            gpus: tuple[str, ...] = ()
            if self._gpus.gpus and shape.gpus:
                environment = environment_of(inspected["Config"]["Env"] or ())
                check_command(command_of(inspected), environment, shape.gpus)
                gpus = choose_gpus(self._gpus, self._uses(client, containers), pool, shape.gpus, shape.gpu)
            name = f"{self._project}-{template.service}-{number}"
            seat = self._seat(client, inspected, containers)
            self._create(client, name, inspected, replica_body(inspected, number, gpus, seat))
            log_event("replica.ordered", container=name, pool=pool, gpu=",".join(gpus) or None)

    def _room(self, client: APIClient, pool: PoolName, shape: ReplicaShape) -> Room:
        containers = self._containers(client)
        members = [container for container in self._ours(containers) if container.pool == pool]
        newest = max(members, key=_age) if members else None
        template = client.inspect_container(newest.id) if newest is not None else None
        uses = self._uses(client, containers)
        most = self._limits.max_replicas if self._limits is not None else None
        unready = readiness(client, self._project, template, pool)
        if unready is None and shape.gpus and self._has_own_gpus and not self._gpus.gpus:
            unready = Room(0, "NO_GPU", "its driver shows no GPU")
        return unready or free_room(self._gpus, uses, pool, shape.gpus, most, shape.gpu)

    def _seat(
        self, client: APIClient, inspected: dict[str, Any], containers: Sequence[Container]
    ) -> Seat | None:
        """The ports of ended containers count as used: compose may start these containers again."""
        if self._limits is None or not has_host_network(inspected):
            return None
        facts = [self._facts_of(client, container) for container in containers]
        used = {port for known in facts if known is not None for port in known.ports}
        return choose_seat(self._limits.network, used)

    def _uses(self, client: APIClient, containers: Sequence[Container]) -> list[GpuUse]:
        """The GPUs of each living container, draining ones included. Read anew each time, so a restart loses
        nothing."""
        living = [
            (container.pool, self._facts_of(client, container))
            for container in containers
            if not container.gone
        ]
        return [GpuUse(pool, facts.gpus) for pool, facts in living if facts is not None]

    def _create(self, client: APIClient, name: str, inspected: dict[str, Any], body: dict[str, Any]) -> None:
        create: Any = client.create_container_from_config  # not in the stubs
        container_id = create(body, name)["Id"]
        try:
            for network, endpoint in further_networks(inspected).items():
                client.connect_container_to_network(container_id, network, aliases=endpoint["Aliases"])
            client.start(container_id)
        except BaseException:
            client.remove_container(container_id, v=True, force=True)
            raise

    def _stop(self, client: APIClient, names: Sequence[str], drain_s: float) -> None:
        for container in self._ours(self._containers(client)):
            if container.gone or container.drain_until_s is not None:
                continue
            facts = self._facts_of(client, container)
            if facts is None or facts.name not in names:
                continue
            if container.state == "created":
                self._remove(client, container)
                continue
            # The signal comes before the new name: a renamed container without it would only wait to be killed.
            signal = client.inspect_container(container.id)["Config"].get("StopSignal") or "SIGTERM"
            with may_be_gone():
                client.kill(container.id, signal)
                client.rename(container.id, container.draining_name(time.time() + drain_s))
                self._drain_ends[container.id] = time.monotonic() + drain_s


def _age(container: Container) -> tuple[float, int]:
    return container.created_wall_s, container.number
