"""A cluster that starts: it is asked until it is ready, and told to end meanwhile it ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

from launcher.cluster import supervisor
from launcher.cluster.child_process import ChildSpec, Event, Role
from launcher.cluster.supervisor import ClusterTimes, LocalCluster
from splitserve.errors import UnavailableError
from tests.support.scaling.actuator_rigs import Silent
from tests.support.waiting import PATIENCE_S

SLOW_END = "trap 'sleep 0.5; exit 0' TERM; echo up; while :; do sleep 0.02; done"


@dataclass
class Watching(Silent):
    """Keeps what is said, and sees the first line of output."""

    up: asyncio.Event = field(default_factory=asyncio.Event)
    said: list[str] = field(default_factory=list)

    def message(self, text: str) -> None:
        self.said.append(text)

    def line(self, spec: ChildSpec, line: str, event: Event | None) -> None:
        self.up.set()


@pytest.mark.parametrize("least_s", [0.0, PATIENCE_S])
async def test_a_child_has_the_time_that_it_needs_to_end_before_the_cluster_is_ready(least_s: float) -> None:
    async def probe() -> str | None:
        return None

    watching, times = Watching(), ClusterTimes(unready_drain_s=0.0, drain_margin_s=0.1)
    spec = ChildSpec("prefill-0", "prefill", ("sh", "-c", SLOW_END), least_stop_s=least_s)
    cluster = LocalCluster([spec], probe, watching, times=times)
    running = asyncio.create_task(cluster.run())
    await asyncio.wait_for(watching.up.wait(), PATIENCE_S)
    cluster.request_stop()
    await asyncio.wait_for(running, 2 * PATIENCE_S)
    killed = [text for text in watching.said if "killed" in text]
    assert killed == ([] if least_s else ["prefill-0: did not end within 0.1 s, killed"])


@pytest.mark.parametrize("turns", range(4))
async def test_a_start_that_comes_about_so_many_turns_after_the_stop(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, gate = asyncio.Event(), asyncio.Event()
    started: list[asyncio.subprocess.Process] = []
    execute = asyncio.create_subprocess_exec

    async def slowly(*command: str, **options: Any) -> asyncio.subprocess.Process:
        asked.set()
        await gate.wait()
        started.append(await execute(*command, **options))
        return started[-1]

    async def probe() -> str | None:
        return None

    monkeypatch.setattr(asyncio, "create_subprocess_exec", slowly)
    times = ClusterTimes(unready_drain_s=0.1, drain_margin_s=0.1)
    spec = ChildSpec("worker-0", "worker", ("sleep", "600"))
    cluster = LocalCluster([spec], probe, Silent(), times=times)
    running = asyncio.create_task(cluster.run())
    await asked.wait()
    cluster.request_stop()
    for _ in range(turns):
        await asyncio.sleep(0)
    gate.set()
    await asyncio.wait_for(running, PATIENCE_S)
    assert all(process.returncode is not None for process in started)


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
