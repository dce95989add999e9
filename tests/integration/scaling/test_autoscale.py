"""`splitserve up --autoscale` under traffic: each pool follows its own load, and no request ever fails."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import yaml

from launcher.cluster.process_specs import SERVING_STATES
from splitserve.client import AsyncClient
from splitserve.roles import POOLS
from tests.support.clients.patient import PatientClient
from tests.support.clients.traffic import REPEATS
from tests.support.cluster.processes import ServiceProcess, services_of
from tests.support.cluster.real_cluster import held_resources
from tests.support.cluster.streams import eventually, tokens
from tests.support.engine.simulated_tokens import expected_tokens
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(180)

SLO = {"window_s": 2, "history_s": 5, "settle_s": 2, "trim_after_s": 600}
POOL = {
    "min_replicas": 1,
    "max_replicas": 2,
    "gpus_per_replica": 0,
    "drain_s": 10,
    "cold_start_s": 3,
    "start_deadline_cold_starts": PATIENCE_S / 3,
    "behavior": {"scaleDown": {"stabilizationWindowSeconds": 2}},
    "slo": SLO,
}
POLICY = {
    "interval_s": 0.25,
    "prefill": POOL | {"target_ms": 400},
    # Far above a light batch's step, beside a worker that starts on the same cores too.
    "decode": POOL | {"target_ms": 60},
}
ENGINE = {
    "kind": "simulated",
    "prefix_cache": False,
    "num_blocks": 4096,
    "simulated_prefill_token_s": 0.5e-3,
    "simulated_step_s": 4e-3,
    "simulated_sequence_s": 2e-3,
}


@dataclass
class Scaled:
    """A running `up --autoscale` and what its traffic came to."""

    process: ServiceProcess
    target: str
    done: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    async def serving(self, client: AsyncClient, pool: str) -> dict[str, str]:
        """The pool's workers in rotation: their names with their addresses, which each life has anew."""
        info = await client.server_info(timeout_s=PATIENCE_S)
        return {
            worker.worker_id: worker.address
            for worker in info.workers
            if worker.role == pool and worker.state in SERVING_STATES
        }

    def children(self) -> list[psutil.Process]:
        """Coordinator and workers."""
        return services_of(self.process.process.pid)

    async def until(self, holds: Callable[[Counter[str]], bool]) -> Counter[str]:
        """Waits until it holds of the serving workers; the most of each pool that were seen meanwhile."""
        most: Counter[str] = Counter()
        deadline = time.monotonic() + PATIENCE_S
        async with PatientClient(self.target) as client:
            while True:
                now = Counter[str]({pool: len(await self.serving(client, pool)) for pool in POOLS})
                most |= now
                if holds(now):
                    return most
                assert time.monotonic() < deadline, (now, self.done, self.failures[:3])
                await asyncio.sleep(0.1)

    @asynccontextmanager
    async def traffic(self, kind: str, clients: int, prompt: int, output: int) -> AsyncIterator[None]:
        """So many clients that ask again as soon as they are answered. At the end every answer is awaited."""
        stop = asyncio.Event()
        async with PatientClient(self.target) as client, asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(self._ask(client, kind, number, prompt, output, stop))
            try:
                yield
            finally:
                stop.set()

    async def _ask(
        self, client: AsyncClient, kind: str, seed: int, prompt: int, output: int, stop: asyncio.Event
    ) -> None:
        while True:
            try:
                asked = tokens(prompt, seed)
                answer = await client.generate(asked, max_tokens=output)
            except Exception as error:
                self.failures.append(f"{kind}: {error!r}")
                return
            assert list(answer.token_ids) == expected_tokens(asked, output)
            self.done[kind] += 1
            if stop.is_set():
                return
            seed += 1000

    async def grows(self, pool: str, kind: str, clients: int, prompt: int, output: int) -> None:
        """Under such traffic the pool grows, and the other one does not; then it shrinks again. What a load does it
        does again; what the machine did beside it, it does not."""
        for _ in range(REPEATS):
            async with self.traffic(kind, clients, prompt, output):
                most = await self.until(lambda now: now[pool] == 2)
            await self.until(lambda now: now["prefill"] == now["decode"] == 1)
            if sum(most.values()) == 3:
                return
        raise AssertionError(f"more than {pool} grows under {kind}: {most}")

    def lines(self) -> Iterator[tuple[psutil.Process, list[str]]]:
        """Processes with their command lines: one that is being started has none yet."""
        for child in self.children():
            with suppress(psutil.Error):  # it ends just now
                yield child, child.cmdline()

    async def child(self, name: str) -> psutil.Process:
        """The worker process of this name, once it is there."""
        found: list[psutil.Process] = []

        def look() -> bool:
            found[:] = [child for child, line in self.lines() if name in line]
            return bool(found)

        await eventually(look, f"{name} runs")
        return found[0]


def rewrite(folder: Path, policy: Mapping[str, object]) -> None:
    """The policy in force, in one step: nobody reads half of it."""
    new = folder / "policy.new"
    new.write_text(yaml.safe_dump(dict(policy)))
    new.replace(folder / "policy.yaml")


