"""Cost of the front door: `python -m bench.front_door [--json] [--parts tokens,workers,...] [--profile]`.

Scripted workers (no engine), one coordinator and a load generator in separate processes, the coordinator on its own
core where there are two. CPU time is the coordinator process's own, user and system, all its threads, over a
steady window; generator and workers do not count. 64 streams, prompts of about 12 tokens. Two paces: `paced` gives
every stream a token each 10 ms as a real decode does, whether clients keep up or not, `saturated` one each millisecond,
more than can be forwarded.

* cpu_us_per_token_FACE: paced, answers that outlast the window, so tokens alone; `_saturated`: at the fast pace.
* cpu_us_per_token_FACE_answers, `_saturated`: answers of 64 tokens, their requests included: CPU time by tokens.
* cpu_us_per_request_FACE: of an answer of two tokens less the two tokens.
* requests_per_s: answers of 64 tokens, saturated, gRPC, with everything on this machine's cores.
* wait_ms_FACE_p50, _p99: age of a paced token at the client (its text says when it was made).
* added_ms: the same less the age at a client that does the coordinator's work with the workers itself; percentile by
  percentile, 64 tokens an answer.
* cpu_us_per_token_worker, cpu_us_per_request_worker: of a real decode worker with the simulated engine, whose steps are
  paced, behind a coordinator and a prefill worker that do not count; the engine does.
* loop_lag_ms_p99: upper bound of the histogram bucket of `splitserve_event_loop_lag_seconds`, 500 streams paced.
* bytes_per_open_stream, idle_cpu_share: slope of resident memory up to 10,000 streams that got a token and wait for the
  next, and the share of a core that they then take.
* tokens_per_s_N: of N coordinators, 1, 2 and 4; two_coordinators_by_one: the ratio. On two cores, the generator and the
  workers share them.
* routing_us_p99: one decision among 2,000 workers, 1,000 of each pool; see `bench.routing`.
* dynamo: the same SSE windows against NVIDIA Dynamo's frontend with its own engine mocks (`make peer-dynamo`).

`--profile` also records where the measured process spends its time while only tokens flow, and while requests come; it
is in the details of `--json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.front_door.cases import (
    LoadPlan,
    beside_dynamo,
    loop_lag,
    open_streams,
    scaling,
    token_costs,
    worker_costs,
)
from bench.front_door.dynamo import is_installed
from bench.front_door.processes import split_cores
from bench.machine import report, this_machine
from bench.option_values import positive_number
from bench.routing.decisions import measured
from launcher.cluster.placement import available_cores
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.models.sources import models_dir

MODEL = "smollm2-135m-instruct"
VOCABULARY = 49_152
PARTS = ("tokens", "workers", "lag", "memory", "scaling", "dynamo", "routing")
DYNAMO_SPEEDUP = 0.75
"""Gives about 10 ms a token with 64 streams."""
ROUTED_WORKERS, ROUTED_BLOCKS, DECISIONS = 1000, 1_000_000, 2000


def parse_arguments() -> argparse.Namespace:
    """The command-line parser."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure, separated by commas")
    parser.add_argument("--entrypoints", default="grpc,sse,kserve")
    parser.add_argument("--seconds", type=positive_number, default=5.0, help="length of a window")
    parser.add_argument("--step-ms", type=positive_number, default=10.0, help="time of a paced step")
    parser.add_argument(
        "--fast-step-ms", type=positive_number, default=1.0, help="time of a step when saturated"
    )
    parser.add_argument(
        "--lag-step-ms", type=positive_number, default=30.0, help="time of a step with 500 streams"
    )
    parser.add_argument("--profile", action="store_true", help="record where the time goes")
    parser.add_argument("--max-coalesce-ms", type=float, default=CoordinatorConfig().max_coalesce_ms)
    return parser.parse_args()


