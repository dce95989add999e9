"""GPUs of containers: which ones they have, and what a copy is told, as the Engine's API wants it."""

from __future__ import annotations

from typing import Any

import pytest

from autoscaler.actuators.docker_template import give_gpus, gpus_of

ALL = {"Driver": "nvidia", "Count": -1, "DeviceIDs": None, "Capabilities": [["gpu"]]}
ONE = {"Driver": "nvidia", "Count": 0, "DeviceIDs": ["GPU-a"], "Capabilities": [["gpu"]]}
OTHER = {"Driver": "", "Count": -1, "DeviceIDs": None, "Capabilities": [["tpu"]]}


def inspected(
    *requests: dict[str, Any], env: tuple[str, ...] = (), label: str = "", **host: Any
) -> dict[str, Any]:
    labels = {"splitserve.pool": "decode"} | ({"splitserve.gpu": label} if label else {})
    return {
        "Config": {"Labels": labels, "Env": ["PATH=/bin", *env]},
        "HostConfig": {"DeviceRequests": list(requests) or None, **host},
    }


def copy(template: dict[str, Any], *gpus: str) -> tuple[dict[str, Any], dict[str, Any]]:
    config, host = dict(template["Config"]), dict(template["HostConfig"])
    give_gpus(config, host, gpus)
    return config, host


@pytest.mark.parametrize(
    ("container", "gpus"),
    [
        (inspected(), ()),
        (inspected(ALL), ()),
        (inspected(ALL, label="2,3"), ("2", "3")),
        (inspected(ONE), ("GPU-a",)),
        (inspected(Runtime="nvidia", env=("NVIDIA_VISIBLE_DEVICES=4,5",)), ("4", "5")),
        (inspected(Runtime="nvidia", env=("NVIDIA_VISIBLE_DEVICES=all",)), ()),
        (
            inspected(env=("NVIDIA_VISIBLE_DEVICES=4",)),
            (),
        ),  # NVIDIA's images set it; without the runtime nobody reads it
    ],
)
def test_whose_gpus(container: dict[str, Any], gpus: tuple[str, ...]) -> None:
    assert gpus_of(container) == gpus


def test_where_all_are_in_view_they_stay_and_the_worker_is_told_its_own() -> None:
    config, host = copy(inspected(ALL, OTHER, env=("SPLITSERVE_GPU=0",), label="0"), "4", "5")
    assert host["DeviceRequests"] == [ALL, OTHER]
    assert config["Env"] == ["PATH=/bin", "SPLITSERVE_GPU=4,5"]
    assert config["Labels"]["splitserve.gpu"] == "4,5"


@pytest.mark.parametrize(
    ("gpus", "inside"), [(("4", "5"), "0,1"), (("GPU-b", "GPU-c"), "GPU-b,GPU-c"), (("MIG-x",), "MIG-x")]
)
def test_where_its_own_alone_are_in_view_they_are_numbered_from_0(gpus: tuple[str, ...], inside: str) -> None:
    config, host = copy(inspected(ONE), *gpus)
    assert host["DeviceRequests"] == [ONE | {"DeviceIDs": list(gpus)}]
    assert f"SPLITSERVE_GPU={inside}" in config["Env"]
    assert config["Labels"]["splitserve.gpu"] == ",".join(gpus)


def test_nvidias_runtime_is_told_by_its_variable() -> None:
    config, host = copy(inspected(Runtime="nvidia", env=("NVIDIA_VISIBLE_DEVICES=0,1",)), "2", "3")
    assert config["Env"] == ["PATH=/bin", "SPLITSERVE_GPU=0,1", "NVIDIA_VISIBLE_DEVICES=2,3"]
    assert host == {"DeviceRequests": [], "Runtime": "nvidia"}


def test_the_template_is_left_as_it_is() -> None:
    template = inspected(ONE, label="GPU-a")
    copy(template, "GPU-b")
    assert template == inspected(ONE, label="GPU-a")
