"""The file of hosts: what may stand in it, and that nobody talks to an Engine in the open."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoscaler.hosts.connection import connector
from autoscaler.hosts.docker_context import read_context
from autoscaler.hosts.inventory_file import DockerHost, check_endpoint, load_hosts
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
    assert file.hosts[0].ports.places == 100


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
        ({"endpoint": None}, "either `endpoint` or `context`"),
        ({"context": "far"}, "either `endpoint` or `context`"),
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


def context(folder: Path, name: str, endpoint: dict[str, Any], *, pems: bool) -> None:
    number = hashlib.sha256(name.encode()).hexdigest()
    meta = folder / "contexts/meta" / number
    meta.mkdir(parents=True)
    (meta / "meta.json").write_text(json.dumps({"Name": name, "Endpoints": {"docker": endpoint}}))
    if pems:
        tls = folder / "contexts/tls" / number / "docker"
        tls.mkdir(parents=True)
        for pem in ("ca", "cert", "key"):
            (tls / f"{pem}.pem").touch()


def test_contexts_as_docker_writes_them(tmp_path: Path) -> None:
    context(tmp_path, "far", {"Host": "tcp://10.0.0.2:2376", "SkipTLSVerify": False}, pems=True)
    endpoint, files = read_context("far", tmp_path)
    assert endpoint == "tcp://10.0.0.2:2376"
    assert files is not None
    assert files.key is not None
    assert files.key.exists()
    context(tmp_path, "ssh", {"Host": "ssh://ops@gpu-b"}, pems=False)
    assert read_context("ssh", tmp_path) == ("ssh://ops@gpu-b", None)


@pytest.mark.parametrize(
    ("endpoint", "pems"),
    [
        ({"Host": "tcp://10.0.0.2:2375"}, False),
        ({"Host": "tcp://10.0.0.2:2376", "SkipTLSVerify": True}, True),
        ({"Host": "npipe:////./pipe/docker"}, False),
        ({"Host": 5}, False),
        ({"Host": ["tcp://10.0.0.2:2376"]}, True),
        ({"Host": "tcp://10.1:2376"}, True),
        ({}, False),
    ],
)
def test_contexts_that_are_refused(tmp_path: Path, endpoint: dict[str, Any], pems: bool) -> None:
    context(tmp_path, "far", endpoint, pems=pems)
    with pytest.raises(ConfigError, match="context far") as caught:
        read_context("far", tmp_path)
    assert caught.value.field == "context"


def test_a_context_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    host = DockerHost.model_validate({"name": "a", "context": "far", "address": "a"})
    with pytest.raises(ConfigError, match="there is none in"):
        connector(host)


def test_missing_certificates_are_named(tmp_path: Path) -> None:
    given = HOST | {"endpoint": "tcp://10.0.0.2:2376", "tls": str(tmp_path)}
    for pem in ("ca.pem", "cert.pem", "key.pem"):
        with pytest.raises(ConfigError, match=f"host a: tls: there is no file {tmp_path}/{pem}"):
            connector(DockerHost.model_validate(given))
        (tmp_path / pem).touch()
    connector(DockerHost.model_validate(given))
