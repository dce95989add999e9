"""The actuator over one Docker Engine, or over the Docker hosts of a file."""

from __future__ import annotations

from autoscaler.actuators.actuator import Actuator
from autoscaler.actuators.docker import DockerActuator
from autoscaler.actuators.docker_engine import DockerEngine
from autoscaler.actuators.docker_room import HostLimits
from autoscaler.actuators.docker_template import HostNetwork
from autoscaler.actuators.hosts.connection import connector
from autoscaler.actuators.hosts.host_watch import HostWatch
from autoscaler.actuators.hosts.hosts_actuator import HostsActuator
from autoscaler.actuators.hosts.inventory_file import DockerHost, load_hosts
from autoscaler.actuators.hosts.inventory_probe import GpuProbe
from splitserve.config.autoscaler import DockerConfig
from splitserve.config.gpu_list import AUTO
from splitserve.gpus.inventory import GpuInventory
from splitserve.gpus.nvml import driver_inventory


def make_docker_actuator(config: DockerConfig, model: str) -> Actuator:
    """The actuator of one Engine, or of several hosts. Raises ConfigError for a wrong file of hosts."""
    if config.hosts is None:
        return DockerActuator(DockerEngine(), config.project, docker_gpus(config), model)
    file = load_hosts(config.hosts)
    watches = [HostWatch(host.name, _actuator(host, config, model), host.fabric) for host in file.hosts]
    return HostsActuator(watches, answer_s=file.answer_s, unknown_s=file.unknown_s)


def docker_gpus(config: DockerConfig) -> GpuInventory:
    """The GPUs that Docker replicas may get. With `auto` raises MissingExtraError without the extra `nvml`, and
    UnavailableError (NO_NVML) without a driver to ask."""
    if config.gpus == AUTO:
        return driver_inventory(config.replicas_per_gpu)
    return GpuInventory.listed(config.gpus, config.replicas_per_gpu)


def _actuator(host: DockerHost, config: DockerConfig, model: str) -> DockerActuator:
    connect, let_go = connector(host)
    engine = DockerEngine(connect=connect, let_go=let_go)
    network = HostNetwork(host.name, host.address, host.ports.first, host.ports.last)
    gpus, ask = GpuInventory(), None
    if host.gpus == AUTO:
        ask = GpuProbe(config.project, host.replicas_per_gpu)
    else:
        gpus = GpuInventory.listed(host.gpus, host.replicas_per_gpu)
    limits = HostLimits(network, host.max_replicas, ask)
    return DockerActuator(engine, config.project, gpus, model, limits)
