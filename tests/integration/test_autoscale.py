"""`splitserve up --autoscale` under traffic: each pool follows its own load, and no request ever fails."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from splitserve.client import AsyncClient
from splitserve.cluster_setup import SERVING_STATES
from tests.support.streams import eventually, tokens

START_S = 30.0
SCALE_S = 30.0
STOP_S = 30.0

pytestmark = pytest.mark.timeout(180)

SLO = {
    "slow_window_s": 2,
    "fast_window_s": 1,
    "history_s": 5,
    "fade_s": 5,
    "drain_backlog_s": 2,
    "settle_s": 2,
    "trim_after_s": 600,
}
POOL = {
    "min_replicas": 1,
    "max_replicas": 2,
    "gpus_per_replica": 0,
    "drain_s": 10,
    "cold_start_s": 3,
    "behavior": {"scaleDown": {"stabilizationWindowSeconds": 2}},
    "slo": SLO,
}
POLICY = {
    "interval_s": 0.25,
    "lend_decode": False,
    "prefill": POOL | {"target_ms": 400},
    "decode": POOL | {"target_ms": 40},
}
ENGINE = {
    "kind": "simulated",
    "prefix_cache": False,
    "num_blocks": 4096,
    "simulated_prefill_token_s": 0.5e-3,
    "simulated_step_s": 4e-3,
    "simulated_sequence_s": 2e-3,
}


class Scaled:
    """A running `up --autoscale` and what its traffic came to."""

    def __init__(self, process: asyncio.subprocess.Process, target: str) -> None:
        self.process = process
        self.target = target
        self.done: Counter[str] = Counter()
        self.failures: list[str] = []

    async def ready(self, client: AsyncClient) -> Counter[str]:
        """Workers that serve, by pool."""
        info = await client.server_info()
        return Counter(worker.pool for worker in info.workers if worker.state in SERVING_STATES)

    async def until(self, holds: Callable[[Counter[str]], bool]) -> Counter[str]:
        """Waits until it holds of the serving workers; the most of each pool that were seen meanwhile."""
        most: Counter[str] = Counter()
        deadline = time.monotonic() + SCALE_S
        async with AsyncClient(self.target) as client:
            while True:
                now = await self.ready(client)
                most |= now
                if holds(now):
                    return most
                assert time.monotonic() < deadline, (now, self.done, self.failures[:3])
                await asyncio.sleep(0.1)

    @asynccontextmanager
    async def traffic(self, kind: str, clients: int, prompt: int, output: int) -> AsyncIterator[None]:
        """So many clients that ask again as soon as they are answered. At the end every answer is awaited."""
        stop = asyncio.Event()
        async with AsyncClient(self.target) as client, asyncio.TaskGroup() as group:
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
                answer = await client.generate(tokens(prompt, seed), max_tokens=output)
            except Exception as error:
                self.failures.append(f"{kind}: {error!r}")
                return
            assert len(answer.token_ids) == output
            self.done[kind] += 1
            if stop.is_set():
                return
            seed += 1000

    def children(self) -> list[psutil.Process]:
        """Coordinator and workers."""
        return psutil.Process(self.process.pid).children()

    def child(self, name: str) -> psutil.Process:
        """The worker process of this name."""
        return next(child for child in self.children() if name in child.cmdline())


@asynccontextmanager
async def running(folder: Path, *options: str) -> AsyncIterator[Scaled]:
    policy, settings = folder / "policy.yaml", folder / "up.yaml"
    policy.write_text(yaml.safe_dump(POLICY))
    settings.write_text(yaml.safe_dump({"engine": ENGINE, "autoscale_window_s": 5.0}))
    command = [
        sys.executable,
        "-m",
        "splitserve",
        "up",
        "--autoscale",
        str(policy),
        "--config",
        str(settings),
    ]
    with (folder / "up.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            *options,
            "--grpc-port",
            "0",
            "--http-port",
            "off",
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
        try:
            assert process.stdout is not None
            line = await asyncio.wait_for(process.stdout.readline(), START_S)
            assert line.startswith(b"splitserve ready on "), (folder / "up.log").read_text()
            yield Scaled(process, line.decode().split()[3])
        except BaseException:
            print((folder / "up.log").read_text()[-20000:])
            raise
        finally:
            process.send_signal(signal.SIGINT)
            await asyncio.wait_for(process.wait(), STOP_S)


async def test_each_pool_follows_its_own_load(tmp_path: Path) -> None:
    async with running(tmp_path, "--prefill", "2", "--decode", "2") as up:
        # Light load throughout: every removal happens under it.
        async with up.traffic("light", 2, 16, 20):
            await up.until(lambda now: now["prefill"] == now["decode"] == 1)
            async with up.traffic("long prompts", 12, 600, 2):
                most = await up.until(lambda now: now["prefill"] == 2)
            assert most["decode"] == 1
            await up.until(lambda now: now["prefill"] == 1)
            async with up.traffic("long outputs", 40, 8, 120):
                most = await up.until(lambda now: now["decode"] == 2)
            assert most["prefill"] == 1
            await up.until(lambda now: now["decode"] == 1)
        assert not up.failures
        assert min(up.done[kind] for kind in ("light", "long prompts", "long outputs")) > 0
        await eventually(lambda: len(up.children()) == 3, "those that drained have ended")


async def test_a_killed_replica_is_replaced(tmp_path: Path) -> None:
    async with running(tmp_path) as up:
        await up.until(lambda now: now["prefill"] == now["decode"] == 1)
        victim = up.child("decode-0")
        os.kill(victim.pid, signal.SIGKILL)
        await up.until(lambda now: now["decode"] == 0)
        await up.until(lambda now: now["prefill"] == now["decode"] == 1)
        async with up.traffic("after", 1, 8, 4):
            pass
        assert up.done["after"] == 1
        assert not up.failures
