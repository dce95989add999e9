"""Docker containers as replicas: reading their state, and copying one as a template. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from autoscaler.actuators.docker_gpus import give_gpus, with_variables
from autoscaler.actuators.docker_seats import Seat
from autoscaler.actuators.worker_kind import runs_neutral
from autoscaler.snapshot import POOLS, PoolName

POOL_LABEL = "splitserve.pool"
MODEL_LABEL = "splitserve.model"
"""The served model, where several models share a project."""
CLASS_LABEL = "splitserve.class"
"""The class of replicas, where a pool has several."""
ORDERED_LABEL = "splitserve.ordered-by"
"""On containers that the autoscaler made."""
PROJECT_LABEL = "com.docker.compose.project"
SERVICE_LABEL = "com.docker.compose.service"
NUMBER_LABEL = "com.docker.compose.container-number"
ONEOFF_LABEL = "com.docker.compose.oneoff"
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
    replica_class: str = ""
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
            replica_class=labels.get(CLASS_LABEL, ""),
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
    kind = "worker" if runs_neutral(command_of(inspected)) else pool
    return f"{kind}-{inspected['Config']['Hostname']}"


def command_of(inspected: Mapping[str, Any]) -> Sequence[str]:
    """The words that a container's entry point is given."""
    return inspected["Config"].get("Cmd") or ()


def replica_name(template_name: str, project: str, service: str, number: int) -> str:
    """`project-service-N`, or with underscores where the template's name has them (docker-compose 1)."""
    mark = "_" if template_name.startswith(f"{project}_{service}_") else "-"
    return mark.join((project, service, str(number)))


def replica_body(
    inspected: Mapping[str, Any], number: int, gpus: Sequence[str], seat: Seat | None = None
) -> dict[str, Any]:
    """The body of the request that creates a replica like the inspected container, on these GPUs (none: as it is), and
    with the host's network on this seat.

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
    config["Labels"] = labels
    if gpus:
        give_gpus(config, host, gpus)
    if seat is not None:
        config["Hostname"] = seat.hostname
        config["Env"] = with_variables(config.get("Env") or (), seat.variables)
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
