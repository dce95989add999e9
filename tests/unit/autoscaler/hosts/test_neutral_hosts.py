"""Neutral workers on two Docker hosts: names, ports and addresses of their own, a host that runs the other kind, and
one that is away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import pytest

from autoscaler.actuators.actuator import Presence, ReplicaKind
from autoscaler.actuators.docker import DockerActuator
from autoscaler.actuators.docker_engine import DockerEngine
from autoscaler.actuators.docker_room import HostLimits
from autoscaler.actuators.docker_seats import HostNetwork
from autoscaler.hosts.host_watch import HostLink
from autoscaler.hosts.hosts_actuator import HostsActuator
from splitserve.errors import FailedPreconditionError, UnavailableError
from tests.support.scaling.docker_engine import FakeDocker
from tests.support.scaling.neutral_loop import NeutralLoop

NEUTRAL = ReplicaKind(gpus=0, neutral=True)
ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2"}
T = TypeVar("T")


class Host(FakeDocker):
    """The Engine of a host as compose has left it: one container of each pool, with the host's network. What is told to
    end ends at once."""

    def __init__(self, name: str, *, neutral: bool = True) -> None:
        super().__init__()
        self.name, self.away = name, False
        self.images.add("splitserve")
        for number, pool in enumerate(("prefill", "decode")):
            self.runs(pool, pool)
            made = list(self.there.values())[-1]
            made["HostConfig"]["NetworkMode"] = "host"
            words = ["worker", "--leaning", pool] if neutral else [f"{pool}-worker"]
            made["Config"] |= {
                "Hostname": f"{name}-{number}",
                "Cmd": words,
                "Env": [
                    f"SPLITSERVE_PORT={20200 + 2 * number}",
                    f"SPLITSERVE_METRICS_PORT={20201 + 2 * number}",
                ],
            }

    async def call(self, what: str, work: Callable[[Any], T]) -> T:
        if self.away:
            raise UnavailableError("no route to host", reason="DOCKER_UNREACHABLE")
        return await super().call(what, work)

    def kill(self, container: str, signal: str = "SIGKILL") -> None:
        super().kill(container, signal)
        self.there[container] |= {"State": "exited", "ExitCode": 0}

    @property
    def addresses(self) -> list[str]:
        """Where its workers say that they are."""
        found = [dict(entry.split("=", 1) for entry in one["Config"]["Env"]) for one in self.there.values()]
        return [one["SPLITSERVE_ADVERTISE_ADDRESS"] for one in found if "SPLITSERVE_ADVERTISE_ADDRESS" in one]

    @property
    def running(self) -> int:
        return sum(one["State"] == "running" for one in self.there.values())


def over(*hosts: Host) -> HostsActuator:
    links = []
    for host in hosts:
        limits = HostLimits(HostNetwork(host.name, ADDRESSES[host.name], 20000, 20007), max_replicas=4)
        own = DockerActuator(cast(DockerEngine, host), host.project, limits=limits)
        links.append(HostLink(host.name, own))
    return HostsActuator(links, answer_s=1.0)


async def test_each_has_a_name_ports_and_an_address_of_its_own() -> None:
    a, b = Host("a"), Host("b")
    actuator = over(a, b)
    await actuator.start("prefill", 2, NEUTRAL)
    await actuator.start("decode", 2, NEUTRAL)
    names = [one.name for one in await actuator.replicas()]
    assert len(set(names)) == 8
    assert {"worker-a-0", "worker-a-1", "worker-b-0", "worker-b-1"} < set(names)
    assert all(name.startswith(("worker-a-", "worker-b-")) for name in names)
    for host in (a, b):
        assert len(set(host.addresses)) == 2
        assert {address.partition(":")[0] for address in host.addresses} == {ADDRESSES[host.name]}
        assert host.running == 4
    words = [one["Config"]["Cmd"] for one in a.there.values()]
    assert all(command[0] == "worker" for command in words)


async def test_a_host_that_runs_the_other_kind_is_no_place() -> None:
    neutral, pinned = Host("a"), Host("b", neutral=False)
    actuator = over(pinned, neutral)
    await actuator.start("decode", 2, NEUTRAL)
    assert (neutral.running, pinned.running) == (4, 2)
    await actuator.start("decode", 1, ReplicaKind(gpus=0))
    assert (neutral.running, pinned.running) == (4, 3)
    alone = over(pinned)
    with pytest.raises(
        FailedPreconditionError, match="b: workers is neutral, but the containers of service decode"
    ) as no:
        await alone.start("decode", 1, NEUTRAL)
    assert (no.value.reason, no.value.field) == ("WORKER_KIND", "workers")


async def test_a_host_that_is_away_while_its_workers_lean_elsewhere_has_them_still() -> None:
    a, b = Host("a"), Host("b")
    loop = NeutralLoop(over(a, b))
    await loop.tick(2, 2)
    await loop.all_seen()
    await loop.tick(1, 3)
    assert loop.sides == (1, 3)
    before = dict(loop.leans)
    b.away = True
    loop.leans = {name: pool for name, pool in before.items() if "-a-" in name}
    for _ in range(4):
        await loop.tick(1, 3)
    assert {one.name for one in await loop.actuator.replicas() if one.presence is Presence.UNKNOWN} == {
        "worker-b-0",
        "worker-b-1",
    }
    assert (a.running, b.running) == (2, 2), "nothing is started in their place"
    # More than known and unknown together, on the host that answers.
    await loop.tick(2, 3)
    assert (a.running, b.running) == (3, 2)
    b.away = False
    for _ in range(8):
        await loop.all_seen()
        await loop.tick(1, 3)
    await loop.all_seen()
    assert loop.sides == (1, 3)
    assert a.running + b.running == 4


async def test_workers_change_sides_across_hosts_and_are_stopped_where_they_were_started() -> None:
    a, b = Host("a"), Host("b")
    loop = NeutralLoop(over(a, b))
    await loop.tick(2, 2)
    await loop.all_seen()
    await loop.tick(3, 1)
    await loop.tick(1, 1)
    for _ in range(4):
        await loop.all_seen()
        await loop.tick(1, 1)
    await loop.all_seen()
    assert loop.sides == (1, 1)
    assert a.running + b.running == 2
