"""The simulator compared with a real cluster: `python -m bench.autoscaling.simulated_vs_real --trace FILE`.

Starts one prefill and one decode worker with real weights and replays two slices of a trace against them, one after the
other. An `EngineModel` is fitted to what the first slice's requests took; then the second slice, which the fit has not
seen, is replayed in `splitserve simulate`'s simulator with that model, and both are compared.

Arrivals are stretched to `--utilization` of the prefill worker, and lengths cut to `--max-prompt` and `--max-output`,
so that a slice takes minutes. Prompts are random tokens, so that no cache hits. Real TTFT and TPOT are taken at the
client, on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console

from autoscaler.simulation.engine_model import EngineModel
from autoscaler.simulation.traces.trace import Trace, TraceRequest, load_trace
from bench.asking import AskedAnswer, ask, random_prompt
from bench.autoscaling.engine_fit import EVALUATIONS, Latencies, fitted, simulate
from bench.cluster import running_cluster
from bench.machine import report, this_machine
from bench.option_values import positive_number, positive_whole
from splitserve.client import AsyncClient
from splitserve.config.cluster import ClusterConfig
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.errors import SplitserveError

FRONT = "split"
RATE_PROMPT, RATE_REPEATS = 512, 5
KNOWN = EngineModel(max_step_tokens=512, kv_bytes_per_token=23_040)
"""Fixed by the workers' settings and the model."""
PERCENTILES = (50, 95)
SEED = 0


class Asker:
    """Sends requests with prompts that no cache holds."""

    def __init__(self, client: AsyncClient) -> None:
        self._client, self._random = client, random.Random(SEED)

    async def ask(self, prompt_tokens: int, output_tokens: int) -> AskedAnswer:
        """One greedy answer of exactly this many tokens."""
        return await ask(self._client, random_prompt(self._random, prompt_tokens), output_tokens)


def slices_of(trace: Trace, prefill_tokens_per_s: float, options: argparse.Namespace) -> tuple[Trace, Trace]:
    """Two slices of the trace, one to fit and one to compare, each stretched to the utilization of one worker."""
    cut = [
        (
            r.arrival_s,
            min(r.prompt_tokens, options.max_prompt),
            max(2, min(r.output_tokens, options.max_output)),
        )
        for r in trace.requests[: 2 * options.requests]
    ]
    halves = []
    for name, half in (("to fit", cut[: options.requests]), ("to compare", cut[options.requests :])):
        first_s, last_s = half[0][0], half[-1][0]
        work_s = sum(prompt for _, prompt, _ in half) / prefill_tokens_per_s
        stretch = work_s / options.utilization / max(last_s - first_s, 1e-9)
        requests = [TraceRequest((at - first_s) * stretch, *sizes) for at, *sizes in half]
        halves.append(Trace(f"{trace.name}, {name}", requests))
    return halves[0], halves[1]


async def prefill_rate(asker: Asker) -> float:
    """Prompt tokens per second on an idle worker: the median of a few."""
    rates = [RATE_PROMPT / (await asker.ask(RATE_PROMPT, 2)).token_s[0] for _ in range(RATE_REPEATS)]
    return median(rates)


async def replay(asker: Asker, trace: Trace) -> list[AskedAnswer]:
    """Sends every request at its time to the workers."""
    began = time.monotonic()

    async def answered(request: TraceRequest) -> AskedAnswer:
        await asyncio.sleep(max(0.0, began + request.arrival_s - time.monotonic()))
        return await asker.ask(request.prompt_tokens, request.output_tokens)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(answered(request)) for request in trace.requests]
    return [task.result() for task in tasks]


def compared(real: Sequence[float], simulated: Sequence[float]) -> dict[str, dict[str, float]]:
    """Percentiles of both in milliseconds, and the simulator's error."""
    rows = {}
    for percent in PERCENTILES:
        was, predicted = float(np.percentile(real, percent)), float(np.percentile(simulated, percent))
        rows[f"p{percent}"] = {
            "real_ms": round(was * 1e3, 2),
            "simulated_ms": round(predicted * 1e3, 2),
            "error": round(predicted / was - 1, 4),
        }
    return rows


async def run(options: argparse.Namespace, tell: Console) -> dict[str, Any]:
    """Calibrates, replays, simulates, compares."""
    trace = load_trace(options.trace)
    config = ClusterConfig(model=options.model)
    coordinators = {FRONT: CoordinatorConfig(local_prefill="never")}
    async with running_cluster(config, coordinators, lambda _event: None) as fronts:
        asker = Asker(fronts.clients[FRONT])
        await asker.ask(64, 8)
        halves = slices_of(trace, await prefill_rate(asker), options)
        took = []
        for half in halves:
            tell.print(f"{half.name}: {len(half.requests)} requests in {half.duration_s:.0f} s")
            answers = await replay(asker, half)
            took.append(([answer.token_s[0] for answer in answers], [answer.tpot_s for answer in answers]))
    engine = fitted(halves[0], took[0], KNOWN, options.evaluations)
    tell.print(engine)
    rows = [_row(half, real, simulate(half, engine)) for half, real in zip(halves, took, strict=True)]
    return {"engine": dataclasses.asdict(engine), "rows": rows}


def _row(trace: Trace, real: Latencies, predicted: Latencies) -> dict[str, Any]:
    names = ("ttft", "tpot")
    row: dict[str, Any] = {
        "slice": trace.name,
        "requests": len(trace.requests),
        "duration_s": round(trace.duration_s, 1),
    }
    row["requests_took"] = [
        [request.arrival_s, request.prompt_tokens, request.output_tokens, ttft_s, tpot_s]
        for request, ttft_s, tpot_s in zip(trace.requests, *real, strict=True)
    ]
    return row | {name: compared(was, is_) for name, was, is_ in zip(names, real, predicted, strict=True)}


def main() -> int:
    """Progress goes to stderr, one JSON object to stdout."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.autoscaling.simulated_vs_real", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--model", default=ClusterConfig().model)
    parser.add_argument("--requests", type=positive_whole, default=80)
    parser.add_argument("--max-prompt", type=positive_whole, default=1024)
    parser.add_argument("--max-output", type=positive_whole, default=96)
    parser.add_argument("--utilization", type=positive_number, default=0.5)
    parser.add_argument(
        "--evaluations", type=positive_whole, default=EVALUATIONS, help="limit per round of the fit"
    )
    options = parser.parse_args()
    machine, tell = this_machine(), Console(stderr=True)
    try:
        content = asyncio.run(run(options, tell))
    except SplitserveError as error:
        tell.print(f"error: {error.message}")
        return 1
    command = shlex.join(["python", "-m", "bench.autoscaling.simulated_vs_real", *sys.argv[1:]])
    print(json.dumps(report("simulated_vs_real", command, machine, **content), indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
