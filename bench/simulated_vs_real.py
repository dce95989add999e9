"""The simulator beside the real thing: `python -m bench.simulated_vs_real --trace FILE`.

Starts one prefill and one decode worker with real weights, measures what a prompt and a decode step take there, and
makes an `EngineModel` of it. Then it plays the same slice of a trace twice: against the workers, and in
`splitserve simulate`'s simulator with that model. Arrivals are stretched to `--utilization` of the prefill worker, and
lengths cut to `--max-prompt` and `--max-output`, so that a slice takes minutes; both play the very same requests.

Prompts are random tokens, so that no cache hits. Real TTFT and TPOT are taken at the client, on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console

from autoscaler.plan import Memory, Plan, PoolPlan
from autoscaler.simulation.engine_model import EngineModel
from autoscaler.simulation.simulator import Scenario, Simulation
from autoscaler.simulation.trace import Trace, TraceRequest
from autoscaler.simulation.trace_files import load_trace
from autoscaler.snapshot import Snapshot
from bench.cluster import running_cluster
from bench.machine import report, this_machine
from splitserve.client import AsyncClient, Delta
from splitserve.config import ClusterConfig, CoordinatorConfig
from splitserve.errors import SplitserveError

FRONT = "split"
PROMPTS = (16, 128, 256, 512, 768, 1024, 1536, 2000)
BATCHES = ((1, 64), (1, 1024), (4, 64), (4, 512), (8, 64), (8, 256))
"""(sequences, prompt tokens of each) whose decode steps are measured."""
REPEATS = 3
STEADY_TOKENS = 32
LONG_TOKENS = 4000
STEP_TOKENS = 512
KV_BYTES_PER_TOKEN = 23_040
LOWEST_TOKEN, HIGHEST_TOKEN = 1000, 40_000
PERCENTILES = (50, 95)
SEED = 0


@dataclass(frozen=True)
class Answered:
    """One answer. Seconds since it was asked for; `compute_s` is the worker's word."""

    token_s: tuple[float, ...]
    compute_s: float

    @property
    def tpot_s(self) -> float:
        """Mean time between its tokens."""
        return (self.token_s[-1] - self.token_s[0]) / (len(self.token_s) - 1)