@asynccontextmanager
async def running(
    folder: Path, *options: str, policy: Mapping[str, object] = POLICY
) -> AsyncIterator[Scaled]:
    # On a busy machine forecasts are high, and no request is to be refused here.
    coordinator = {"admission": {"max_queue_s": 600.0}}
    settings = {"engine": ENGINE, "autoscale_window_s": 5.0, "coordinator": coordinator}
    for name, values in (("policy", policy), ("up", settings)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(dict(values)))
    files = ["--autoscale", str(folder / "policy.yaml"), "--config", str(folder / "up.yaml")]
    process = ServiceProcess("up", ["up", *files, *options, "--grpc-port", "0", "--http-port", "off"], folder)
    process.start()

    def target() -> str:
        lines = (line.split() for line in process.log_path.read_text().splitlines())
        return next((words[3] for words in lines if words[:3] == ["splitserve", "ready", "on"]), "")

    try:
        await eventually(lambda: target() != "", "it is ready")
        yield Scaled(process, target())
    except BaseException:
        print(process.log_tail(400))
        raise
    finally:
        assert process.terminate() == 0


@pytest.mark.slow
async def test_each_pool_follows_its_own_load(tmp_path: Path) -> None:
    async with running(tmp_path, "--prefill", "2", "--decode", "2") as up:
        # Light load throughout: every removal happens under it.
        async with up.traffic("light", 2, 16, 20):
            await up.until(lambda now: now["prefill"] == now["decode"] == 1)
            await up.grows("prefill", "long prompts", 8, 600, 2)
            await up.grows("decode", "long outputs", 40, 8, 120)
        assert not up.failures
        assert min(up.done[kind] for kind in ("light", "long prompts", "long outputs")) > 0
        await eventually(lambda: len(up.children()) == 3, "those that drained have ended")


async def test_a_killed_replica_is_replaced(tmp_path: Path) -> None:
    async with running(tmp_path) as up:
        await up.until(lambda now: now["prefill"] == now["decode"] == 1)
        victim = await up.child("decode-0")
        async with PatientClient(up.target) as client:
            before = await up.serving(client, "decode")
            os.kill(victim.pid, signal.SIGKILL)
            async with asyncio.timeout(PATIENCE_S):
                while await up.serving(client, "decode") in ({}, before):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        await up.until(lambda now: now["prefill"] == now["decode"] == 1)
        async with up.traffic("after", 1, 8, 4):
            pass
        assert up.done["after"] == 1
        assert not up.failures


@pytest.mark.slow
async def test_a_worker_that_never_comes_up_is_replaced(tmp_path: Path) -> None:
    """Its process stands still before it has registered."""
    prefill = POLICY["prefill"] | {"min_replicas": 2, "max_replicas": 3, "drain_s": 1}  # type: ignore[operator]
    policy = POLICY | {"prefill": prefill | {"start_deadline_cold_starts": 5}}
    async with running(tmp_path, "--prefill", "1", policy=policy) as up:
        hung = await up.child("prefill-1")
        hung.suspend()
        await up.until(lambda now: now["prefill"] == 2)
        await eventually(lambda: not hung.is_running(), "what hung has been ended")
        async with up.traffic("after", 1, 8, 4):
            pass
        assert not up.failures


@pytest.mark.slow
async def test_from_zero_by_the_idle_timeout_to_zero_and_from_zero_once_more(tmp_path: Path) -> None:
    zero = {"kind": "slo", "min_replicas": 0}
    policy = POLICY | {"idle_s": 1.0, "prefill": POLICY["prefill"] | zero, "decode": POLICY["decode"] | zero}  # type: ignore[operator]
    async with running(tmp_path, policy=policy) as up:

        def at_zero() -> bool:
            return len(up.children()) == 1  # the coordinator

        for _ in range(2):
            await eventually(at_zero, "its workers have ended")
            async with PatientClient(up.target) as client:
                (model,) = await client.models()
            assert model.ready, "requests for it are taken"
            async with up.traffic("from zero", 1, 40, 6):
                pass
        await eventually(at_zero, "its workers have ended")
        async with PatientClient(up.target) as client:
            assert not held_resources(await client.server_info())
        assert not up.failures
        assert up.done["from zero"] == 2


async def test_an_edited_policy_is_taken_without_a_restart_and_a_wrong_one_is_not(tmp_path: Path) -> None:
    async with running(tmp_path) as up:
        await up.until(lambda now: now["prefill"] == now["decode"] == 1)
        rewrite(tmp_path, POLICY | {"decode": POLICY["decode"] | {"min_replicas": 99}})  # type: ignore[operator]
        log = tmp_path / "up.log"
        await eventually(lambda: "decode.max_replicas" in log.read_text(), "the error is said")
        rewrite(tmp_path, POLICY | {"decode": POLICY["decode"] | {"min_replicas": 2}})  # type: ignore[operator]
        most = await up.until(lambda now: now["decode"] == 2)
        assert most["prefill"] == 1
