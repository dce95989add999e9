"""The file of Docker hosts: how each host is reached, the address of its workers, and its GPUs. Read once at start."""

from __future__ import annotations

import re
from collections import Counter
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, Field, model_validator

from splitserve.addresses import check_address
from splitserve.config.base import Settings
from splitserve.config.gpu_list import GpuGroups
from splitserve.config.yaml_file import read_yaml_file
from splitserve.errors import ConfigError, InvalidArgumentError

PORTS_EACH = 2
"""Ports of one worker with the host's network: one to serve, one for metrics."""
MAX_HOSTS = 64
LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost"})
_SSH_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*\Z")
_SSH_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\Z")
"""Neither may be read as an option of `ssh`."""


def is_loopback(host: str) -> bool:
    """Whether a host name or address always means this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host in LOOPBACK_NAMES


def check_endpoint(endpoint: str) -> str:
    """Returns the endpoint of a Docker Engine. Raises ValueError unless it is `unix:///PATH`, `tcp://HOST:PORT`, or
    `ssh://[USER@]HOST[:PORT][/PATH]` with PATH the remote socket."""
    parts = urlsplit(endpoint)
    # `urlsplit` lowers the case of a scheme; later checks compare the beginning of the text as it is written.
    scheme = parts.scheme if endpoint.startswith(f"{parts.scheme}://") else ""
    match "" if parts.query or parts.fragment else scheme:
        case "unix" if parts.path.startswith("/") and not parts.netloc:
            return endpoint
        case "tcp" if parts.path in ("", "/") and _port(parts) and parts.hostname and parts.username is None:
            check_address(parts.netloc, "endpoint")
            return endpoint
        case "ssh" if _is_ssh(parts):
            return endpoint
    raise ValueError(
        f"{endpoint!r} is none of unix:///PATH, tcp://HOST:PORT and ssh://[USER@]HOST[:PORT][/PATH]"
    )


def _is_ssh(parts: SplitResult) -> bool:
    host, user = parts.hostname or "", parts.username
    named = bool(_SSH_HOST.match(host)) and (user is None or bool(_SSH_USER.match(user)))
    return named and parts.password is None and _port(parts) is not None


def _port(parts: SplitResult) -> int | None:
    """The port; 0 without one; None for text that is no port."""
    try:
        return parts.port or 0
    except ValueError:
        return None


class PortRange(Settings):
    """Ports of one host for workers that the autoscaler starts."""

    first: Annotated[int, Field(ge=1024, le=65535)] = 20000
    """The first port."""
    last: Annotated[int, Field(ge=1024, le=65535)] = 20199
    """The last port."""

    @model_validator(mode="after")
    def _holds_a_worker(self) -> Self:
        if self.last - self.first + 1 < PORTS_EACH:
            raise ValueError(f"a worker takes {PORTS_EACH} ports, {self.first} to {self.last} are fewer")
        return self


class DockerHost(Settings):
    """One Docker host."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,22}[a-z0-9])?$")]
    """Its name, part of the ids of workers that are started on it."""
    endpoint: Annotated[str, AfterValidator(check_endpoint)]
    """`unix:///PATH`, `tcp://HOST:PORT` (with `tls`) or `ssh://[USER@]HOST[:PORT][/PATH]`."""
    tls: Path | None = None
    """Folder with ca.pem, cert.pem and key.pem, for mutual TLS."""
    address: Annotated[str, Field(pattern=r"^[A-Za-z0-9:][A-Za-z0-9.:_-]{0,252}$")]
    """Host name or IP address at which workers of other hosts and the coordinators reach this host."""
    gpus: GpuGroups = ""
    """GPUs that replicas may get, in the form of `docker.gpus`; `auto` asks the host itself, also for their kinds."""
    replicas_per_gpu: Annotated[int, Field(ge=1, le=16)] = 1
    """How many replicas may share one GPU."""
    max_replicas: Annotated[int, Field(ge=1, le=1024)] = 64
    """Most replicas of both pools together, for hosts without GPUs."""
    fabric: str = ""
    """Hosts that name the same fabric reach each other by RDMA."""
    ports: PortRange = PortRange()
    """Section `ports`."""

    @model_validator(mode="after")
    def _is_reached_in_one_safe_way(self) -> Self:
        if self.tls is not None and not self.endpoint.startswith("tcp://"):
            raise ValueError(f"host {self.name}: `tls` goes with a tcp:// endpoint")
        parts = urlsplit(self.endpoint)
        if parts.scheme == "tcp" and self.tls is None and not is_loopback(parts.hostname or ""):
            raise ValueError(
                f"{self.endpoint} is neither encrypted nor does it ask who calls, and whoever reaches it is root on "
                "that host; give `tls`, or use ssh://"
            )
        return self


class HostsFile(Settings):
    """All hosts of one autoscaler."""

    hosts: Annotated[tuple[DockerHost, ...], Field(min_length=1, max_length=MAX_HOSTS)]
    """The hosts, in order of preference among equals."""
    answer_s: Annotated[float, Field(ge=0.2, le=8)] = 4.0
    """How long a host may take to say what runs there; then it counts as unreachable."""
    unknown_s: Annotated[float, Field(ge=1, le=604_800)] = 900.0
    """How long replicas of an unreachable host keep their places before others are started instead."""

    @model_validator(mode="after")
    def _is_each_host_once(self) -> Self:
        counts = Counter(host.name for host in self.hosts)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"host {twice[0]} is there twice")
        return self


def load_hosts(path: Path) -> HostsFile:
    """Reads the file. Raises ConfigError naming file, line and field."""
    file = read_yaml_file(path, "docker_hosts")
    with file.naming_lines():
        try:
            return file.validated(HostsFile, "hosts")
        except ConfigError:
            raise
        except InvalidArgumentError as error:
            raise ConfigError(f"hosts: {error.message}", field=error.field or "hosts") from None