def flat(results: dict[str, Any]) -> dict[str, Any]:
    """The measured figures, by their names in the module docstring."""
    figures: dict[str, Any] = {}
    for entrypoint in ("grpc", "sse", "kserve", "worker", "dynamo"):
        for pace, suffix in (("paced", ""), ("saturated", "_saturated")):
            if (case := results.get(f"{entrypoint}_{pace}")) is None:
                continue
            answers, ages = case["windows"]["answers"], case["windows"]["endless"]["age_ms"]
            if entrypoint != "worker" and pace == "paced":
                figures |= {f"wait_ms_{entrypoint}_p{p}": ages[p] for p in ("50", "99")}
            figures[f"cpu_us_per_token_{entrypoint}{suffix}"] = case["cpu_us_per_token"]
            figures[f"cpu_us_per_token_{entrypoint}_answers{suffix}"] = answers["cpu_us_per_token_all"]
            figures[f"tokens_per_message_{entrypoint}{suffix}"] = case["windows"]["endless"][
                "tokens_per_message"
            ]
            figures[f"cpu_us_per_request_{entrypoint}{suffix}"] = case["cpu_us_per_request"]
            figures[f"requests_per_s_{entrypoint}{suffix}"] = answers["requests_per_s"]
    if (paced := results.get("grpc_paced")) is not None:
        ages, direct = paced["windows"]["answers"]["age_ms"], results["direct_paced"]["age_ms"]
        figures["added_ms_p50"], figures["added_ms_p99"] = (ages[p] - direct[p] for p in ("50", "99"))
        figures["requests_per_s"] = figures["requests_per_s_grpc_saturated"]
    if "lag" in results:
        figures["loop_lag_ms_p99"] = results["lag"]["p99_ms_at_most"]
    if "memory" in results:
        figures["bytes_per_open_stream"] = results["memory"]["bytes_per_stream"]
        figures["idle_cpu_share"] = results["memory"]["idle_cpu_share"]
    if "scaling" in results:
        per_s = {count: result["tokens_per_s"] for count, result in results["scaling"].items()}
        figures |= {f"tokens_per_s_{count}": rate for count, rate in per_s.items()}
        figures["two_coordinators_by_one"] = per_s["2"] / per_s["1"]
    if "routing" in results:
        figures["routing_us_p99"] = results["routing"]["p99_us"]
    return figures


async def measure(args: argparse.Namespace, parts: list[str], tell: Console) -> dict[str, Any]:
    """Measures the parts one after the other; the results by part."""
    plan = LoadPlan(
        split_cores(available_cores()),
        args.seconds,
        args.step_ms,
        args.fast_step_ms,
        args.lag_step_ms,
        MODEL,
        VOCABULARY,
        args.max_coalesce_ms,
        args.profile,
    )
    results: dict[str, Any] = {}

    def begin(part: str) -> bool:
        if part in parts:
            tell.print(f"measuring {part}")
        return part in parts

    if begin("tokens"):
        results |= await token_costs(plan, args.entrypoints.split(","))
    if begin("workers"):
        results |= await worker_costs(plan)
    if begin("dynamo") and is_installed():
        results |= await beside_dynamo(plan, _model_path(), DYNAMO_SPEEDUP)
    if begin("lag"):
        results["lag"] = await loop_lag(plan)
    if begin("memory"):
        results["memory"] = await open_streams(plan)
    if begin("scaling"):
        results["scaling"] = await scaling(plan)
    if begin("routing"):
        results["routing"] = asdict(measured(ROUTED_WORKERS, ROUTED_BLOCKS, DECISIONS))
    return results


def _model_path() -> Path:
    return models_dir() / MODEL


def main() -> None:
    """Measures and prints."""
    args = parse_arguments()
    machine, parts = this_machine(), args.parts.split(",")
    results = asyncio.run(measure(args, parts, Console(stderr=True)))
    figures = flat(results)
    if args.json:
        command = shlex.join(["python", "-m", "bench.front_door", *sys.argv[1:]])
        print(json.dumps(report("front_door", command, machine, **figures, details=results)))
        return
    table = Table("figure", "value")
    for name, value in figures.items():
        table.add_row(name, f"{value:.2f}")
    Console().print(table)
