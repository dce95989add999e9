"""The file of hosts: what may stand in it, and that nobody talks to an Engine in the open."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from autoscaler.actuators.hosts.connection import connector
from autoscaler.actuators.hosts.inventory_file import DockerHost, check_endpoint, load_hosts
from autoscaler.service import make_actuator
from splitserve.config.autoscaler import AutoscalerConfig, DockerConfig
from splitserve.errors import ConfigError

HOST = {"name": "a", "endpoint": "unix:///var/run/docker.sock", "address": "10.0.0.1"}


def written(folder: Path, *hosts: dict[str, Any], **settings: Any) -> Path:
    path = folder / "hosts.yaml"
    path.write_text(yaml.safe_dump({"hosts": list(hosts), **settings}))
    return path


def test_two_hosts(tmp_path: Path) -> None:
    far = {
        "name": "b",
        "endpoint": "ssh://ops@gpu-b:2222",
        "address": "gpu-b",
        "gpus": "0,1;2,3",
        "fabric": "x",
    }
    file = load_hosts(written(tmp_path, HOST, far, unknown_s=60))
    assert [host.name for host in file.hosts] == ["a", "b"]
    assert (file.unknown_s, file.answer_s) == (60, 4)
    assert (file.hosts[0].ports.first, file.hosts[0].ports.last) == (20000, 20199)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"endpoint": "tcp://10.0.0.2:2375"}, "neither encrypted nor does it ask who calls"),
        ({"endpoint": "http://10.0.0.2:2375"}, "none of unix:///PATH"),
        ({"endpoint": "tcp://10.0.0.2"}, "none of unix:///PATH"),
        ({"endpoint": "tcp://10.0.0.2:99999"}, "none of unix:///PATH"),
        ({"endpoint": "ssh://-oProxyCommand=x"}, "none of unix:///PATH"),
        ({"endpoint": "ssh://-l@host"}, "none of unix:///PATH"),
        ({"endpoint": "ssh://me:secret@host"}, "none of unix:///PATH"),
        ({"endpoint": None}, "hosts.0.endpoint"),
        ({"tls": "/etc/pems"}, "`tls` goes with a tcp:// endpoint"),
        ({"name": "A host"}, "hosts.0.name"),
        ({"ports": {"first": 20000, "last": 20000}}, "a worker takes 2 ports"),
        ({"gpus": "0,x"}, "'x' is no GPU"),
        ({"port": 1}, "hosts.0.port"),
    ],
)
def test_what_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_hosts(written(tmp_path, HOST | change))
    assert words in caught.value.message
    assert f"{tmp_path}/hosts.yaml, line" in caught.value.message


def test_plain_tcp_is_for_this_machine_alone() -> None:
    for address in ("127.0.0.1", "localhost", "[::1]"):
        DockerHost.model_validate(HOST | {"endpoint": f"tcp://{address}:2375"})


@pytest.mark.parametrize(
    "endpoint",
    [
        # Whatever else reads it might take it for another scheme than the check did.
        "SSH://gpu-b",
        " ssh://gpu-b",
        "TCP://127.0.0.1:2375",
        "UNIX:///var/run/docker.sock",
        "unix:/var/run/docker.sock",
        "tcp://127.0.0.1:2375#@gpu-b:2375",
        "tcp://127.0.0.1:2375?gpu-b",
        "ssh://gpu-b#x",
    ],
)
def test_an_endpoint_has_one_spelling(endpoint: str) -> None:
    with pytest.raises(ValueError, match="is none of"):
        check_endpoint(endpoint)


def test_a_host_is_there_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="host a is there twice"):
        load_hosts(written(tmp_path, HOST, HOST))


def test_missing_certificates_are_named(tmp_path: Path) -> None:
    given = HOST | {"endpoint": "tcp://10.0.0.2:2376", "tls": str(tmp_path)}
    for pem in ("ca.pem", "cert.pem", "key.pem"):
        with pytest.raises(ConfigError, match=f"host a: tls: there is no file {tmp_path}/{pem}"):
            connector(DockerHost.model_validate(given))
        (tmp_path / pem).touch()
    connector(DockerHost.model_validate(given))


@pytest.mark.parametrize("actuator", ["none", "kubernetes"])
def test_docker_hosts_need_the_docker_actuator(actuator: Literal["none", "kubernetes"]) -> None:
    hosts = DockerConfig(hosts=Path("hosts.yaml"))
    config = AutoscalerConfig(policy=Path("policy.yaml"), actuator=actuator, docker=hosts)
    with pytest.raises(
        ConfigError, match=rf"--docker-hosts\) needs .*--actuator\) docker, not {actuator}"
    ) as caught:
        make_actuator(config)
    assert caught.value.field == "docker.hosts"
