"""Copies of containers: what is copied, and what must be unique."""

from __future__ import annotations

from typing import Any

import pytest

from autoscaler.actuators.docker_template import (
    Container,
    further_networks,
    replica_body,
    worker_id,
)

ID = "38a48225a463dc889c824c4acb3de8be993d1a222b3ddfa5ad968f086af96d43"


def inspected(**host: Any) -> dict[str, Any]:
    return {
        "Id": ID,
        "Name": "/shop-prefill-1",
        "Config": {
            "Hostname": ID[:12],
            "Image": "splitserve:latest",
            "Env": ["UCX_TLS", "SPLITSERVE_GPU=0", "PATH=/bin"],
            "Cmd": ["prefill-worker"],
            "Healthcheck": {"Test": ["CMD", "true"]},
            "StopTimeout": 130,
            "Labels": {
                "com.docker.compose.project": "shop",
                "com.docker.compose.service": "prefill",
                "com.docker.compose.container-number": "1",
                "com.docker.compose.config-hash": "abc",
                "com.docker.compose.replace": "old",
                "splitserve.pool": "prefill",
                "splitserve.gpu": "0",
            },
        },
        "HostConfig": {
            "NetworkMode": "shop_default",
            "IpcMode": "container:anchor",
            "ShmSize": 1 << 30,
            "Ulimits": [{"Name": "memlock", "Hard": -1, "Soft": -1}],
            "RestartPolicy": {"Name": "always", "MaximumRetryCount": 0},
            "PortBindings": {"9090/tcp": [{"HostPort": "9090"}]},
            "DeviceRequests": None,
            **host,
        },
        "NetworkSettings": {
            "Networks": {
                "fabric": {"Aliases": ["prefill", ID[:12]], "DriverOpts": None, "IPAddress": "10.0.0.2"},
                "shop_default": {"Aliases": ["shop-prefill-1", "prefill"], "DriverOpts": None},
            }
        },
    }


def entry(**changed: Any) -> dict[str, Any]:
    labels = inspected()["Config"]["Labels"] | changed.pop("labels", {})
    found = {"Id": ID, "Names": ["/shop-prefill-1"], "State": "running", "Created": 100, "Labels": labels}
    return found | changed


def test_a_copy_keeps_what_the_service_defines() -> None:
    template = inspected()
    body = replica_body(template, 4, ())
    for name in ("Image", "Cmd", "Env", "Healthcheck", "StopTimeout"):
        assert body[name] == template["Config"][name]
    for name in ("IpcMode", "ShmSize", "Ulimits", "NetworkMode"):
        assert body["HostConfig"][name] == template["HostConfig"][name]
    assert body["Labels"]["com.docker.compose.config-hash"] == "abc"


def test_a_copy_leaves_out_what_belongs_to_one_container() -> None:
    template = inspected()
    body = replica_body(template, 4, ())
    assert body["Labels"]["com.docker.compose.container-number"] == "4"
    assert "com.docker.compose.replace" not in body["Labels"]
    assert body["Hostname"] == ""
    assert body["HostConfig"]["RestartPolicy"]["Name"] == "no"
    assert body["HostConfig"]["PortBindings"] == {}
    assert body["NetworkingConfig"] == {
        "EndpointsConfig": {"shop_default": {"Aliases": ["prefill"], "DriverOpts": None}}
    }
    assert further_networks(template) == {"fabric": {"Aliases": ["prefill"], "DriverOpts": None}}
    assert template == inspected()


@pytest.mark.parametrize("mode", ["host", "none", "container:other"])
def test_without_networks_of_its_own(mode: str) -> None:
    template = inspected(NetworkMode=mode)
    assert replica_body(template, 2, ())["NetworkingConfig"] == {"EndpointsConfig": {}}
    assert further_networks(template) == {}


def test_names() -> None:
    assert worker_id(inspected(), "prefill") == "prefill-38a48225a463"


def test_the_name_says_who_drains_and_until_when() -> None:
    running = Container.of(entry())
    assert running is not None
    assert (running.pool, running.number, running.drain_until_s, running.gone) == ("prefill", 1, None, False)
    draining = Container.of(entry(Names=["/" + running.draining_name(1234.2)]))
    assert draining is not None
    assert draining.drain_until_s == 1235.0


def test_gone_containers() -> None:
    ours = {"splitserve.ordered-by": "autoscaler"}
    cases = [
        (entry(State="exited"), True),
        (entry(State="dead"), True),
        (entry(State="created"), False),  # compose starts it when what it depends on is healthy
        (entry(State="created", labels=ours), True),
        (entry(State="running", labels=ours), False),
    ]
    for found, gone in cases:
        container = Container.of(found)
        assert container is not None
        assert container.gone is gone


def test_others_are_none_of_ours() -> None:
    assert Container.of(entry(labels={"splitserve.pool": "cache"})) is None
    assert Container.of(entry(labels={"com.docker.compose.oneoff": "True"})) is None
