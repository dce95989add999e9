"""A cluster is asked whether it is ready as soon as its processes say that they are."""

from __future__ import annotations

import asyncio

import pytest

from splitserve.cluster import readiness
from splitserve.cluster.child_process import ChildSpec, Role
from splitserve.cluster.supervisor import LocalCluster
from splitserve.errors import UnavailableError
from tests.support.scaling.actuator_rigs import Silent
from tests.support.waiting import PATIENCE_S


def saying(name: str, role: Role, event: str) -> ChildSpec:
    say = f"""trap 'exit 0' TERM; echo '{{"event": "{event}"}}'; while :; do sleep 0.02; done"""
    return ChildSpec(name, role, ("sh", "-c", say))


async def test_a_cluster_is_ready_when_its_processes_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "READY_POLL_S", 3600.0)
    looks = 0

    async def probe() -> str | None:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise UnavailableError("nobody listens yet")
        return "model" if looks > 3 else None  # they still connect to each other

    specs = [
        saying("coordinator", "coordinator", "coordinator.ready"),
        saying("decode-0", "decode", "worker.ready"),
    ]
    cluster = LocalCluster(specs, probe, Silent())
    running = asyncio.create_task(cluster.run())
    await asyncio.wait_for(cluster.was_ready.wait(), PATIENCE_S)
    assert looks == 4
    cluster.request_stop()
    await asyncio.wait_for(running, PATIENCE_S)


async def test_one_whose_processes_do_not_say_so_is_asked_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(readiness, "READY_POLL_S", 0.001)
    monkeypatch.setattr(readiness, "SAID_READY_POLL_S", 3600.0)
    looks = 0

    async def probe() -> str | None:
        nonlocal looks
        looks += 1
        return "model" if looks > 3 else None

    specs = [
        saying("decode-0", "decode", "worker.ready"),
        saying("prefill-0", "prefill", "worker.loading"),
    ]
    cluster = LocalCluster(specs, probe, Silent())
    running = asyncio.create_task(cluster.run())
    await asyncio.wait_for(cluster.was_ready.wait(), PATIENCE_S)
    cluster.request_stop()
    await asyncio.wait_for(running, PATIENCE_S)
