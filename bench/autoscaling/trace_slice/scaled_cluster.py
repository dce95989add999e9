"""`splitserve up --autoscale` under a policy that a bench changes, each worker with a share of a core."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from autoscaler.simulation.traces.trace import Trace, TraceRequest
from bench.asking import AskedAnswer, ask, random_prompt
from bench.autoscaling.from_zero import workers
from bench.core_shares import CoreShares
from launcher.cluster.process_specs import SERVING_STATES
from splitserve.client import AsyncClient
from splitserve.errors import SplitserveError

START_S, POLL_S, WATCH_S, SEED = 300.0, 0.1, 0.5, 0


@dataclass
class ScaledCluster:
    """A running cluster, its policy file, and what was seen of it."""

    client: AsyncClient
    policy: Path
    numbers: random.Random = field(default_factory=lambda: random.Random(SEED))
    most: Counter[str] = field(default_factory=Counter)
    """Most replicas that served at once, by pool."""

    def follow(self, rules: Mapping[str, Any]) -> None:
        """Writes the policy file: the autoscaler follows these rules from now on."""
        beside = self.policy.with_suffix(".next")
        beside.write_text(json.dumps(rules))
        beside.replace(self.policy)

    async def serving(self) -> Counter[str]:
        """Replicas that serve, by pool."""
        workers = (await self.client.server_info()).workers
        return Counter(worker.role for worker in workers if worker.state in SERVING_STATES)

    async def until(self, holds: Callable[[Counter[str]], bool]) -> None:
        """Waits until `holds` is true of the serving replicas. Raises TimeoutError after START_S seconds."""
        async with asyncio.timeout(START_S):
            while not holds(await self.serving()):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)  # only the coordinator knows

    async def replay(self, trace: Trace) -> list[AskedAnswer | SplitserveError]:
        """Sends every request at its time, with a prompt that no cache holds."""
        began = time.monotonic()

        async def answered(request: TraceRequest) -> AskedAnswer | SplitserveError:
            await asyncio.sleep(max(0.0, began + request.arrival_s - time.monotonic()))
            prompt = random_prompt(self.numbers, request.prompt_tokens)
            try:
                return await ask(self.client, prompt, request.output_tokens)
            except SplitserveError as error:
                return error

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answered(request)) for request in trace.requests]
        return [task.result() for task in tasks]

    async def watch(self) -> None:
        """Notes the replicas until it is cancelled."""
        while True:
            with suppress(SplitserveError):  # on a busy machine
                self.most |= await self.serving()
            await asyncio.sleep(WATCH_S)


@asynccontextmanager
async def scaled_cluster(
    model: str, max_step_tokens: int, rules: Mapping[str, Any], shares: CoreShares
) -> AsyncIterator[ScaledCluster]:
    """A cluster whose autoscaler follows `rules`, and later the rules of `ScaledCluster.follow`."""
    with tempfile.TemporaryDirectory() as scratch:
        policy = Path(scratch) / "policy.json"
        policy.write_text(json.dumps(rules))
        command = [
            sys.executable,
            "-m",
            "launcher",
            "up",
            "--model",
            model,
            "--autoscale",
            str(policy),
        ]
        command += ["--threads", "1", "--local-prefill", "never", "--no-pin-cores"]
        command += ["--max-step-tokens", str(max_step_tokens), "--grpc-port", "0", "--http-port", "off"]
        with Path(scratch, "up.log").open("w") as log:  # noqa: ASYNC230
            process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=log)
            holding = asyncio.create_task(hold_workers(psutil.Process(process.pid), shares))
            try:
                target = await ready_at(process)
                async with AsyncClient(target, timeout_s=START_S) as client:
                    yield ScaledCluster(client, policy)
            finally:
                with suppress(ProcessLookupError):
                    process.terminate()
                await process.wait()
                holding.cancel()
                await asyncio.gather(holding, return_exceptions=True)


async def ready_at(process: asyncio.subprocess.Process) -> str:
    """The coordinator's address, once all are ready."""
    assert process.stdout is not None
    async for line in process.stdout:
        if line.startswith(b"splitserve ready on "):
            return line.split()[3].decode()
    raise SystemExit("splitserve up has ended")


async def hold_workers(supervisor: psutil.Process, shares: CoreShares) -> None:
    """Gives each worker its share as soon as it is seen, until it is cancelled."""
    while True:
        for worker in workers(supervisor):
            shares.limit(worker.pid)
        await asyncio.sleep(POLL_S)
