"""Settings of the autoscaler that exclude each other."""

from __future__ import annotations

import pytest

from splitserve.config.autoscaler import AutoscalerConfig
from splitserve.config.base import merge_settings
from splitserve.errors import ConfigError


@pytest.mark.parametrize("actuator", ["none", "kubernetes"])
def test_docker_hosts_need_the_docker_actuator(actuator: str) -> None:
    values = {"policy": "policy.yaml", "docker": {"hosts": "hosts.yaml"}}
    with pytest.raises(ConfigError, match=rf"--docker-hosts\) needs actuator docker, not {actuator}"):
        merge_settings(AutoscalerConfig, {**values, "actuator": actuator})
    assert merge_settings(AutoscalerConfig, {**values, "actuator": "docker"}).docker.hosts is not None
