"""A decode worker whose device hangs or breaks says so and is replaced, and its streams go on elsewhere."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from splitserve.client import AsyncClient
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.cluster.streams import Reading, tokens
from tests.support.engine.simulated_tokens import expected_tokens
from tests.support.waiting import PATIENCE_S
from worker.engine_thread import EXIT_CODE

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).resolve().parents[3]
HUNG_STEP_S = 3.0
STOPPED_S = 8.0
TOKENS = 300


@asynccontextmanager
async def supervised(
    folder: Path, hung_step_s: float
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Cluster]]:
    """A running `splitserve up` with two decode workers that fail on request, and a view of its cluster."""
    engine = {"kind": "simulated", "simulated_step_s": 0.02, "hung_step_s": hung_step_s}
    settings = json.dumps({"prefill": 1, "decode": 2, "engine": engine})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.failing_services", str(folder), "cluster", settings),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)).decode()
        assert line.startswith("splitserve ready on ")
        cluster = Cluster(folder, prefill=1, decode=2)
        cluster.target = line.split()[3]
        yield process, cluster
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), PATIENCE_S)
        assert not psutil.wait_procs(children, PATIENCE_S)[1]


@pytest.mark.parametrize(
    ("how", "code", "why", "stack"),
    [
        pytest.param("hang", EXIT_CODE, "the engine hangs in a step", "in failing", marks=pytest.mark.slow),
        ("break", 1, "the engine has ended: RuntimeError: the device is lost", "in failing"),
    ],
)
async def test_a_broken_engine_is_replaced_and_costs_its_streams_nothing(
    how: str, code: int, why: str, stack: str, log_dir: Path
) -> None:
    limit_s = HUNG_STEP_S if how == "hang" else PATIENCE_S  # where nothing hangs, nothing is to look like it
    async with supervised(log_dir, limit_s) as (up, cluster), AsyncClient(cluster.target) as client:
        readings = [Reading(client, tokens(50, n), max_tokens=TOKENS) for n in range(8)]
        for reading in readings:
            await reading.got(5)
        (log_dir / how).touch()
        told = await said(up, "exited with code")
        assert f"exited with code {code}; starting it again" in told
        assert why in told
        answers = [await reading.task for reading in readings]
        for reading in readings:
            assert reading.tokens == expected_tokens(reading.prompt, TOKENS)
        assert {1, 2} == {answer.served_by.attempts for answer in answers}
        await cluster.wait_ready()
        await cluster.assert_no_leaks()
    assert sum(stack in log for log in decode_logs(log_dir)) == 1


def decode_logs(folder: Path) -> list[str]:
    return [path.read_text() for path in folder.glob("decode-*.log")]


async def said(up: asyncio.subprocess.Process, part: str) -> str:
    """The next line of the supervisor that has this part."""
    assert up.stderr is not None
    while line := (await asyncio.wait_for(up.stderr.readline(), PATIENCE_S)).decode():
        if part in line:
            return line
    raise AssertionError(f"it never said {part!r}")


@pytest.mark.slow
async def test_a_stopped_process_has_not_hung(log_dir: Path) -> None:
    options = ["--simulated-step-s", "0.02", "--hung-step", str(HUNG_STEP_S)]
    cluster = Cluster(log_dir, worker_options=options, coordinator_options=["--heartbeat-timeout", "60"])
    async with running(cluster), AsyncClient(cluster.target) as client:
        reading = Reading(client, tokens(50, 1), max_tokens=TOKENS)
        await reading.got(5)
        decode = cluster.members["decode-0"]
        decode.signal(signal.SIGSTOP)
        await asyncio.sleep(STOPPED_S)  # what is tested: a pause much longer than a step may take
        decode.signal(signal.SIGCONT)
        await reading.task
        assert reading.tokens == expected_tokens(reading.prompt, TOKENS)
        assert decode.process.poll() is None
        assert not [entry for entry in decode.events() if entry["event"] == "engine.hung"]
        await cluster.assert_no_leaks()
