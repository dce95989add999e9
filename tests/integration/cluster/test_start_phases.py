"""A worker says how long its start took, by phases: their sum is the time that passed, and everybody shows it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from splitserve.client.scaling_client import ScalingClient
from splitserve.v1 import registry_pb2
from tests.support.cluster.real_cluster import Cluster, running
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(180)
TRIES = 8
"""A process that has no core while another one starts it adds to the start, and to no phase."""


async def started(setup: Cluster, name: str) -> tuple[float, registry_pb2.StartPhases]:
    """Starts a prefill worker; returns what passed until it was ready, seconds, and what the signals say."""
    began_s = time.time()
    ready = setup.add_worker("prefill", name).wait_event("worker.ready")
    took_s = datetime.fromisoformat(ready["time"]).timestamp() - began_s
    deadline_s = time.monotonic() + PATIENCE_S
    async with ScalingClient(setup.target, timeout_s=PATIENCE_S) as scaling:
        while time.monotonic() < deadline_s:
            models = (await scaling.signals()).models
            for worker in (worker for model in models for worker in model.workers):
                if worker.worker_id == name:
                    return took_s, worker.start
            await asyncio.sleep(0.05)
    raise AssertionError("the worker has not registered")


async def start_that_adds_up(setup: Cluster) -> tuple[str, registry_pb2.StartPhases]:
    """A worker whose phases are all of its start. Beside them there is only the opening of the port, and what the
    machine does meanwhile; the kernel knows a start to 0.01 s."""
    for name in (f"late-{number}" for number in range(TRIES)):
        took_s, start = await started(setup, name)
        total_s = start.process_seconds + start.weights_seconds + start.warm_up_seconds
        assert total_s <= took_s + 0.05
        if total_s >= 0.8 * took_s - 0.5:
            return name, start
    raise AssertionError(f"the phases took {total_s} s, the start {took_s} s")


async def test_phases_add_up_to_the_start(log_dir: Path) -> None:
    setup = Cluster(log_dir, fresh=True, prefill=0, decode=0)
    async with running(setup):
        name, start = await start_that_adds_up(setup)
        assert start.process_seconds > 0.1  # an interpreter, and imports
        assert start.weights_seconds == 0
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "launcher", "status", "--target", setup.target],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
        phases = f"{start.process_seconds:.1f}+0.0+{start.warm_up_seconds:.1f} s"
        assert phases in next(line for line in done.stdout.splitlines() if line.startswith(f"{name} "))
        await setup.assert_no_leaks()


async def test_phases_with_weights(log_dir: Path, short_smollm2: str) -> None:
    options = ["--dtype", "bfloat16", "--kv-memory-bytes", "20000000"]
    setup = Cluster(log_dir, model=short_smollm2, engine="torch", prefill=0, decode=0, worker_options=options)
    async with running(setup):
        _, start = await start_that_adds_up(setup)
        assert min(start.process_seconds, start.weights_seconds, start.warm_up_seconds) > 0
