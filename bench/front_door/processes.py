"""The processes of a measurement: coordinators, scripted workers, load generators; each on its own cores."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from splitserve.addresses import claim_port, join_address
from splitserve.client import AsyncClient
from splitserve.config.command_line import arguments
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.config.engine import EngineConfig
from splitserve.config.worker import WorkerConfig

HOST = "127.0.0.1"
READY_S = 30.0
END_S = 5.0
GENERATOR_GRACE_S = 120.0


@dataclass(frozen=True)
class Process:
    """A running program and its addresses."""

    pid: int
    grpc: str
    http: str = ""


@dataclass(frozen=True)
class Cores:
    """Front: the process under measurement. Rest: everything else."""

    front: Sequence[int]
    rest: Sequence[int]


def split_cores(cores: Sequence[int]) -> Cores:
    """One core for the front if there are two; else all share one."""
    return Cores(cores[:1], cores[1:] or cores)


def _put_on(pid: int, cores: Sequence[int]) -> None:
    """Keeps a process that has just begun, and so has no threads yet, on these cores.

    Not by `preexec_fn`: that forks, and gRPC's handlers for a fork then start its threads in the child, whose
    descriptors are closed under them.
    """
    with suppress(ProcessLookupError):  # who waits for it learns that it has ended
        os.sched_setaffinity(pid, cores)


@asynccontextmanager
async def program(
    command: Sequence[str],
    cores: Sequence[int],
    variables: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs a program on these cores; its stdout is piped, its log is dropped. `python -m` runs what is in `folder`."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env={**os.environ, "SPLITSERVE_LOG_LEVEL": "warning", **(variables or {})},
    )
    _put_on(process.pid, cores)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
            try:
                async with asyncio.timeout(END_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


@asynccontextmanager
async def coordinator(
    config: CoordinatorConfig, cores: Sequence[int], checkout: Path | None = None
) -> AsyncIterator[Process]:
    """A coordinator on free ports, of this version or of another one's folder."""
    ports = {"grpc_port": claim_port(HOST, 0), "http_port": claim_port(HOST, 0)}
    config = config.model_copy(update={"host": HOST, **ports})
    command = [sys.executable, "-m", "launcher", "coordinator", *arguments(config)]
    # A path that is set here would go before the folder.
    variables = None if checkout is None else {"PYTHONPATH": str(checkout)}
    async with program(command, cores, variables, checkout) as process:
        yield Process(
            process.pid, join_address(HOST, ports["grpc_port"]), join_address(HOST, ports["http_port"])
        )


@asynccontextmanager
async def scripted_workers(
    coordinators: Sequence[str],
    step_ms: float,
    tokenizer: str,
    vocabulary: int,
    cores: Sequence[int],
    pairs: int = 1,
) -> AsyncIterator[Process]:
    """Pairs of scripted workers; ready when every coordinator can serve with one of them."""
    command = [sys.executable, "-m", "bench.front_door.scripted_workers", "--step-ms", str(step_ms)]
    command += ["--tokenizer", tokenizer, "--vocabulary", str(vocabulary), "--pairs", str(pairs)]
    for address in coordinators:
        command += ["--coordinator", address]
    async with program(command, cores) as process:
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        for target in coordinators:
            async with AsyncClient(target) as client:
                await client.wait_ready(READY_S)
        yield Process(process.pid, address)


@asynccontextmanager
async def real_workers(
    coordinators: Sequence[str], step_ms: float, streams: int, cores: Cores
) -> AsyncIterator[Process]:
    """A prefill and a decode worker with simulated engines; yields the decode worker, which has the front's cores.
    Ready when every coordinator can serve with them."""
    engine = EngineConfig(
        kind="simulated",
        simulated_step_s=step_ms / 1e3,
        simulated_sequence_s=0.0,
        simulated_prefill_token_s=0.0,
        max_running_requests=2 * streams,
    )
    async with AsyncExitStack() as stack:
        pids: dict[str, int] = {}
        roles: Mapping[Literal["prefill", "decode"], Sequence[int]] = {
            "prefill": cores.rest,
            "decode": cores.front,
        }
        for role, place in roles.items():
            config = WorkerConfig(
                worker_id=role, role=role, model="simulated", coordinators=tuple(coordinators), engine=engine
            )
            command = [sys.executable, "-m", "launcher", "worker", *arguments(config)]
            pids[role] = (await stack.enter_async_context(program(command, place))).pid
        for target in coordinators:
            async with AsyncClient(target) as client:
                await client.wait_ready(READY_S)
        yield Process(pids["decode"], "")


async def generate_load(cores: Sequence[int], **options: Any) -> dict[str, Any]:
    """Runs a load generator and returns what it printed. Raises RuntimeError with its output if it fails."""
    command = [sys.executable, "-m", "bench.front_door.load"]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        command += [flag] if value is True else [flag, str(value)]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    _put_on(process.pid, cores)
    try:
        async with asyncio.timeout(GENERATOR_GRACE_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(err.decode(errors="replace")[-2000:])
    result: dict[str, Any] = json.loads(out)
    return result


@asynccontextmanager
async def front_and_workers(
    config: CoordinatorConfig, step_ms: float, model: tuple[str, int], cores: Cores, count: int = 1
) -> AsyncIterator[tuple[Sequence[Process], Process]]:
    """`count` coordinators that share the same workers."""
    async with AsyncExitStack() as stack:
        fronts = []
        for number in range(count):
            both = [*cores.front, *cores.rest]
            place = cores.front if count == 1 else [both[number % len(both)]]
            fronts.append(await stack.enter_async_context(coordinator(config, place)))
        for front in fronts:
            await answers(front.grpc)
        workers = await stack.enter_async_context(
            scripted_workers([front.grpc for front in fronts], step_ms, *model, cores.rest)
        )
        yield fronts, workers


async def answers(target: str) -> None:
    """Returns once the coordinator answers. Raises TimeoutError."""
    async with asyncio.timeout(READY_S), AsyncClient(target) as client:
        while True:
            try:
                await client.models()
                return
            except Exception:
                await asyncio.sleep(0.1)