class Asker:
    """Asks with prompts that no cache knows."""

    def __init__(self, client: AsyncClient) -> None:
        self._client, self._random = client, random.Random(SEED)

    async def ask(self, prompt_tokens: int, output_tokens: int) -> Answered:
        """One greedy answer of exactly so many tokens."""
        prompt = [self._random.randint(LOWEST_TOKEN, HIGHEST_TOKEN) for _ in range(prompt_tokens)]
        began, token_s, compute_s = time.monotonic(), list[float](), 0.0
        stream = self._client.stream(prompt, max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        async with aclosing(stream) as items:
            async for item in items:
                if isinstance(item, Delta):
                    token_s += [time.monotonic() - began] * len(item.token_ids)
                else:
                    compute_s = item.timings.prefill_ms / 1e3
        return Answered(tuple(token_s), compute_s)


async def calibrated(asker: Asker) -> EngineModel:
    """The workers as an engine model: least squares over decode steps, then over prompts."""
    rows, steps = [], []
    for sequences, prompt in BATCHES:
        output = STEADY_TOKENS + 16 * sequences
        answers = await asyncio.gather(*(asker.ask(prompt, output) for _ in range(sequences)))
        # Prompts come one after the other; while all decode, the last one's last tokens are a step apart.
        last = max(answers, key=lambda answer: answer.token_s[0])
        tail = last.token_s[1 : STEADY_TOKENS // 2]
        steps.append(float(np.diff(tail).mean()))
        rows.append((1.0, sequences, sequences * (prompt + output / 2)))
    base_s, sequence_s, context_s = _fit(rows, steps)
    prompts = []
    async with beside(asker):
        for length in PROMPTS:
            answers = [await asker.ask(length, 2) for _ in range(REPEATS)]
            prompts.append(median(answer.compute_s for answer in answers))
    chunks = [-(-length // STEP_TOKENS) for length in PROMPTS]
    rest = [seconds - count * base_s for seconds, count in zip(prompts, chunks, strict=True)]
    token_s, token2_s = _fit([(length, length * length) for length in PROMPTS], rest)
    return EngineModel(
        prefill_token_s=token_s,
        prefill_token2_s=token2_s,
        step_s=base_s,
        sequence_s=sequence_s,
        context_token_s=context_s,
        max_step_tokens=STEP_TOKENS,
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
    )


@asynccontextmanager
async def beside(asker: Asker) -> AsyncIterator[None]:
    """Meanwhile the decode worker has work: where the two share memory and cores, prompts take longer then."""
    tasks = [asyncio.create_task(asker.ask(64, LONG_TOKENS)) for _ in range(2)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _fit(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Least squares of relative errors, no coefficient below zero."""
    weights = 1 / np.asarray(values)
    left = list(range(len(rows[0])))
    while True:
        matrix = np.asarray(rows, dtype=float)[:, left] * weights[:, None]
        found = np.linalg.lstsq(matrix, np.ones(len(values)), rcond=None)[0]
        if (found >= 0).all():
            break
        left = [column for column, value in zip(left, found, strict=True) if value >= 0]
    return [float(found[left.index(c)]) if c in left else 0.0 for c in range(len(rows[0]))]


def slice_of(trace: Trace, engine: EngineModel, options: argparse.Namespace) -> Trace:
    """The trace's first requests, cut, and stretched to the utilization of one prefill worker."""
    cut = [
        (
            r.arrival_s,
            min(r.prompt_tokens, options.max_prompt),
            max(2, min(r.output_tokens, options.max_output)),
        )
        for r in trace.requests[: options.requests]
    ]
    work_s = sum(engine.prompt_s(prompt) for _, prompt, _ in cut)
    stretch = work_s / options.utilization / max(cut[-1][0], 1e-9)
    return Trace(f"{trace.name}, slice", [TraceRequest(at * stretch, *sizes) for at, *sizes in cut])


async def play(asker: Asker, trace: Trace) -> list[Answered]:
    """Every request at its time, against the workers."""
    began = time.monotonic()

    async def one(request: TraceRequest) -> Answered:
        await asyncio.sleep(max(0.0, began + request.arrival_s - time.monotonic()))
        return await asker.ask(request.prompt_tokens, request.output_tokens)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(request)) for request in trace.requests]
    return [task.result() for task in tasks]


def simulate(trace: Trace, engine: EngineModel) -> tuple[list[float], list[float]]:
    """TTFT and TPOT of every request in the simulator, one replica in each pool."""
    scenario = Scenario(trace, engine=engine, initial={"prefill": 1, "decode": 1}, prefix_cache="off")

    def decide(memory: Memory, _snapshot: Snapshot) -> tuple[Plan, Memory]:
        return Plan(PoolPlan(1), PoolPlan(1)), memory

    jobs = Simulation(scenario, decide).run().jobs
    return [job.ttft_s or 0.0 for job in jobs], [job.tpot_s or 0.0 for job in jobs]


def compared(real: Sequence[float], simulated: Sequence[float]) -> dict[str, dict[str, float]]:
    """Percentiles of both in milliseconds, and how far the simulator is off."""
    found = {}
    for percent in PERCENTILES:
        was, said = float(np.percentile(real, percent)), float(np.percentile(simulated, percent))
        found[f"p{percent}"] = {
            "real_ms": round(was * 1e3, 2),
            "simulated_ms": round(said * 1e3, 2),
            "error": round(said / was - 1, 4),
        }
    return found


async def run(options: argparse.Namespace, tell: Console) -> dict[str, Any]:
    """Calibrates, plays, simulates, compares."""
    trace = load_trace(options.trace)
    config = ClusterConfig(model=options.model)
    coordinators = {FRONT: CoordinatorConfig(local_prefill="never")}
    async with running_cluster(config, coordinators, lambda _event: None) as fronts:
        asker = Asker(fronts.clients[FRONT])
        await asker.ask(64, 8)
        engine = await calibrated(asker)
        tell.print(engine)
        played = slice_of(trace, engine, options)
        tell.print(f"{len(played.requests)} requests in {played.duration_s:.0f} s")
        real = await play(asker, played)
    ttft_s, tpot_s = simulate(played, engine)
    return {
        "requests": len(played.requests),
        "duration_s": round(played.duration_s, 1),
        "ttft": compared([answer.token_s[0] for answer in real], ttft_s),
        "tpot": compared([answer.tpot_s for answer in real], tpot_s),
    }


def main() -> int:
    """Progress goes to stderr, one JSON object to stdout."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulated_vs_real", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--model", default=ClusterConfig().model)
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--max-prompt", type=int, default=1024)
    parser.add_argument("--max-output", type=int, default=96)
    parser.add_argument("--utilization", type=float, default=0.5)
    options = parser.parse_args()
    machine, tell = this_machine(), Console(stderr=True)
    try:
        found = asyncio.run(run(options, tell))
    except SplitserveError as error:
        tell.print(f"error: {error.message}")
        return 1
    command = shlex.join(["python", "-m", "bench.simulated_vs_real", *sys.argv[1:]])
    print(json.dumps(report("simulated_vs_real", command, machine, **found), indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
