"""Whose containers are replicas, and how many GPUs each gets. What needs a real Engine is in the contract suite."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest

from autoscaler.actuators import docker as docker_module
from autoscaler.actuators.actuator import ActualReplica, ReplicaShape
from autoscaler.actuators.docker import DockerActuator
from autoscaler.actuators.docker_engine import DockerEngine
from autoscaler.actuators.docker_room import HostLimits
from autoscaler.actuators.docker_template import HostNetwork
from autoscaler.actuators.hosts.make_hosts import docker_gpus
from splitserve.config.autoscaler import DockerConfig
from splitserve.errors import (
    ConfigError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
)
from splitserve.gpus.inventory import GpuInventory
from tests.support.scaling.actuator_rigs import numbered_gpus
from tests.support.scaling.docker_engine import FakeDocker


def actuator(docker: FakeDocker, **settings: Any) -> DockerActuator:
    return DockerActuator(cast(DockerEngine, docker), docker.project, **settings)


async def names(of: DockerActuator) -> list[str]:
    return [replica.name for replica in await of.replicas()]


async def tidied(of: DockerActuator) -> tuple[ActualReplica, ...]:
    """Its replicas, once what is left of others is removed."""
    there = await of.replicas()
    await of.tidy()
    return there


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
    await scaled.stop([f"prefill-{made['Config']['Hostname']}" for made in docker.there.values()], 9.0)
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
    await tidied(actuator(docker, model="a"))
    assert len(docker.there) == 3


async def test_a_model_without_any_container_is_not_copied_from_another() -> None:
    docker = FakeDocker()
    docker.runs("decode-b", "decode", {"splitserve.model": "b"})
    with pytest.raises(FailedPreconditionError, match=r"splitserve\.model=a to copy") as caught:
        await actuator(docker, model="a").start("decode", 1)
    assert caught.value.reason == "NO_TEMPLATE"


VLLM = ("--engine", "vllm")


async def test_each_replica_gets_as_many_gpus_as_the_policy_says() -> None:
    docker = FakeDocker()
    docker.runs("prefill", "prefill", {"splitserve.gpu": "0"})
    docker.runs("decode", "decode", {"splitserve.gpu": "1"}, VLLM)
    scaled = actuator(docker, gpus=numbered_gpus(8))
    assert scaled.gpu_inventory == 8
    await scaled.start("decode", 1, ReplicaShape(2))
    await scaled.start("prefill", 1)
    await scaled.start("decode", 1, ReplicaShape(3))
    given = {replica.gpu for replica in await scaled.replicas()}
    assert given == {"0", "1", "2,3", "4", "5,6,7"}
    with pytest.raises(ResourceExhaustedError) as caught:
        await scaled.start("prefill", 1)
    assert caught.value.reason == "NO_GPU"
    await scaled.start("prefill", 1, ReplicaShape(0))
    assert len(docker.there) == 6


async def test_gpus_of_another_models_replicas_are_in_use() -> None:
    docker = FakeDocker()
    docker.runs("prefill-a", "prefill", {"splitserve.model": "a", "splitserve.gpu": "0"})
    docker.runs("prefill-b", "prefill", {"splitserve.model": "b", "splitserve.gpu": "1"})
    scaled = actuator(docker, gpus=numbered_gpus(3), model="a")
    await scaled.start("prefill", 1)
    assert [replica.gpu for replica in await scaled.replicas()] == ["0", "2"]
    assert scaled.gpu_inventory == 2, "and none of our budget"


async def test_a_restarted_autoscaler_gives_no_gpu_twice() -> None:
    """Labels say who has what; replicas that drain still have theirs, ended ones no more."""
    docker = FakeDocker()
    docker.runs("prefill", "prefill", {"splitserve.gpu": "0"})
    docker.runs("decode", "decode", {"splitserve.gpu": "2,3"}, VLLM)
    gpus = GpuInventory.of_groups([["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]])
    await actuator(docker, gpus=gpus).start("decode", 1, ReplicaShape(2))
    again = actuator(docker, gpus=gpus)
    await again.start("prefill", 1)
    assert {replica.gpu for replica in await again.replicas()} == {"0", "1", "2,3", "4,5"}
    first = next(replica for replica in await again.replicas() if replica.gpu == "2,3")
    await again.stop([first.name], 60.0)
    await actuator(docker, gpus=gpus).start("decode", 1, ReplicaShape(2))
    assert {replica.gpu for replica in await again.replicas()} == {"0", "1", "2,3", "4,5", "6,7"}
    with pytest.raises(ResourceExhaustedError, match="none of the 8"):
        await again.start("decode", 1, ReplicaShape(2))
    docker.there[docker.killed[0]]["State"] = "exited"
    await actuator(docker, gpus=gpus).start("decode", 1, ReplicaShape(2))
    assert [replica.gpu for replica in await again.replicas()].count("2,3") == 1


async def test_a_prefill_and_a_decode_replica_share_a_gpu_under_mps() -> None:
    docker = FakeDocker()
    docker.runs("prefill", "prefill", {"splitserve.gpu": "0"})
    docker.runs("decode", "decode", {"splitserve.gpu": "0"})
    gpus = GpuInventory.of_groups([["0", "1"]], replicas_per_gpu=2)
    scaled = actuator(docker, gpus=gpus)
    assert scaled.gpu_inventory == 4
    await scaled.start("decode", 1)
    await scaled.start("prefill", 1)
    by_pool = sorted((replica.pool, replica.gpu) for replica in await scaled.replicas())
    assert by_pool == [("decode", "0"), ("decode", "1"), ("prefill", "0"), ("prefill", "1")]
    with pytest.raises(ResourceExhaustedError):
        await scaled.start("prefill", 1)


@pytest.mark.parametrize(
    ("command", "gpus_each", "words"),
    [
        ((*VLLM, "--engine-args", "-tp 4"), 2, "gpus_per_replica is 2, but .* 4 ranks"),
        ((), 2, "gpus_per_replica is 2, but the torch engine computes on one GPU"),
    ],
)
async def test_a_replica_that_could_not_use_its_gpus_is_not_made(
    command: tuple[str, ...], gpus_each: int, words: str
) -> None:
    docker = FakeDocker()
    docker.runs("decode", "decode", {"splitserve.gpu": "0"}, command)
    with pytest.raises(ConfigError, match=words):
        await actuator(docker, gpus=numbered_gpus(8)).start("decode", 1, ReplicaShape(gpus_each))
    assert len(docker.there) == 1


def test_the_inventory_comes_from_the_settings() -> None:
    listed = docker_gpus(DockerConfig(gpus="0,1;2,3", replicas_per_gpu=2))
    assert (listed.gpus, listed.capacity, len(listed.links)) == (("0", "1", "2", "3"), 8, 2)
    assert docker_gpus(DockerConfig()).gpus == ()
    with pytest.raises(InvalidArgumentError, match="'cuda:0' is no GPU"):
        DockerConfig(gpus="cuda:0")


def test_without_an_inventory_there_is_no_budget() -> None:
    assert actuator(FakeDocker()).gpu_inventory is None


def limited(**limits: Any) -> HostLimits:
    return HostLimits(HostNetwork("gpu-a", "10.0.0.1", 20000, 20003), **limits)


async def test_copies_with_the_hosts_network_get_names_and_ports_of_their_own() -> None:
    docker = FakeDocker()
    docker.runs("decode", "decode")
    (first,) = docker.there.values()
    first["HostConfig"]["NetworkMode"] = "host"
    first["Config"]["Hostname"] = "gpu-a"
    first["Config"]["Env"] = ["SPLITSERVE_PORT=20000", "A=1"]
    scaled = actuator(docker, limits=limited())
    await scaled.start("decode", 1)
    made = list(docker.there.values())[-1]
    environment = dict(entry.split("=", 1) for entry in made["Config"]["Env"])
    assert environment == {
        "A": "1",
        "SPLITSERVE_HOST": "10.0.0.1",
        "SPLITSERVE_PORT": "20002",
        "SPLITSERVE_METRICS_PORT": "20003",
        "SPLITSERVE_ADVERTISE_ADDRESS": "10.0.0.1:20002",
    }
    assert await names(scaled) == ["decode-gpu-a", f"decode-{made['Config']['Hostname']}"]
    with pytest.raises(ResourceExhaustedError) as caught:
        await scaled.start("decode", 1)
    assert caught.value.reason == "NO_PORT"


async def test_room_needs_a_pattern_an_image_a_model_and_a_place() -> None:
    docker = FakeDocker()
    scaled = actuator(docker, limits=limited(max_replicas=2))
    assert (await scaled.room("decode", ReplicaShape(gpus=0))).reason == "NO_TEMPLATE"
    docker.runs("decode", "decode")
    assert (await scaled.room("decode", ReplicaShape(gpus=0))).reason == "NO_IMAGE"
    docker.images.add("splitserve")
    assert (await scaled.room("decode", ReplicaShape(gpus=0))).replicas == 1
    models = docker.runs_once("models", 1)
    assert "exit code 1" in (await scaled.room("decode", ReplicaShape(gpus=0))).why
    docker.there[models]["ExitCode"] = 0
    assert (await scaled.room("decode", ReplicaShape(gpus=0))).replicas == 1
    docker.there[models]["State"] = "running"
    assert (await scaled.room("decode", ReplicaShape(gpus=0))).reason == "NO_MODEL"
    docker.there[models]["State"] = "exited"
    docker.runs("prefill", "prefill")
    assert (await scaled.room("decode", ReplicaShape(gpus=0))).reason == "NO_ROOM"


async def test_a_host_asked_for_its_gpus_is_no_place_without_any() -> None:
    docker = FakeDocker()
    docker.images.add("splitserve")
    docker.runs("decode", "decode")
    answers: list[GpuInventory | None] = [None, GpuInventory()]
    scaled = actuator(docker, limits=limited(ask_gpus=lambda client: answers.pop(0)))
    await scaled.replicas()
    await scaled.replicas()
    assert not answers, "it is asked until it answers"
    await scaled.replicas()
    assert (await scaled.room("decode", ReplicaShape())).reason == "NO_GPU"
    assert (await scaled.room("decode", ReplicaShape(gpus=0))).replicas > 0


def untidy() -> FakeDocker:
    """Three replicas, of which one has failed and one has overrun its drain."""
    docker = FakeDocker()
    for name in ("a", "b", "c"):
        docker.runs(f"prefill-{name}", "prefill")
    ended, overrun, _ = docker.there.values()
    ended |= {"State": "exited", "ExitCode": 1}
    overrun["Name"] += ".draining-until-1"
    return docker


async def test_a_list_changes_nothing() -> None:
    docker = untidy()
    before = {name: dict(made) for name, made in docker.there.items()}
    scaled = actuator(docker)
    for _ in range(2):
        assert len(await scaled.replicas()) == 2
    assert (docker.there, docker.killed) == (before, [])


@pytest.mark.parametrize(("call", "stuck"), [("logs", 0), ("remove", 1), ("kill", 0)])
async def test_a_container_that_cannot_be_tidied_holds_nothing_up(
    call: str, stuck: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Logging drivers that cannot be read, storage drivers that are busy, processes that do not die."""
    docker = untidy()
    docker.refuses[call] = 500 if call != "logs" else 501
    scaled = actuator(docker)
    with caplog.at_level(logging.WARNING, "splitserve"):
        for _ in range(3):
            assert [replica.stopping for replica in await tidied(scaled)] == [True, False]
    assert len(docker.there) == 2 + stuck
    said = [record.message for record in caplog.records]
    assert said.count("replica.stuck") == (call != "logs")
    assert bool(docker.killed) == (call != "kill")
    await scaled.start("prefill", 1)
    docker.refuses.clear()
    assert len(await tidied(scaled)) == 3
    assert len(docker.there) == 3
    assert docker.killed


@pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0])
async def test_a_wall_clock_that_is_set_neither_kills_nor_spares_a_draining_replica(
    monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    clocks = {"wall": 1e9, "own": 50.0}
    monkeypatch.setattr(docker_module, "time", FakeTime(clocks))
    docker = FakeDocker()
    ours = docker.runs("prefill", "prefill")
    scaled = actuator(docker)
    await scaled.stop([ours], 30.0)
    asked = list(docker.killed)
    clocks["wall"] += jump_s
    clocks["own"] += 29.0
    await tidied(scaled)
    assert docker.killed == asked
    clocks["own"] += 2.0
    await tidied(scaled)
    assert len(docker.killed) == len(asked) + 1


class FakeTime:
    """Both clocks, as the module `time` has them."""

    def __init__(self, clocks: dict[str, float]) -> None:
        self._clocks = clocks

    def time(self) -> float:
        return self._clocks["wall"]

    def monotonic(self) -> float:
        return self._clocks["own"]
