"""Replicas of compose services on one Docker host.

A pool's containers carry the label `splitserve.pool`; which of them there are, what they look like, who drains and
until when is read off the Engine every time, so a restarted autoscaler goes on where the last one stopped, and what
compose started counts like what the autoscaler added. One more replica is a copy of the newest container of the pool.

The last container of a pool stays, ended, until another one is there: it is the pattern.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from docker import APIClient
from docker.errors import APIError, NotFound

from autoscaler.actuator import ActualReplica, Actuator
from autoscaler.actuators.docker_engine import DockerEngine
from autoscaler.actuators.docker_template import (
    POOL_LABEL,
    PROJECT_LABEL,
    Container,
    further_networks,
    gpu_of,
    replica_body,
    replica_name,
    worker_id,
)
from autoscaler.actuators.gpu_inventory import first_free
from autoscaler.snapshot import POOLS, PoolName
from splitserve.errors import FailedPreconditionError
from splitserve.logs import log_event

LOG_LINES = 20
"""The end of a failed replica's log goes into the autoscaler's, for its container is removed."""


class DockerActuator(Actuator):
    """Scales the pools of one compose project. `gpus` are all that replicas may get; empty: they need none."""

    def __init__(self, engine: DockerEngine, project: str, gpus: Sequence[str] = ()) -> None:
        self._engine = engine
        self._project = project
        self._gpus = tuple(gpus)
        self._facts: dict[str, tuple[str, str | None]] = {}
        """Worker id and GPU by container id: neither ever changes."""

    async def replicas(self) -> tuple[ActualReplica, ...]:
        """See Actuator. Also removes containers that ended and kills those that overran their drain."""
        return await self._engine.call("list replicas", self._look)

    async def start(self, pool: PoolName, count: int) -> None:
        """See Actuator. Raises FailedPreconditionError (NO_TEMPLATE) for a pool without any container."""
        await self._engine.call(f"start {pool}", lambda client: self._start(client, pool, count))

    async def stop(self, pool: PoolName, names: Sequence[str], drain_s: float) -> None:
        """See Actuator."""
        await self._engine.call(f"stop {pool}", lambda client: self._stop(client, pool, names, drain_s))

    async def close(self) -> None:
        """See Actuator. Replicas stay."""
        await self._engine.close()

    def _look(self, client: APIClient) -> tuple[ActualReplica, ...]:
        living = []
        for container in self._tidied(client, self._containers(client)):
            if (facts := self._facts_of(client, container)) is not None:
                name, gpu = facts
                stopping = container.drain_until_s is not None
                living.append(ActualReplica(name, container.pool, stopping, container.created_wall_s, gpu))
        return tuple(sorted(living, key=lambda replica: replica.name))

    def _containers(self, client: APIClient) -> list[Container]:
        labels = [f"{PROJECT_LABEL}={self._project}", POOL_LABEL]
        entries: list[dict[str, Any]] = client.containers(all=True, filters={"label": labels})
        found = [Container.of(entry) for entry in entries]
        return [container for container in found if container is not None and container.state != "removing"]

    def _tidied(self, client: APIClient, containers: Sequence[Container]) -> list[Container]:
        """The living ones, after removing what ended and killing what should have."""
        living = []
        for pool in POOLS:
            members = [container for container in containers if container.pool == pool]
            gone = [container for container in members if container.gone]
            pattern = max(gone, key=_age) if len(gone) == len(members) and gone else None
            for container in members:
                if container.gone:
                    if container is not pattern:
                        self._remove(client, container)
                    continue
                if container.drain_until_s is not None and container.drain_until_s < time.time():
                    log_event("replica.overran", level=logging.WARNING, container=container.name)
                    with _may_be_gone():
                        client.kill(container.id)
                living.append(container)
        self._facts = {c.id: self._facts[c.id] for c in living if c.id in self._facts}
        return living

    def _facts_of(self, client: APIClient, container: Container) -> tuple[str, str | None] | None:
        if container.id not in self._facts:
            try:
                inspected = client.inspect_container(container.id)
            except NotFound:
                return None
            self._facts[container.id] = worker_id(inspected, container.pool), gpu_of(inspected)
        return self._facts[container.id]

    def _remove(self, client: APIClient, container: Container) -> None:
        with _may_be_gone():
            state = client.inspect_container(container.id)["State"]
            failed = state["ExitCode"] != 0 and container.drain_until_s is None
            log = client.logs(container.id, tail=LOG_LINES).decode(errors="replace") if failed else ""
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

    def _start(self, client: APIClient, pool: PoolName, count: int) -> None:
        for _ in range(count):
            containers = self._containers(client)
            members = [container for container in containers if container.pool == pool]
            if not members:
                message = (
                    f"project {self._project} has no container with the label {POOL_LABEL}={pool} to copy; "
                    "`docker compose up` makes the first one"
                )
                raise FailedPreconditionError(message, reason="NO_TEMPLATE")
            pattern = max(members, key=_age)
            inspected = client.inspect_container(pattern.id)
            number = 1 + max(c.number for c in containers if c.service == pattern.service)
            gpu = first_free(self._gpus, self._gpus_in_use(client, containers)) if self._gpus else None
            name = replica_name(pattern.name, self._project, pattern.service, number)
            self._create(client, name, inspected, number, gpu)
            log_event("replica.ordered", container=name, pool=pool, gpu=gpu)

    def _gpus_in_use(self, client: APIClient, containers: Sequence[Container]) -> set[str]:
        facts = [self._facts_of(client, container) for container in containers if not container.gone]
        return {gpu for fact in facts if fact is not None and (gpu := fact[1]) is not None}

    def _create(
        self, client: APIClient, name: str, inspected: dict[str, Any], number: int, gpu: str | None
    ) -> None:
        create: Any = client.create_container_from_config  # not in the stubs
        made = create(replica_body(inspected, number, gpu), name)["Id"]
        try:
            for network, endpoint in further_networks(inspected).items():
                client.connect_container_to_network(made, network, aliases=endpoint["Aliases"])
            client.start(made)
        except BaseException:
            client.remove_container(made, v=True, force=True)
            raise

    def _stop(self, client: APIClient, pool: PoolName, names: Sequence[str], drain_s: float) -> None:
        for container in self._containers(client):
            if container.pool != pool or container.gone or container.drain_until_s is not None:
                continue
            facts = self._facts_of(client, container)
            if facts is None or facts[0] not in names:
                continue
            if container.state == "created":
                self._remove(client, container)
                continue
            # First the signal, then the mark: a mark without a signal would be a replica that waits to be killed.
            signal = client.inspect_container(container.id)["Config"].get("StopSignal") or "SIGTERM"
            with _may_be_gone():
                client.kill(container.id, signal)
                client.rename(container.id, container.draining_name(time.time() + drain_s))


def _age(container: Container) -> tuple[float, int]:
    return container.created_wall_s, container.number


@contextmanager
def _may_be_gone() -> Iterator[None]:
    """For what is done to a container that somebody may have ended or removed meanwhile."""
    try:
        yield
    except APIError as error:
        if error.status_code not in (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT):
            raise
