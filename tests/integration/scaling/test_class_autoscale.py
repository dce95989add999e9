"""`splitserve up --autoscale` with two classes of replicas, SmolLM2 on one thread and on two.

When more is wanted than one slow prefill replica, a fast one is cheaper than two slow ones and takes its place, with
requests under way: none fails, and all answers are the same.
"""

from __future__ import annotations

import asyncio
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

from splitserve.cluster.process_specs import SERVING_STATES
from tests.support.clients.patient import PatientClient
from tests.support.cluster.real_cluster import held_resources
from tests.support.waiting import PATIENCE_S

CLASSES = [
    {"name": "slow", "price_per_hour": 1.0, "worker_options": ["--threads", "1"]},
    {"name": "fast", "price_per_hour": 1.5, "speed": 2, "worker_options": ["--threads", "2"]},
]
POOL = {
    "kind": "schedule",
    "gpus_per_replica": 0,
    "drain_s": 20,
    "cold_start_s": 5,
    "start_deadline_cold_starts": 50,
}
START_S = 240.0
"""A busy machine loads weights for minutes."""
PROMPT = "The quick brown fox jumps over the lazy dog. " * 3

pytestmark = [pytest.mark.timeout(600)]


def policy(least: int) -> str:
    prefill = POOL | {"classes": CLASSES, "min_replicas": least, "max_replicas": 2, "payback_s": 3600}
    decode = POOL | {"classes": [CLASSES[0]], "min_replicas": 1, "max_replicas": 1}
    return yaml.safe_dump(
        {
            "interval_s": 0.25,
            "budget_per_hour": 3.5,
            "lend_decode": False,
            "prefill": prefill,
            "decode": decode,
        }
    )


@contextmanager
def scaled(folder: Path, rules: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The coordinator's address and the supervisor."""
    command = [sys.executable, "-m", "splitserve", "up", "--autoscale", str(rules), "--dtype", "float32"]
    command += ["--num-blocks", "256", "--grpc-port", "0", "--http-port", "off", "--no-pin-cores"]
    with (folder / "up.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert process.stdout is not None
            ready = next(line for line in process.stdout if line.startswith("splitserve ready on "))
            yield ready.split()[3], psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_S)


async def until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + START_S
    while not await holds():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.1)


def options_of(supervisor: psutil.Process, worker: str) -> list[str]:
    """The command line of a worker."""
    for child in supervisor.children(recursive=True):
        with suppress(psutil.Error):  # another one ends just now
            if worker in (line := child.cmdline()):
                return line
    raise AssertionError(f"{worker} does not run")


@pytest.mark.slow
async def test_a_fast_replica_takes_the_place_of_a_slow_one(tmp_path: Path) -> None:
    rules = tmp_path / "policy.yaml"
    rules.write_text(policy(1))
    with scaled(tmp_path, rules) as (target, supervisor):
        async with PatientClient(target) as client:
            stop, answers = asyncio.Event(), []

            async def serving() -> set[str]:
                workers = (await client.server_info()).workers
                return {w.worker_id for w in workers if w.pool == "prefill" and w.state in SERVING_STATES}

            async def ask() -> None:
                while not stop.is_set():
                    await asyncio.sleep(0.2)  # other processes load weights meanwhile
                    answers.append(
                        await client.generate(
                            PROMPT, temperature=0.0, max_tokens=8, ignore_eos=True, timeout_s=PATIENCE_S
                        )
                    )

            async def only_fast() -> bool:
                return await serving() == {"prefill-1"}

            async def nothing_held() -> bool:
                return not held_resources(await client.server_info())

            assert await serving() == {"prefill-0"}
            assert "slow" in options_of(supervisor, "prefill-0")
            asking = asyncio.create_task(ask())
            try:
                rules.write_text(policy(2))
                await until(only_fast, "the fast one alone")
            finally:
                stop.set()
            await asking
            command = options_of(supervisor, "prefill-1")
            assert command[-4:] == ["--replica-class", "fast", "--threads", "2"]
            answers.append(await client.generate(PROMPT, temperature=0.0, max_tokens=8, ignore_eos=True))
            assert {answer.served_by.prefill_worker for answer in answers} == {"prefill-0", "prefill-1"}
            assert len({tuple(answer.token_ids) for answer in answers}) == 1
            await until(nothing_held, "nothing is leaked")
