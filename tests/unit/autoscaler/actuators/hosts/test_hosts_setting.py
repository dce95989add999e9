"""A file of Docker hosts beside another actuator."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

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
