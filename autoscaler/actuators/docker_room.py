"""Whether a Docker host can start one more replica of a pool, and if not, why."""

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
    """For containers that use the host's network."""
    max_replicas: int | None = None
    """The limit on a host without GPUs."""
    ask_gpus: GpusOf | None = None


def readiness(client: APIClient, project: str, template: dict[str, Any] | None, pool: str) -> Room | None:
    """Why no copy of the inspected container `template` can be started; None: it can. A missing template is a
    reason."""
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
    gpus_per_replica: int,
    max_replicas: int | None,
    kind: str = "",
) -> Room:
    """Room by free GPUs of this kind. Where replicas get no GPUs: `max_replicas` (None: no limit) less those in
    `uses`."""
    if not inventory.gpus or not gpus_per_replica:
        if max_replicas is None:
            return Room(1)
        if len(uses) >= max_replicas:
            return Room(0, "NO_ROOM", f"it has {len(uses)} of at most {max_replicas} replicas")
        return Room(max_replicas - len(uses))
    try:
        inventory = inventory.of_kind(kind)
        chosen = choose_gpus(inventory, uses, pool, gpus_per_replica, kind)
    except ResourceExhaustedError as error:
        return Room(0, "NO_GPU", error.message)
    except FailedPreconditionError as error:
        return Room(0, error.reason, error.message)
    linked = sum(frozenset(pair) in inventory.links for pair in combinations(chosen, 2))
    return Room((inventory.capacity - taken(inventory, uses)) // gpus_per_replica, linked=linked)
