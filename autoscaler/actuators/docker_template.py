"""Docker containers as replicas: reads their state, and makes a copy of one. The copy has its own GPUs and, on the
host's network, its own ports, address and name. Pure.

A worker on the host's network reads address and ports from its environment; `compose/entrypoint.sh` passes on the rest.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from splitserve.addresses import join_address
from splitserve.errors import ResourceExhaustedError
from splitserve.gpus.worker_gpus import GPU_VARIABLE, environment_of
from splitserve.roles import POOLS, PoolName

POOL_LABEL = "splitserve.pool"
MODEL_LABEL = "splitserve.model"
"""The served model, where several models share a project."""
ORDERED_LABEL = "splitserve.ordered-by"
"""On containers that the autoscaler created."""
PROJECT_LABEL = "com.docker.compose.project"
SERVICE_LABEL = "com.docker.compose.service"
NUMBER_LABEL = "com.docker.compose.container-number"
ONEOFF_LABEL = "com.docker.compose.oneoff"
_NOT_COPIED = frozenset({"com.docker.compose.replace", "com.docker.compose.slug"})
_DRAINING = re.compile(r"^(?P<name>.+)\.draining-until-(?P<until>\d+)$")
ENDED_STATES = frozenset({"exited", "dead"})


@dataclass(frozen=True, slots=True)
class Container:
    """One container of a pool. Its name carries the drain deadline: Docker can change names, but not labels."""

    id: str
    name: str
    pool: PoolName
    service: str
    number: int
    state: str
    created_wall_s: float
    ordered: bool
    """The autoscaler created it."""
    drain_until_s: float | None
    """Seconds since the epoch; None while it does not drain."""
    model: str = ""
    """From its label; empty without one."""

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
        """It has ended, or an autoscaler created it and ended before starting it."""
        return self.state in ENDED_STATES or (self.ordered and self.state == "created")

    def draining_name(self, until_wall_s: float) -> str:
        """Its name while it drains."""
        return f"{self.name}.draining-until-{math.ceil(until_wall_s)}"


def worker_id(inspected: Mapping[str, Any], pool: PoolName) -> str:
    """The id under which a container's worker registers, as the image's entry point builds it."""
    return f"{pool}-{inspected['Config']['Hostname']}"


def command_of(inspected: Mapping[str, Any]) -> Sequence[str]:
    """The arguments of a container's entry point."""
    return inspected["Config"].get("Cmd") or ()


def replica_body(
    inspected: Mapping[str, Any], number: int, gpus: Sequence[str], seat: Seat | None = None
) -> dict[str, Any]:
    """The body of the request that creates a replica like the inspected container, with these GPUs (empty: those of the
    inspected one) and, on the host's network, with this seat.

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
    first = dict(list(_endpoints(inspected).items())[:1])
    return {**config, "HostConfig": host, "NetworkingConfig": {"EndpointsConfig": first}}


def further_networks(inspected: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Networks to connect after creation: Docker before 25 accepts only one when creating."""
    return dict(list(_endpoints(inspected).items())[1:])


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


GPU_LABEL = "splitserve.gpu"
NVIDIA_VARIABLE = "NVIDIA_VISIBLE_DEVICES"
"""The GPUs in view, where Docker runs the container with `runtime: nvidia`."""
_NO_IDS = frozenset({"", "all", "none", "void"})


def gpus_of(inspected: Mapping[str, Any]) -> tuple[str, ...]:
    """The GPUs of a container: by its label, else those that it was given by their ids."""
    label = inspected["Config"]["Labels"].get(GPU_LABEL)
    if label:
        return tuple(str(label).split(","))
    return tuple(map(str, _given_ids(inspected["Config"], inspected["HostConfig"])))


