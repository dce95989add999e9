"""Whether one more replica of a pool can be started on a Docker host, and if not, why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from docker import APIClient
from docker.errors import ImageNotFound

from autoscaler.actuators.actuator import Room
from autoscaler.actuators.docker_template import PROJECT_LABEL, SERVICE_LABEL, HostNetwork
from splitserve.errors import FailedPreconditionError, ResourceExhaustedError
from splitserve.gpus.inventory import GpuInventory
from splitserve.gpus.placement import GpuUse, choose_gpus, taken

MODELS_SERVICE = "models"
"""The compose service that fetches the model, once, before workers start."""


GpusOf = Callable[[APIClient], GpuInventory | None]
"""Asks a host for its GPUs; None while it cannot be asked."""


@dataclass(frozen=True, slots=True)
class HostLimits:
    """What one host of several gives to replicas."""

    network: HostNetwork
    """For containers that have the host's network."""
    max_replicas: int | None = None
    """Where it has no GPUs to give out."""
    ask_gpus: GpusOf | None = None


def readiness(client: APIClient, project: str, template: dict[str, Any] | None, pool: str) -> Room | None:
    """Why no replica can be started like this inspected container (None: there is none); None if it can."""
    if template is None:
        return Room(
            0, "NO_TEMPLATE", f"no container of the pool {pool} to copy; `docker compose up` makes one"
        )
    image = template["Config"]["Image"]
    inspect: Any = client.inspect_image  # untyped in the stubs
    try:
        inspect(image)
    except ImageNotFound:
        return Room(0, "NO_IMAGE", f"the image {image} is not there")
    labels = [f"{PROJECT_LABEL}={project}", f"{SERVICE_LABEL}={MODELS_SERVICE}"]
    for entry in client.containers(all=True, filters={"label": labels}):
        state = client.inspect_container(entry["Id"])["State"]
        if state["Status"] != "exited":
            return Room(0, "NO_MODEL", "its model is still being fetched")
        if state["ExitCode"] != 0:
            return Room(0, "NO_MODEL", f"fetching its model failed (exit code {state['ExitCode']})")
    return None


def free_room(
    inventory: GpuInventory,
    uses: Sequence[GpuUse],
    pool: str,
    gpus_each: int,
    most: int | None,
    kind: str = "",
) -> Room:
    """Room by GPUs, of this kind; without any by `most` replicas (None: as many as there may be) less those that are
    there."""
    if not inventory.gpus or not gpus_each:
        left = None if most is None else most - len(uses)
        if left is not None and left <= 0:
            return Room(0, "NO_ROOM", f"it has {len(uses)} of at most {most} replicas")
        return Room(left if left is not None else 1)
    try:
        inventory = inventory.of_kind(kind)
        chosen = choose_gpus(inventory, uses, pool, gpus_each, kind)
    except ResourceExhaustedError as error:
        return Room(0, "NO_GPU", error.message)
    except FailedPreconditionError as error:
        return Room(0, error.reason, error.message)
    linked = sum(frozenset(pair) in inventory.links for pair in combinations(chosen, 2))
    return Room((inventory.capacity - taken(inventory, uses)) // gpus_each, linked=linked)
