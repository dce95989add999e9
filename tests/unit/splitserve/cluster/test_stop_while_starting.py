"""A cluster that is told to end while a process starts ends, whichever comes first."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from splitserve.cluster.child_process import ChildSpec, Event
from splitserve.cluster.forking.owner import AdoptedProcess
from splitserve.cluster.supervisor import ClusterTimes, LocalCluster
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
async def test_a_start_that_comes_about_so_many_turns_after_the_stop(turns: int) -> None:
    asked, gate = asyncio.Event(), asyncio.Event()
    started: list[AdoptedProcess] = []

    async def fork(
        spec: ChildSpec, environment: Mapping[str, str], output: int, files: Sequence[int]
    ) -> AdoptedProcess:
        asked.set()
        await gate.wait()
        sleeping = subprocess.Popen(["sleep", "600"], start_new_session=True)  # noqa: ASYNC220
        sleeping.returncode = 0  # the cluster waits for it
        started.append(AdoptedProcess(sleeping.pid))
        return started[-1]

    async def probe() -> str | None:
        return None

    times = ClusterTimes(unready_drain_s=0.1, drain_margin_s=0.1)
    cluster = LocalCluster([ChildSpec("worker-0", "worker", ("x",))], probe, Silent(), fork=fork, times=times)
    running = asyncio.create_task(cluster.run())
    await asked.wait()
    cluster.request_stop()
    for _ in range(turns):
        await asyncio.sleep(0)
    gate.set()
    await asyncio.wait_for(running, PATIENCE_S)
    for process in started:
        if process.returncode is None:  # the start was given up
            process.terminate()
        await asyncio.wait_for(process.wait(), PATIENCE_S)
