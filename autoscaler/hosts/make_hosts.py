"""The actuator over one Docker Engine, or over the Docker hosts of a file."""

from __future__ import annotations

from autoscaler.actuators.actuator import Actuator
from autoscaler.actuators.docker import DockerActuator
from autoscaler.actuators.docker_engine import DockerEngine
from autoscaler.actuators.docker_room import HostLimits
from autoscaler.actuators.docker_seats import HostNetwork
from autoscaler.hosts.connection import connector
from autoscaler.hosts.host_watch import HostLink
from autoscaler.hosts.hosts_actuator import HostsActuator
from autoscaler.hosts.inventory_file import DockerHost, load_hosts
from autoscaler.hosts.inventory_probe import GpuProbe
from splitserve.config.autoscaler import DockerConfig
from splitserve.config.gpu_list import AUTO
from splitserve.errors import ConfigError
from splitserve.gpus.inventory import GpuInventory
from splitserve.gpus.nvml import driver_inventory

PULL_S = 3600.0
"""An image of many gigabytes may take long. Nobody waits for it, and neither does the end of the process."""


def make_docker_actuator(config: DockerConfig, model: str, *, pulls: bool = True) -> Actuator:
    """Of one Engine, or of several hosts, which it has pull images where it `pulls` and the file allows it. Raises
    ConfigError for a wrong file of hosts."""
    if config.hosts is not None:
        return make_hosts_actuator(config, model, pulls=pulls)
    engine = DockerEngine(config.request_timeout_s)
    return DockerActuator(engine, config.project, docker_gpus(config), model)


def docker_gpus(config: DockerConfig) -> GpuInventory:
    """The GPUs that Docker replicas may get. Raises UnavailableError (NO_NVML) where `auto` cannot ask for them."""
    if config.gpus == AUTO:
        return driver_inventory(config.replicas_per_gpu)
    return GpuInventory.listed(config.gpus, config.replicas_per_gpu)


def make_hosts_actuator(config: DockerConfig, model: str, *, pulls: bool = True) -> HostsActuator:
    """See `make_docker_actuator`. Raises ConfigError for a wrong file."""
    if config.hosts is None:
        raise ConfigError("docker.hosts: there is no file of hosts", field="docker.hosts")
    file = load_hosts(config.hosts)
    links = [
        HostLink(host.name, _actuator(host, config, model), host.fabric, host.pull and pulls)
        for host in file.hosts
    ]
    return HostsActuator(links, answer_s=file.answer_s, unknown_s=file.unknown_s)


def _actuator(host: DockerHost, config: DockerConfig, model: str) -> DockerActuator:
    connect, let_go = connector(host)
    engine = DockerEngine(config.request_timeout_s, connect=connect, let_go=let_go)
    puller = DockerEngine(PULL_S, PULL_S, connect=connect, close_s=0.0) if host.pull else None
    network = HostNetwork(host.name, host.address, host.ports.first, host.ports.last)
    gpus, ask = GpuInventory(), None
    if host.gpus == AUTO:
        ask = GpuProbe(config.project, host.replicas_per_gpu)
    else:
        gpus = GpuInventory.listed(host.gpus, host.replicas_per_gpu)
    limits = HostLimits(network, host.max_replicas, ask)
    return DockerActuator(engine, config.project, gpus, model, limits, puller)
