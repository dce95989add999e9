"""Cold starts by phases: `python -m bench.coldstart [--rounds N] [--engine ENGINE] [--before TREE] [--json]`.

Starts `splitserve up`, and one prefill worker alone, N times each, in turns. Times are from the command until the ready
line, of the worker until its event `worker.ready`. The phases are what workers report of themselves; `rest` is the
command's own start, registration and connecting. CPU time is that of all processes until then: on a busy machine it
says more than the time that passed. With `--before` each turn also starts another checkout. Before the turns each
checkout is started once, so that its modules are compiled; PYTHONDONTWRITEBYTECODE is not passed on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any

import psutil

from bench.machine import core_speed_mb_per_s, report, this_machine
from bench.option_values import positive_whole
from splitserve.addresses import claim_port
from splitserve.cli.output import write
from splitserve.client import AsyncClient

HOST = "127.0.0.1"
READY_S = 300.0
END_S = 30.0
PHASES = ("process", "weights", "warm_up")


@dataclass(frozen=True)
class TimedStart:
    """One start, in seconds. Phases are those of its slowest worker; zero where the checkout reports none."""

    process: float
    weights: float
    warm_up: float
    rest: float
    total: float
    cpu: float


def start_of(starts: Sequence[Mapping[str, Any]], total_s: float, cpu_s: float) -> TimedStart:
    """The figures of a start of which workers reported this, phases among other things."""
    phases = [{phase: float(one.get(phase, 0.0)) for phase in PHASES} for one in starts]
    parts = max(phases, key=lambda one: sum(one.values()), default=dict.fromkeys(PHASES, 0.0))
    return TimedStart(**parts, rest=total_s - sum(parts.values()), total=total_s, cpu=cpu_s)


def medians(starts: Sequence[TimedStart]) -> TimedStart:
    """Each figure's median."""
    return TimedStart(**{name: median(asdict(one)[name] for one in starts) for name in asdict(starts[0])})


def cluster_start(tree: Path, options: Sequence[str]) -> TimedStart:
    """Starts a cluster, reads what its workers say, and ends it."""
    port = claim_port(HOST, 0)
    arguments = ["up", "--grpc-port", str(port), "--http-port", "off", *options]
    began_s = time.monotonic()
    with running(tree, arguments) as process:
        _wait(process.stdout, "splitserve ready on", process)
        total_s, cpu_s = time.monotonic() - began_s, _cpu_s(process)
        phases = asyncio.run(_reported(f"{HOST}:{port}"))
    return start_of(phases, total_s, cpu_s)


def worker_start(tree: Path, options: Sequence[str]) -> TimedStart:
    """Starts a worker for which there is no coordinator, until its engine is ready."""
    arguments = [
        "prefill-worker",
        "--coordinator",
        f"{HOST}:{claim_port(HOST, 0)}",
        "--port",
        "0",
        "--threads",
        "1",
        *options,
    ]
    began_s = time.monotonic()
    with running(tree, arguments) as process:
        event = json.loads(_wait(process.stdout, '"worker.ready"', process))
        total_s, cpu_s = time.monotonic() - began_s, _cpu_s(process)
    return start_of([event["start"]] if "start" in event else [], total_s, cpu_s)


class running:
    """A command of a checkout, in a session of its own, which ends with the context."""

    def __init__(self, tree: Path, arguments: Sequence[str]) -> None:
        self._tree, self._arguments = tree, arguments

    def __enter__(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "splitserve", *self._arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self._tree,
            env=_environment(self._tree),
            start_new_session=True,
        )
        return self._process

    def __exit__(self, *_error: object) -> None:
        process = self._process
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _environment(tree: Path) -> dict[str, str]:
    # Images often set it. Modules that are compiled in each start anew take as long as all the rest.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPATH": str(tree)}


def _wait(output: IO[str] | None, wanted: str, process: subprocess.Popen[str]) -> str:
    assert output is not None
    seen, deadline_s = [], time.monotonic() + READY_S
    for line in output:
        if wanted in line:
            return line
        seen.append(line)
        if time.monotonic() > deadline_s:
            break
    raise RuntimeError(f"not ready, exit code {process.poll()}:\n{''.join(seen[-30:])}")


def _cpu_s(process: subprocess.Popen[str]) -> float:
    """CPU time of a command and everything that it started, those included that have ended and were waited for."""
    root, used_s = psutil.Process(process.pid), 0.0
    for one in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            used_s += sum(one.cpu_times()[:4])
    return used_s


async def _reported(target: str) -> list[dict[str, float]]:
    async with AsyncClient(target) as client:
        workers = (await client.server_info()).workers
    return [
        {phase: getattr(worker.start, f"{phase}_seconds") for phase in PHASES}
        for worker in workers
        if worker.HasField("start")
    ]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    summary = __doc__.partition("\n\n")[2] if __doc__ else None
    parser = argparse.ArgumentParser(prog="python -m bench.coldstart", description=summary)
    parser.add_argument("--rounds", type=positive_whole, default=5, help="starts of each kind")
    parser.add_argument("--before", type=Path, help="another checkout to start in turns with this one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--engine", choices=("torch", "simulated"), default="torch")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    args = parse(arguments)
    machine, speed = this_machine(), core_speed_mb_per_s()
    here = Path(__file__).resolve().parents[2]
    trees = {"here": here} if args.before is None else {"before": args.before.resolve(), "here": here}
    options = ["--engine", args.engine, "--model", args.model]
    found: dict[str, list[TimedStart]] = {}
    for tree in trees.values():
        cluster_start(tree, options)
    for _ in range(args.rounds):
        for name, tree in trees.items():
            found.setdefault(f"one worker, {name}", []).append(worker_start(tree, options))
            found.setdefault(f"up, {name}", []).append(cluster_start(tree, options))
    middle = {name: medians(starts) for name, starts in sorted(found.items())}
    if args.json:
        command = shlex.join(["python", "-m", "bench.coldstart", *sys.argv[1:]])
        content: dict[str, Any] = {
            "core_speed_mb_per_s": speed,
            "medians": {name: asdict(one) for name, one in middle.items()},
            "starts": {name: [asdict(one) for one in starts] for name, starts in found.items()},
        }
        print(json.dumps(report("coldstart", command, machine, **content)))
        return 0
    columns = [*PHASES, "rest", "total", "cpu"]
    write(f"{'seconds, medians':24}" + "".join(f"{column:>9}" for column in columns) + "\n")
    for name, one in middle.items():
        write(f"{name:24}" + "".join(f"{asdict(one)[column]:9.2f}" for column in columns) + "\n")
    return 0
