"""Docker containers as replicas: reading their state, copying one as a template, assigning GPUs. Pure, but for
`gpu_inventory`."""

from __future__ import annotations

import math
import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from autoscaler.snapshot import POOLS, PoolName
from splitserve.errors import ResourceExhaustedError, UnavailableError

POOL_LABEL = "splitserve.pool"
MODEL_LABEL = "splitserve.model"
"""The served model, where several models share a project."""
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
    """One container of a pool. Labels cannot change, but the name can: it carries the drain deadline."""

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
    """Seconds since the epoch; None while it does not drain."""
    model: str = ""
    """By its label; empty without one."""

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
            model=labels.get(MODEL_LABEL, ""),
        )

    @property
    def gone(self) -> bool:
        """It has ended, or was created but never started, by an autoscaler that ended in between."""
        return self.state in ENDED_STATES or (self.ordered and self.state == "created")

    def draining_name(self, until_wall_s: float) -> str:
        """Its name while it drains."""
        return f"{self.name}.draining-until-{math.ceil(until_wall_s)}"


def worker_id(inspected: Mapping[str, Any], pool: PoolName) -> str:
    """The name under which a container's worker registers, as the image's entry point makes it."""
    return f"{pool}-{inspected['Config']['Hostname']}"


def gpu_of(inspected: Mapping[str, Any]) -> str | None:
    """The GPUs of a container, with commas between: by its label, or those that it was given by their ids."""
    label = inspected["Config"]["Labels"].get(GPU_LABEL)
    if label:
        return str(label)
    ids = [gpu for request in _gpu_requests(inspected["HostConfig"]) for gpu in request["DeviceIDs"] or ()]
    return ",".join(map(str, ids)) or None


def replica_name(template_name: str, project: str, service: str, number: int) -> str:
    """`project-service-N`, or with underscores where the template's name has them (docker-compose 1)."""
    mark = "_" if template_name.startswith(f"{project}_{service}_") else "-"
    return mark.join((project, service, str(number)))


def replica_body(inspected: Mapping[str, Any], number: int, gpus: Sequence[str]) -> dict[str, Any]:
    """The body of the request that creates a replica like the inspected container, on these GPUs (none: as it is).

    Everything is copied except what must be unique: number, host name, addresses and published ports. The restart
    policy is `no`: the autoscaler replaces it.
    """
    config, host = dict(inspected["Config"]), dict(inspected["HostConfig"])
    short_id = inspected["Id"][:12]
    config.pop("MacAddress", None)
    if config["Hostname"] == short_id:
        config["Hostname"] = ""
    labels = {name: value for name, value in config["Labels"].items() if name not in _NOT_COPIED}
    labels |= {NUMBER_LABEL: str(number), ORDERED_LABEL: "autoscaler"}
    if gpus:
        labels[GPU_LABEL] = ",".join(gpus)
        config["Env"] = _with_gpu(config["Env"] or (), gpus[0])
        host["DeviceRequests"] = [_for_gpus(request, gpus) for request in host["DeviceRequests"] or ()]
    config["Labels"] = labels
    host["RestartPolicy"] = {"Name": "no", "MaximumRetryCount": 0}
    host["PortBindings"] = {}
    return {**config, "HostConfig": host, "NetworkingConfig": {"EndpointsConfig": _first(inspected)}}


def further_networks(inspected: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Networks to connect after creation: Docker before 25 accepts only one when creating."""
    return dict(list(_endpoints(inspected).items())[1:])


def _first(inspected: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return dict(list(_endpoints(inspected).items())[:1])


def _endpoints(inspected: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    mode = inspected["HostConfig"]["NetworkMode"]
    if mode in ("none", "host") or mode.startswith("container:"):
        return {}
    networks = inspected["NetworkSettings"]["Networks"]
    own_names = {inspected["Id"][:12], inspected["Name"].removeprefix("/")}
    # The main network first: it sets the default route.
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


def _for_gpus(request: Mapping[str, Any], gpus: Sequence[str]) -> Mapping[str, Any]:
    # A template that sees all GPUs stays so; SPLITSERVE_GPU names the copy's own, the first of them.
    if not _is_for_gpus(request) or request.get("Count") == -1:
        return request
    return {**request, "Count": 0, "DeviceIDs": list(gpus)}


def _with_gpu(variables: Sequence[str], gpu: str) -> list[str]:
    mark = f"{GPU_VARIABLE}="
    return [f"{mark}{gpu}" if variable.startswith(mark) else variable for variable in variables]


AUTO = ("auto",)
PROBE_S = 20.0
_PROBE = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")


def gpu_inventory(listed: Sequence[str]) -> tuple[str, ...]:
    """The GPUs listed, or with `auto` all that the NVIDIA driver of this machine knows, by their numbers.

    Raises UnavailableError (NO_NVIDIA_DRIVER) where `auto` cannot ask.
    """
    if tuple(listed) != AUTO:
        return tuple(listed)
    try:
        answer = subprocess.run(_PROBE, capture_output=True, text=True, timeout=PROBE_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        message = f"gpus: auto: {_PROBE[0]} does not answer here ({error}); list them instead, as 0,1,2,3"
        raise UnavailableError(message, reason="NO_NVIDIA_DRIVER") from None
    return tuple(answer.stdout.split())


def free_gpus(gpus: Sequence[str], in_use: Collection[str], count: int) -> tuple[str, ...]:
    """The first `count` GPUs not in use. Raises ResourceExhaustedError (NO_GPU)."""
    free = [gpu for gpu in gpus if gpu not in in_use]
    if len(free) >= count:
        return tuple(free[:count])
    message = f"{len(free) or 'none'} of the {len(gpus)} GPUs {'are' if len(free) > 1 else 'is'} free"
    if count > 1:
        message += f", a replica takes {count}"
    raise ResourceExhaustedError(message, reason="NO_GPU")
