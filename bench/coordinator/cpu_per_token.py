"""Cost of the coordinator: `python -m bench.coordinator [--json] [--parts tokens,lag,...]`.

Scripted workers (no engine), one coordinator and a load generator in separate processes, the coordinator on its own
core where there are two. CPU time is the coordinator process's own, user and system, all its threads, over a
steady window; generator and workers do not count. 64 streams, prompts of about 12 tokens. Two paces: `paced` gives
every stream a token each 15 ms as a real decode does, `saturated` one each millisecond, more than can be forwarded.

* cpu_us_per_token_FACE: paced, answers that outlast the window, so tokens alone; `_saturated`: at the fast pace.
* cpu_us_per_token_FACE_answers, `_saturated`: answers of 64 tokens, their requests included: CPU time by tokens.
* cpu_us_per_request: of an answer of two tokens less the two tokens, over gRPC, saturated.
* requests_per_s: answers of 64 tokens, saturated, gRPC, with everything on this machine's cores.
* added_ms: age of a token at the client (its text says when it was made) less its age at a client that does the
  coordinator's work with the workers itself; percentile by percentile, paced, 64 tokens an answer.
* loop_lag_ms_p99: upper bound of the histogram bucket of `splitserve_event_loop_lag_seconds`, 500 streams paced.
* bytes_per_open_stream: slope of resident memory up to 5,000 streams that got a token and wait for the next.
* scaling: tokens a second of two coordinators by those of one. On two cores, the generator and the workers share them.
* routing_us_p99: one decision among 2,000 workers, 1,000 of each pool; see `bench.routing`.
* dynamo: the same SSE windows against NVIDIA Dynamo's frontend with its own engine mocks (`make peer-dynamo`).
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

from bench.coordinator.cases import LoadPlan, beside_dynamo, loop_lag, open_streams, scaling, token_costs
from bench.coordinator.dynamo import is_installed
from bench.coordinator.processes import split_cores
from bench.machine import report, this_machine
from bench.option_values import positive_number
from bench.routing.decisions import measured
from launcher.cluster.placement import available_cores
from splitserve.config.coordinator import CoordinatorConfig
from splitserve.models.sources import models_dir

MODEL = "smollm2-135m-instruct"
VOCABULARY = 49_152
PARTS = ("tokens", "lag", "memory", "scaling", "dynamo", "routing")
DYNAMO_SPEEDUP = 0.5
"""Gives about 15 ms a token with 64 streams."""
ROUTED_WORKERS, ROUTED_BLOCKS, DECISIONS = 1000, 1_000_000, 2000


def parse_arguments() -> argparse.Namespace:
    """The command-line parser."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure, separated by commas")
    parser.add_argument("--entrypoints", "--faces", default="grpc,sse")
    parser.add_argument("--seconds", type=positive_number, default=5.0, help="length of a window")
    parser.add_argument("--step-ms", type=positive_number, default=15.0, help="time of a paced step")
    parser.add_argument(
        "--fast-step-ms", type=positive_number, default=1.0, help="time of a step when saturated"
    )
    parser.add_argument(
        "--lag-step-ms", type=positive_number, default=30.0, help="time of a step with 500 streams"
    )
    parser.add_argument("--max-coalesce-ms", type=float, default=CoordinatorConfig().max_coalesce_ms)
    return parser.parse_args()


def flat(results: dict[str, Any]) -> dict[str, Any]:
    """The measured figures, by their names in the module docstring."""
    figures: dict[str, Any] = {}
    for entrypoint in ("grpc", "sse", "dynamo"):
        for pace, suffix in (("paced", ""), ("saturated", "_saturated")):
            if (case := results.get(f"{entrypoint}_{pace}")) is None:
                continue
            answers = case["windows"]["answers"]
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
        figures["cpu_us_per_request"] = results["grpc_saturated"]["cpu_us_per_request"]
        figures["requests_per_s"] = figures["requests_per_s_grpc_saturated"]
    if "lag" in results:
        figures["loop_lag_ms_p99"] = results["lag"]["p99_ms_at_most"]
    if "memory" in results:
        figures["bytes_per_open_stream"] = results["memory"]["bytes_per_stream"]
    if "scaling" in results:
        one_per_s, two_per_s = (results["scaling"][count]["tokens_per_s"] for count in ("1", "2"))
        figures["two_coordinators_by_one"] = two_per_s / one_per_s
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
    )
    results: dict[str, Any] = {}

    def begin(part: str) -> bool:
        if part in parts:
            tell.print(f"measuring {part}")
        return part in parts

    if begin("tokens"):
        results |= await token_costs(plan, args.entrypoints.split(","))
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
        command = shlex.join(["python", "-m", "bench.coordinator", *sys.argv[1:]])
        print(json.dumps(report("coordinator", command, machine, **figures, details=results)))
        return
    table = Table("figure", "value")
    for name, value in figures.items():
        table.add_row(name, f"{value:.1f}")
    Console().print(table)
