"""A file of Docker hosts beside another actuator."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from autoscaler.hosts.hosts_actuator import HostsActuator
from autoscaler.service import make_actuator
from splitserve.config.autoscaler import AutoscalerConfig, DockerConfig
from splitserve.errors import ConfigError


@pytest.mark.parametrize("actuator", ["none", "kubernetes"])
def test_docker_hosts_need_the_docker_actuator(actuator: Literal["none", "kubernetes"]) -> None:
    hosts = DockerConfig(hosts=Path("hosts.yaml"))
    config = AutoscalerConfig(policy=Path("policy.yaml"), actuator=actuator, docker=hosts)
    with pytest.raises(
        ConfigError, match=rf"--docker-hosts\) needs .*--actuator\) docker, not {actuator}"
    ) as caught:
        make_actuator(config)
    assert caught.value.field == "docker.hosts"


@pytest.mark.parametrize("dry_run", [False, True])
async def test_a_dry_run_pulls_no_image(tmp_path: Path, dry_run: bool) -> None:
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text("hosts: [{name: a, endpoint: 'unix:///nowhere', address: 10.0.0.1, pull: true}]")
    docker = DockerConfig(hosts=hosts)
    config = AutoscalerConfig(policy=Path("policy.yaml"), actuator="docker", docker=docker, dry_run=dry_run)
    actuator = make_actuator(config)
    assert isinstance(actuator, HostsActuator)
    assert [host.link.pull for host in actuator._hosts] == [not dry_run]
    await actuator.close()