def give_gpus(config: dict[str, Any], host: dict[str, Any], gpus: Sequence[str]) -> None:
    """Gives a container's copy these GPUs, in its label and its worker's setting.

    The copy of a template that sees all GPUs sees all of them too, since `cuda_ipc` needs to see its peer's. The copy
    of a template that was given its GPUs by their ids sees its own alone; Docker then numbers them from 0.
    """
    isolated = bool(_given_ids(config, host))
    host["DeviceRequests"] = [_for_gpus(request, gpus) for request in host.get("DeviceRequests") or ()]
    inside = (
        [str(number) if gpu.isdecimal() else gpu for number, gpu in enumerate(gpus)] if isolated else gpus
    )
    variables = {GPU_VARIABLE: ",".join(inside)}
    if _ids_of_runtime(config, host):
        variables[NVIDIA_VARIABLE] = ",".join(gpus)
    config["Labels"] = {**config["Labels"], GPU_LABEL: ",".join(gpus)}
    config["Env"] = with_variables(config.get("Env") or (), variables)


def _given_ids(config: Mapping[str, Any], host: Mapping[str, Any]) -> list[str]:
    requests = [request for request in host.get("DeviceRequests") or () if _is_for_gpus(request)]
    ids = [gpu for request in requests for gpu in request["DeviceIDs"] or ()]
    return ids or _ids_of_runtime(config, host)


def _ids_of_runtime(config: Mapping[str, Any], host: Mapping[str, Any]) -> list[str]:
    """The ids in NVIDIA_VISIBLE_DEVICES. NVIDIA's images set it to `all`, whether or not the runtime reads it."""
    given = environment_of(config.get("Env") or ()).get(NVIDIA_VARIABLE, "")
    return [] if host.get("Runtime") != "nvidia" or given in _NO_IDS else given.split(",")


def _is_for_gpus(request: Mapping[str, Any]) -> bool:
    return any("gpu" in kinds for kinds in request.get("Capabilities") or ())


def _for_gpus(request: Mapping[str, Any], gpus: Sequence[str]) -> Mapping[str, Any]:
    if not _is_for_gpus(request) or request.get("Count") == -1:
        return request
    return {**request, "Count": 0, "DeviceIDs": list(gpus)}


def with_variables(entries: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """A container's environment, entries "NAME=value", in which these variables replace those of the same name."""
    kept = [entry for entry in entries if entry.partition("=")[0] not in variables]
    return [*kept, *(f"{name}={value}" for name, value in variables.items())]


PORT, METRICS_PORT = "SPLITSERVE_PORT", "SPLITSERVE_METRICS_PORT"
HOST, ADDRESS = "SPLITSERVE_HOST", "SPLITSERVE_ADVERTISE_ADDRESS"


@dataclass(frozen=True, slots=True)
class HostNetwork:
    """What workers on one host's network get: the host's name in their ids, its address, and two ports each from
    `first_port` to `last_port`."""

    name: str
    address: str
    first_port: int
    last_port: int


@dataclass(frozen=True, slots=True)
class Seat:
    """One worker's place on its host."""

    hostname: str
    """The container's host name: the worker's id without its pool."""
    variables: Mapping[str, str]


def has_host_network(inspected: Mapping[str, Any]) -> bool:
    """Whether a container uses its host's network."""
    return bool(inspected["HostConfig"]["NetworkMode"] == "host")


def ports_of(inspected: Mapping[str, Any]) -> tuple[int, ...]:
    """The ports that a container's environment names."""
    given = environment_of(inspected["Config"].get("Env") or ())
    return tuple(int(given[name]) for name in (PORT, METRICS_PORT) if given.get(name, "").isdecimal())


def choose_seat(network: HostNetwork, used: Collection[int], number: int | None = None) -> Seat:
    """A seat with two ports that no container of the project has.

    `number` (default: random) decides where the search begins. A port may be taken by a process outside of the project;
    the next try then begins elsewhere. Raises ResourceExhaustedError (NO_PORT).
    """
    number = secrets.randbits(48) if number is None else number
    places = (network.last_port - network.first_port + 1) // 2
    for step in range(places):
        port = network.first_port + 2 * ((number + step) % places)
        if port not in used and port + 1 not in used:
            variables = {
                HOST: network.address,
                PORT: str(port),
                METRICS_PORT: str(port + 1),
                ADDRESS: join_address(network.address, port),
            }
            return Seat(f"{network.name}-{number:012x}", variables)
    message = f"host {network.name}: the ports {network.first_port} to {network.last_port} are all taken"
    raise ResourceExhaustedError(message, reason="NO_PORT")
