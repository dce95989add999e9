"""Whose containers are replicas, and how many GPUs each gets. What needs a real Engine is in the contract suite."""

from __future__ import annotations

from typing import Any, cast

import pytest

from autoscaler.actuators.docker import DockerActuator
from autoscaler.actuators.docker_engine import DockerEngine
from splitserve.errors import FailedPreconditionError, ResourceExhaustedError
from tests.support.scaling.docker_engine import FakeDocker


def actuator(docker: FakeDocker, **settings: Any) -> DockerActuator:
    return DockerActuator(cast(DockerEngine, docker), docker.project, **settings)


async def names(of: DockerActuator) -> list[str]:
    return [replica.name for replica in await of.replicas()]


async def test_with_a_model_only_its_containers_are_replicas() -> None:
    docker = FakeDocker()
    ours = docker.runs("prefill-a", "prefill", {"splitserve.model": "a"})
    docker.runs("prefill-b", "prefill", {"splitserve.model": "b"})
    docker.runs("prefill", "prefill")
    scaled = actuator(docker, model="a")
    assert await names(scaled) == [ours]
    await scaled.start("prefill", 1)
    made = list(docker.there.values())[-1]
    assert made["Config"]["Labels"]["splitserve.model"] == "a"
    assert made["Name"] == "/shop-prefill-a-2"
    assert len(await names(scaled)) == 2
    await scaled.stop(
        "prefill", [f"prefill-{made['Config']['Hostname']}" for made in docker.there.values()], 9.0
    )
    stopped = {docker.there[one]["Config"]["Labels"]["splitserve.model"] for one in docker.killed}
    assert stopped == {"a"}
    assert len(await names(actuator(docker))) == 4, "without a model all of the project"


async def test_ended_containers_of_another_model_stay() -> None:
    docker = FakeDocker()
    docker.runs("prefill-a", "prefill", {"splitserve.model": "a"})
    for number in range(2):
        docker.runs(f"prefill-b{number}", "prefill", {"splitserve.model": "b"})
    for made in list(docker.there.values())[1:]:
        made["State"] = "exited"
    await actuator(docker, model="a").replicas()
    assert len(docker.there) == 3


async def test_a_model_without_any_container_is_not_copied_from_another() -> None:
    docker = FakeDocker()
    docker.runs("decode-b", "decode", {"splitserve.model": "b"})
    with pytest.raises(FailedPreconditionError, match=r"splitserve\.model=a to copy") as caught:
        await actuator(docker, model="a").start("decode", 1)
    assert caught.value.reason == "NO_TEMPLATE"


async def test_each_replica_gets_as_many_gpus_as_the_policy_says() -> None:
    docker = FakeDocker()
    docker.runs("prefill", "prefill", {"splitserve.gpu": "0"})
    docker.runs("decode", "decode", {"splitserve.gpu": "1"})
    scaled = actuator(docker, gpus=tuple("01234567"))
    assert scaled.gpu_inventory == 8
    await scaled.start("decode", 1, 2)
    await scaled.start("prefill", 1)
    await scaled.start("decode", 1, 3)
    given = {replica.gpu for replica in await scaled.replicas()}
    assert given == {"0", "1", "2,3", "4", "5,6,7"}
    with pytest.raises(ResourceExhaustedError) as caught:
        await scaled.start("prefill", 1)
    assert caught.value.reason == "NO_GPU"
    await scaled.start("prefill", 1, 0)
    assert len(docker.there) == 6


async def test_gpus_of_another_models_replicas_are_in_use() -> None:
    docker = FakeDocker()
    docker.runs("prefill-a", "prefill", {"splitserve.model": "a", "splitserve.gpu": "0"})
    docker.runs("prefill-b", "prefill", {"splitserve.model": "b", "splitserve.gpu": "1"})
    scaled = actuator(docker, gpus=("0", "1", "2"), model="a")
    await scaled.start("prefill", 1)
    assert [replica.gpu for replica in await scaled.replicas()] == ["0", "2"]
    assert scaled.gpu_inventory == 2, "and none of our budget"


def test_without_an_inventory_there_is_no_budget() -> None:
    assert actuator(FakeDocker()).gpu_inventory is None
