"""Records a mix of traffic on real processes, asks the advisor, measures every candidate with the same traffic.

`python -m bench.advisor --json`. The regret is the best measured attainment less that of the advised candidate. The
recorded cluster is the split in the middle of the budget, whatever the mix. Attainment is measured at the client.
Adaptive candidates are not measured: a run is shorter than a worker's start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from autoscaler.advisor.candidates import ClusterShape
from autoscaler.simulation.outcome import Slo
from autoscaler.simulation.traces.trace import Trace, TraceRequest
from bench.advisor.mixes import MIXES, REAL_MIXES, SIMULATED, TrafficMix
from bench.asking import AskedAnswer, ask, random_prompt
from bench.cluster import running_cluster
from bench.machine import OtherLoad, report, this_machine
from bench.option_values import positive_number, positive_whole, whole_number
from splitserve.client import AsyncClient
from splitserve.config.cluster import ClusterConfig
from splitserve.config.coordinator import AdmissionConfig, CoordinatorConfig
from splitserve.config.engine import EngineConfig
from splitserve.errors import SplitserveError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

FRONT = "front"
BAR = 0.05
RECORD_MARGIN_S = 3.0
VOCABULARY = 257
"""Of the simulated engine; prompts of it serve for real weights too."""


@asynccontextmanager
async def served(shape: ClusterShape, options: argparse.Namespace) -> AsyncIterator[AsyncClient]:
    """A cluster of this shape, warmed up."""
    colocated = shape.kind == "colocated"
    front = CoordinatorConfig(
        hybrid="off",
        local_prefill="always" if colocated else "never",
        admission=AdmissionConfig(mode="off" if colocated else "queue"),
    )
    config = ClusterConfig(
        model=options.model,
        prefill=max(1, shape.prefill),
        decode=shape.decode,
        pin_cores=False,
        engine=SIMULATED if options.model == "simulated" else EngineConfig(),
    )
    async with running_cluster(config, {FRONT: front}, lambda _event: None) as fronts:
        client = fronts.clients[FRONT]
        numbers = random.Random(-1)
        for _ in range(4 * shape.workers):
            await ask(client, random_prompt(numbers, 40, VOCABULARY), 4)
        yield client


async def replayed(client: AsyncClient, trace: Trace) -> list[AskedAnswer | None]:
    """Sends every request at its time. None for one that failed."""
    began, numbers = time.monotonic(), random.Random(0)
    prompts = [random_prompt(numbers, one.prompt_tokens, VOCABULARY) for one in trace.requests]

    async def one(request: TraceRequest, prompt: list[int]) -> AskedAnswer | None:
        await asyncio.sleep(max(0.0, began + request.arrival_s - time.monotonic()))
        try:
            return await ask(client, prompt, request.output_tokens)
        except SplitserveError:
            return None

    async with asyncio.TaskGroup() as group:
        pairs = zip(trace.requests, prompts, strict=True)
        tasks = [group.create_task(one(request, prompt)) for request, prompt in pairs]
    return [task.result() for task in tasks]


def attainment(answers: list[AskedAnswer | None], slo: Slo) -> float:
    """Share of the requests within both targets, as their clients saw them."""
    met = [
        answer is not None
        and answer.token_s[0] <= slo.ttft_s
        and (len(answer.token_s) < 2 or answer.tpot_s <= slo.tpot_s)
        for answer in answers
    ]
    return sum(met) / len(met)


async def program(*arguments: str) -> str:
    """The output of a `splitserve` command. Raises RuntimeError with its last words if it fails."""
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "splitserve", *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"splitserve {arguments[0]}: {err.decode()[-500:]}")
    return out.decode()


async def recorded(client: AsyncClient, trace: Trace, folder: str) -> Path:
    """A recording of a trace that is replayed meanwhile, in a file of that folder."""
    file = Path(folder) / "traffic.jsonl"
    seconds = trace.duration_s + RECORD_MARGIN_S
    wanted = ("record", "--target", client.target, "--seconds", f"{seconds:g}", "--out", str(file))
    recording = asyncio.create_task(program(*wanted))
    while not file.exists():  # noqa: ASYNC110 - the recording begins at once then
        await asyncio.sleep(0.05)
    await asyncio.sleep(RECORD_MARGIN_S / 3)
    await replayed(client, trace)
    await recording
    return file


async def measured(name: str, mix: TrafficMix, options: argparse.Namespace, tell: Console) -> dict[str, Any]:
    """One mix: recorded, advised on, measured."""
    budget = options.budget
    middle = ClusterShape("split", budget // 2, budget - budget // 2)
    load = OtherLoad()
    with tempfile.TemporaryDirectory() as scratch:
        async with served(middle, options) as client:
            file = await recorded(client, mix.trace(name, options.seconds, options.seed), scratch)
        targets = ("--ttft-ms", f"{mix.slo.ttft_s * 1e3:g}", "--tpot-ms", f"{mix.slo.tpot_s * 1e3:g}")
        wanted = ("--budget", str(budget), "--all-workers", "--json")
        advice = json.loads(await program("advise", "--trace", str(file), *targets, *wanted))
    rows = []
    for found in advice["candidates"]:
        if found["candidate"]["kind"] == "adaptive":
            continue
        shape = ClusterShape(**found["candidate"])
        load.mark()
        async with served(shape, options) as client:
            answers = await replayed(client, mix.trace(name, options.seconds, options.seed))
        share = attainment(answers, mix.slo)
        row = {
            "candidate": shape.name,
            "predicted": round(found["attainment"], 4),
            "measured": round(share, 4),
            "failed": sum(answer is None for answer in answers),
            "other_load": round(load.share(), 3),
        }
        tell.print(name, row)
        rows.append(row)
    regret = max(row["measured"] for row in rows) - rows[0]["measured"]
    return {
        "mix": name,
        "requests": len(answers),
        "advised": advice["best"]["name"],
        "advised_of_measured": rows[0]["candidate"],
        "regret": round(regret, 4),
        "within_bar": regret <= BAR,
        "rows": rows,
        "engine": advice["engine"],
        "notes": advice["notes"],
    }


async def run(options: argparse.Namespace, tell: Console) -> list[dict[str, Any]]:
    """All mixes."""
    mixes = MIXES if options.model == "simulated" else REAL_MIXES
    names = options.mix or list(mixes)
    return [await measured(name, mixes[name], options, tell) for name in names]


def main() -> int:
    """Progress goes to stderr, results to stdout. Exit code 1 if a choice is not within the bar."""
    parser = argparse.ArgumentParser(prog="python -m bench.advisor", description=__doc__.partition("\n")[0])
    parser.add_argument("--mix", action="append", choices=list(MIXES), help="only this one; repeatable")
    parser.add_argument("--model", default="simulated", help="simulated, or a model with weights")
    parser.add_argument("--budget", type=positive_whole, default=4, help="workers of both pools together")
    parser.add_argument("--seconds", type=positive_number, default=40.0, help="length of each run")
    parser.add_argument("--seed", type=whole_number, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object to stdout")
    options = parser.parse_args()
    machine, tell = this_machine(), Console(stderr=True)
    try:
        rows = asyncio.run(run(options, tell))
    except (SplitserveError, RuntimeError) as error:
        tell.print(f"error: {error}")
        return 1
    command = shlex.join(["python", "-m", "bench.advisor", *sys.argv[1:]])
    if options.json:
        print(json.dumps(report("advisor", command, machine, rows=rows), indent=2))
    else:
        for row in rows:
            print(f"{row['mix']}: {row['advised_of_measured']} advised, regret {row['regret']:.1%}")
    return 0 if all(row["within_bar"] for row in rows) else 1
