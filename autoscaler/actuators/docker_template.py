"""Containers of a compose service, as Docker's API tells of them, and how one more is made after their pattern. Pure.

Compose finds its containers by labels and needs no file for that, so a copy that carries them is a replica like
compose's own for `ps`, `logs`, `stop` and `down`.
https://docs.docker.com/reference/api/engine/, "Inspect a container" and "Create a container"
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from autoscaler.snapshot import POOLS, PoolName

POOL_LABEL = "splitserve.pool"
GPU_LABEL = "splitserve.gpu"
ORDERED_LABEL = "splitserve.ordered-by"
"""On containers that the autoscaler made."""
PROJECT_LABEL = "com.docker.compose.project"
SERVICE_LABEL = "com.docker.compose.service"
NUMBER_LABEL = "com.docker.compose.container-number"
ONEOFF_LABEL = "com.docker.compose.oneoff"
GPU_VARIABLE = "SPLITSERVE_GPU"
"""Number of a worker's own GPU where it sees all of the host."""
_NOT_COPIED = frozenset({"com.docker.compose.replace", "com.docker.compose.slug"})
_DRAINING = re.compile(r"^(?P<name>.+)\.draining-until-(?P<until>\d+)$")
ENDED_STATES = frozenset({"exited", "dead"})


@dataclass(frozen=True, slots=True)
class Container:
    """One container of a pool. Labels of a container cannot change, but its name can: it says who drains, till when."""

    id: str
    name: str
    pool: PoolName
    service: str
    number: int
    state: str
    created_wall_s: float
    ordered: bool
    """The autoscaler made it."""
    drain_until_s: float | None
    """Seconds since the epoch; None: it was not told to end."""

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Self | None:
        """From an entry of Docker's list of containers; None for one that belongs to no pool."""
        labels: Mapping[str, str] = entry["Labels"]
        pool = next((pool for pool in POOLS if pool == labels.get(POOL_LABEL)), None)
        if pool is None or labels.get(ONEOFF_LABEL) == "True":
            return None
        name = str(entry["Names"][0]).removeprefix("/")
        draining = _DRAINING.match(name)
        return cls(
            id=entry["Id"],
            name=name,
            pool=pool,
            service=labels.get(SERVICE_LABEL, pool),
            number=int(labels.get(NUMBER_LABEL, 0)),
            state=entry["State"],
            created_wall_s=float(entry["Created"]),
            ordered=ORDERED_LABEL in labels,
            drain_until_s=float(draining["until"]) if draining else None,
        )

    @property
    def gone(self) -> bool:
        """It has ended, or was never started because the autoscaler that made it ended in between."""
        return self.state in ENDED_STATES or (self.ordered and self.state == "created")

    def draining_name(self, until_wall_s: float) -> str:
        """Its name from the moment on that it was told to end."""
        return f"{self.name}.draining-until-{math.ceil(until_wall_s)}"


def worker_id(inspected: Mapping[str, Any], pool: PoolName) -> str:
    """The name under which a container's worker registers, as the image's entry point makes it."""
    return f"{pool}-{inspected['Config']['Hostname']}"


def gpu_of(inspected: Mapping[str, Any]) -> str | None:
    """The GPU that a container was given, by its label or as the only one that it sees."""
    label = inspected["Config"]["Labels"].get(GPU_LABEL)
    if label:
        return str(label)
    ids = [gpu for request in _gpu_requests(inspected["HostConfig"]) for gpu in request["DeviceIDs"] or ()]
    return str(ids[0]) if len(ids) == 1 else None


def replica_name(template_name: str, project: str, service: str, number: int) -> str:
    """`project-service-N`, or with underscores where the template's name has them (docker-compose 1)."""
    mark = "_" if template_name.startswith(f"{project}_{service}_") else "-"
    return mark.join((project, service, str(number)))


def replica_body(inspected: Mapping[str, Any], number: int, gpu: str | None) -> dict[str, Any]:
    """The body of the request that creates a replica like the inspected container, on another GPU.

    Everything is taken over but what belongs to one container alone: its number, host name, addresses and
    published ports. Restarting is the autoscaler's task now.
    """
    config, host = dict(inspected["Config"]), dict(inspected["HostConfig"])
    short_id = inspected["Id"][:12]
    config.pop("MacAddress", None)
    if config["Hostname"] == short_id:
        config["Hostname"] = ""
    labels = {name: value for name, value in config["Labels"].items() if name not in _NOT_COPIED}
    labels |= {NUMBER_LABEL: str(number), ORDERED_LABEL: "autoscaler"}
    if gpu is not None:
        labels[GPU_LABEL] = gpu
        config["Env"] = _with_gpu(config["Env"] or (), gpu)
        host["DeviceRequests"] = [_for_gpu(request, gpu) for request in host["DeviceRequests"] or ()]
    config["Labels"] = labels
    host["RestartPolicy"] = {"Name": "no", "MaximumRetryCount": 0}
    host["PortBindings"] = {}
    return {**config, "HostConfig": host, "NetworkingConfig": {"EndpointsConfig": _first(inspected)}}


def further_networks(inspected: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Networks to connect a replica to after it was created: Docker before 25 takes only one at first."""
    return dict(list(_endpoints(inspected).items())[1:])


def _first(inspected: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return dict(list(_endpoints(inspected).items())[:1])


def _endpoints(inspected: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    mode = inspected["HostConfig"]["NetworkMode"]
    if mode in ("none", "host") or mode.startswith("container:"):
        return {}
    networks = inspected["NetworkSettings"]["Networks"]
    own_names = {inspected["Id"][:12], inspected["Name"].removeprefix("/")}
    # The container's main network first: it decides about the default route.
    return {
        name: {
            "Aliases": [alias for alias in networks[name].get("Aliases") or () if alias not in own_names],
            "DriverOpts": networks[name].get("DriverOpts"),
        }
        for name in sorted(networks, key=lambda name: (name != mode, name))
    }


def _gpu_requests(host: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [request for request in host.get("DeviceRequests") or () if _is_for_gpus(request)]


def _is_for_gpus(request: Mapping[str, Any]) -> bool:
    return any("gpu" in kinds for kinds in request.get("Capabilities") or ())


def _for_gpu(request: Mapping[str, Any], gpu: str) -> Mapping[str, Any]:
    # A template that sees all GPUs means it so; SPLITSERVE_GPU tells its copy which one is its own.
    if not _is_for_gpus(request) or request.get("Count") == -1:
        return request
    return {**request, "Count": 0, "DeviceIDs": [gpu]}


def _with_gpu(variables: Sequence[str], gpu: str) -> list[str]:
    mark = f"{GPU_VARIABLE}="
    return [f"{mark}{gpu}" if variable.startswith(mark) else variable for variable in variables]
