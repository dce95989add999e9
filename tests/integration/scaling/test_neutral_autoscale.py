"""`splitserve up --workers N --autoscale`, SmolLM2: a third neutral worker is started, and one is killed under load."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import yaml

from splitserve.client import Completion
from splitserve.cluster.process_specs import SERVING_STATES
from splitserve.errors import SplitserveError
from tests.support.clients.patient import PatientClient
from tests.support.cluster.real_cluster import held_resources
from tests.support.waiting import PATIENCE_S

POOL = {"kind": "schedule", "gpus_per_replica": 0, "drain_s": 20, "max_replicas": 2}
POLICY = {
    "workers": "neutral",
    "interval_s": 0.25,
    "prefill": POOL | {"min_replicas": 1},
    "decode": POOL | {"min_replicas": 2},
}
START_S = 150.0
PROMPT = "The quick brown fox jumps over the lazy dog. " * 3
MAX_TOKENS = 48

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@contextmanager
def scaled(folder: Path, policy: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Two neutral workers at first; the coordinator's address and the supervisor."""
    command = [sys.executable, "-m", "splitserve", "up", "--workers", "2", "--autoscale", str(policy)]
    command += ["--dtype", "float32", "--threads", "1", "--num-blocks", "256", "--grpc-port", "0"]
    log = (folder / "up.log").open("w")
    process = subprocess.Popen(
        [*command, "--http-port", "off"], stdout=subprocess.PIPE, stderr=log, text=True
    )
    try:
        assert process.stdout is not None
        ready = next(line for line in process.stdout if line.startswith("splitserve ready on "))
        assert "2 neutral workers" in ready
        yield ready.split()[3], psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_S)
        log.close()


def pid_of(supervisor: psutil.Process, worker: str) -> int:
    """The process of a worker."""
    for child in supervisor.children(recursive=True):
        with suppress(psutil.Error):  # another one ends just now
            if f"--worker-id {worker} " in f"{' '.join(child.cmdline())} ":
                return child.pid
    raise AssertionError(f"{worker} does not run")


async def until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + START_S
    while not await holds():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.1)


async def test_a_third_is_started_and_the_death_of_one_hangs_nobody(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(yaml.safe_dump(POLICY))
    with scaled(tmp_path, policy) as (target, supervisor):
        async with PatientClient(target) as client:

            async def sides() -> dict[str, str]:
                info = await client.server_info()
                serving = [worker for worker in info.workers if worker.state in SERVING_STATES]
                assert all(worker.neutral for worker in serving)
                return {worker.worker_id: worker.pool for worker in serving}

            async def one_and_two() -> bool:
                return sorted((await sides()).values()) == ["decode", "decode", "prefill"]

            async def nothing_held() -> bool:
                return not held_resources(await client.server_info())

            async def answer() -> list[int]:
                told = await client.generate(
                    PROMPT, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, timeout_s=PATIENCE_S
                )
                return list(told.token_ids)

            await until(one_and_two, "the policy's numbers")
            assert set(await sides()) == {"worker-0", "worker-1", "worker-2"}
            expected = await answer()
            (prefill,) = [name for name, pool in (await sides()).items() if pool == "prefill"]
            victim = pid_of(supervisor, prefill)
            streams = asyncio.Event()

            async def read() -> list[int]:
                async for item in client.stream(
                    PROMPT, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, timeout_s=PATIENCE_S
                ):
                    if isinstance(item, Completion):
                        return list(item.token_ids)
                    streams.set()
                raise AssertionError("the stream ended without its last message")

            running = [asyncio.create_task(read()) for _ in range(6)]
            async with asyncio.timeout(PATIENCE_S):
                await streams.wait()  # and others are still computed
            assert not all(task.done() for task in running)
            os.kill(victim, signal.SIGKILL)
            async with asyncio.timeout(2 * PATIENCE_S):
                ended = await asyncio.gather(*running, return_exceptions=True)
            for one in ended:
                assert one == expected or isinstance(one, SplitserveError), one
            assert await answer() == expected, "the others serve, or the one that was started again"
            await until(nothing_held, "nothing is leaked")
