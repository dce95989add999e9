"""The supervisor asks whether the cluster is ready until it is."""

from __future__ import annotations

import asyncio

import pytest

from launcher.cluster import supervisor
from launcher.cluster.child_process import ChildSpec, Role
from launcher.cluster.supervisor import LocalCluster
from splitserve.errors import UnavailableError
from tests.support.scaling.actuator_rigs import Silent
from tests.support.waiting import PATIENCE_S


def saying(name: str, role: Role, event: str) -> ChildSpec:
    say = f"""trap 'exit 0' TERM; echo '{{"event": "{event}"}}'; while :; do sleep 0.02; done"""
    return ChildSpec(name, role, ("sh", "-c", say))


async def test_a_cluster_is_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "READY_POLL_S", 0.001)
    looks = 0

    async def probe() -> str | None:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise UnavailableError("nobody listens yet")
        return "model" if looks > 3 else None

    specs = [saying("decode-0", "decode", "worker.ready"), saying("prefill-0", "prefill", "worker.loading")]
    cluster = LocalCluster(specs, probe, Silent())
    running = asyncio.create_task(cluster.run())
    await asyncio.wait_for(cluster.was_ready.wait(), PATIENCE_S)
    cluster.request_stop()
    await asyncio.wait_for(running, PATIENCE_S)
