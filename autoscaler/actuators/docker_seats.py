"""Ports, address and name of a worker that has its host's network. Pure.

A worker with the host's network takes these from its environment; `compose/entrypoint.sh` passes on what is not there.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from splitserve.errors import ResourceExhaustedError
from splitserve.gpus.engine_command import environment_of

PORT, METRICS_PORT = "SPLITSERVE_PORT", "SPLITSERVE_METRICS_PORT"
HOST, ADDRESS = "SPLITSERVE_HOST", "SPLITSERVE_ADVERTISE_ADDRESS"


@dataclass(frozen=True, slots=True)
class HostNetwork:
    """What workers on one host's network are given: its name in their ids, its address, and ports from `first_port` to
    `last_port`, two each."""

    name: str
    address: str
    first_port: int
    last_port: int

    @property
    def literal(self) -> str:
        """The address as it stands before a port."""
        return f"[{self.address}]" if ":" in self.address else self.address


@dataclass(frozen=True, slots=True)
class Seat:
    """One worker's place on its host."""

    hostname: str
    """The container's host name, which is the worker's id without its pool."""
    variables: Mapping[str, str]


def has_host_network(inspected: Mapping[str, Any]) -> bool:
    """Whether a container has its host's network."""
    return bool(inspected["HostConfig"]["NetworkMode"] == "host")


def ports_of(inspected: Mapping[str, Any]) -> tuple[int, ...]:
    """The ports that a container's environment names."""
    given = environment_of(inspected["Config"].get("Env") or ())
    return tuple(int(given[name]) for name in (PORT, METRICS_PORT) if given.get(name, "").isdecimal())


def choose_seat(network: HostNetwork, used: Collection[int], number: int | None = None) -> Seat:
    """A seat with two ports that no container of the project has.

    The search begins at a place that follows from `number` (default: random), since a port may be taken by a process
    that is no container of ours: the next try then finds another. Raises ResourceExhaustedError (NO_PORT).
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
                ADDRESS: f"{network.literal}:{port}",
            }
            return Seat(f"{network.name}-{number:012x}", variables)
    message = f"host {network.name}: the ports {network.first_port} to {network.last_port} are all taken"
    raise ResourceExhaustedError(message, reason="NO_PORT")
