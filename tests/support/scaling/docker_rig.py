"""A compose project on a real Docker Engine whose replicas do nothing, for the actuators' contract suite."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from docker import APIClient
from docker.errors import DockerException, ImageNotFound
from docker.utils import kwargs_from_env

from autoscaler.actuators.docker import DockerActuator
from autoscaler.actuators.docker_engine import DockerEngine
from autoscaler.actuators.docker_template import (
    NUMBER_LABEL,
    ONEOFF_LABEL,
    POOL_LABEL,
    PROJECT_LABEL,
    SERVICE_LABEL,
)
from splitserve.roles import POOLS

if TYPE_CHECKING:
    from tests.support.scaling.actuator_rigs import Rig

IMAGE_VARIABLE = "SPLITSERVE_E2E_IMAGE"
"""Set by `make e2e-docker`."""
STUBBORN = "/tmp/stubborn"
STUB = f'trap "[ -e {STUBBORN} ] || exit 0" TERM; while :; do sleep 60 & wait $!; done'


def docker_client() -> APIClient:
    """Skips the test where there is no Docker Engine, or no image to run."""
    image = os.environ.get(IMAGE_VARIABLE)
    if image is None:
        pytest.skip(f"{IMAGE_VARIABLE} is not set: run `make e2e-docker`")
    try:
        client = APIClient(version="auto", **kwargs_from_env())
        client.inspect_image(image)
    except ImageNotFound:
        pytest.skip(f"no image {image}: run `make e2e-docker`")
    except DockerException as error:
        pytest.skip(f"no Docker Engine: {error}")
    return client


@asynccontextmanager
async def docker_rig(gpus: int | None) -> AsyncIterator[Rig]:
    """A project whose pools had one container each, which ended."""
    client, project = docker_client(), f"contract-{uuid.uuid4().hex[:8]}"
    for pool in POOLS:
        _pattern(client, project, pool)
    rig = _rig(client, project, gpus)
    try:
        yield rig
    finally:
        await rig.actuator.close()
        for container in client.containers(all=True, filters={"label": f"{PROJECT_LABEL}={project}"}):
            client.remove_container(container["Id"], force=True, v=True)
        client.close()


def _pattern(client: APIClient, project: str, pool: str) -> None:
    labels = {PROJECT_LABEL: project, SERVICE_LABEL: pool, NUMBER_LABEL: "1", ONEOFF_LABEL: "False"}
    made = client.create_container(
        os.environ[IMAGE_VARIABLE],
        entrypoint=["sh", "-c", STUB],
        name=f"{project}-{pool}-1",
        labels=labels | {POOL_LABEL: pool},
        host_config=client.create_host_config(network_mode="none", init=True),
    )
    client.start(made["Id"])
    client.kill(made["Id"])
    client.wait(made["Id"])


def _rig(client: APIClient, project: str, gpus: int | None) -> Rig:
    from tests.support.scaling.actuator_rigs import Rig, numbered_gpus

    class DockerRig(Rig):
        def __init__(self) -> None:
            self.actuator = self.again()

        def again(self) -> DockerActuator:
            return DockerActuator(DockerEngine(), project, numbered_gpus(gpus))

        async def vanish(self, name: str) -> None:
            container = name.partition("-")[2]
            client.kill(container)
            client.wait(container)

        def make_stubborn(self, name: str) -> None:
            made = client.exec_create(name.partition("-")[2], ["touch", STUBBORN])
            client.exec_start(made["Id"])

    return DockerRig()
