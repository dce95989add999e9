"""Plans how many replicas a mix of traffic needs, then measures the fewest real ones that reach the goal.

`python -m bench.advisor.plan --json`. The engine model is fitted from a recording of half the traffic on 1P:1D; the
plan reads the whole traffic through a column map. Then every cluster of 1, 2, ... replicas, split and colocated, serves
that traffic as processes behind a coordinator, until one reaches the goal at the client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from autoscaler.advisor.candidates import ClusterShape
from autoscaler.simulation.outcome import Slo
from autoscaler.simulation.traces.trace import Trace
from bench.advisor.mixes import MIXES, REAL_MIXES, TrafficMix
from bench.advisor.regret import attainment, program, recorded, replayed, served
from bench.machine import OtherLoad, report, this_machine
from splitserve.errors import SplitserveError

WITHIN = 1
"""Replicas by which a plan may differ from the measured fewest."""
CALIBRATION_SEED = 1000
COLUMNS = "timestamp=at,input_length=tokens.prompt,output_length=tokens.answer"
SETUPS = {
    "prefill-heavy": ("simulated", MIXES["prefill-heavy"]),
    "decode-heavy": ("simulated", MIXES["decode-heavy"]),
    "real-weights": ("smollm2-135m-instruct", REAL_MIXES["short-chat"]),
}
"""Model and traffic."""


def write_log(path: Path, trace: Trace) -> None:
    """The trace as a log of another system, for `--columns`."""
    lines = (
        {"at": one.arrival_s, "tokens": {"prompt": one.prompt_tokens, "answer": one.output_tokens}}
        for one in trace.requests
    )
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


async def planned(name: str, mix: TrafficMix, options: argparse.Namespace) -> dict[str, Any]:
    """What `splitserve plan --json` says of the mix."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log.jsonl"
        write_log(log, mix.trace(name, options.seconds, options.seed))
        half = replace(mix, rate=mix.rate / 2)
        calibration = half.trace("calibration", options.seconds, options.seed + CALIBRATION_SEED)
        async with served(ClusterShape("split", 1, 1), options) as client:
            recording = await recorded(client, calibration, scratch)
        targets = ("--ttft-ms", f"{mix.slo.ttft_s * 1e3:g}", "--tpot-ms", f"{mix.slo.tpot_s * 1e3:g}")
        read = ("--trace", str(log), "--columns", COLUMNS, "--engine-model", str(recording))
        found: dict[str, Any] = json.loads(
            await program("plan", *read, *targets, "--goal", str(options.goal), "--json")
        )
    return found


def clusters(replicas: int) -> Iterator[ClusterShape]:
    """All clusters of so many replicas."""
    yield ClusterShape("colocated", 0, replicas)
    for prefill in range(1, replicas):
        yield ClusterShape("split", prefill, replicas - prefill)


async def fewest(
    trace: Trace, slo: Slo, most: int, options: argparse.Namespace, tell: Console
) -> tuple[int | None, list[dict[str, Any]]]:
    """The fewest replicas of which a cluster reaches the goal, None if no number up to `most` does; and all runs."""
    rows, load = [], OtherLoad()
    for replicas in range(1, most + 1):
        reached = False
        for shape in clusters(replicas):
            load.mark()
            async with served(shape, options) as client:
                answers = await replayed(client, trace)
            row = {
                "cluster": shape.name,
                "measured": round(attainment(answers, slo), 4),
                "failed": sum(answer is None for answer in answers),
                "other_load": round(load.share(), 3),
            }
            tell.print(trace.name, row)
            rows.append(row)
            reached = reached or row["measured"] >= options.goal
        if reached:
            return replicas, rows
    return None, rows


async def compared(name: str, options: argparse.Namespace, tell: Console) -> dict[str, Any]:
    """One set-up: planned, measured."""
    options.model, mix = SETUPS[name]
    plan = await planned(name, mix, options)
    chosen = plan[plan["best"]]
    tell.print(name, "planned", chosen["name"], f"{chosen['attainment']:.1%}")
    trace = mix.trace(name, options.seconds, options.seed)
    least, rows = await fewest(trace, mix.slo, chosen["gpus"] + WITHIN, options, tell)
    return {
        "setup": name,
        "model": options.model,
        "requests": len(trace.requests),
        "planned": chosen["name"],
        "planned_replicas": chosen["gpus"],
        "predicted": round(chosen["attainment"], 4),
        "measured_replicas": least,
        "within_bar": least is not None and abs(least - chosen["gpus"]) <= WITHIN,
        "rows": rows,
        "other_kind": {kind: plan[kind] and plan[kind]["name"] for kind in ("split", "colocated")},
        "engine": plan["replica"]["engine"],
        "notes": plan["notes"],
    }


async def run(options: argparse.Namespace, tell: Console) -> list[dict[str, Any]]:
    """All set-ups."""
    return [await compared(name, options, tell) for name in options.setup or SETUPS]


def main() -> int:
    """Progress goes to stderr, results to stdout. Exit code 1 if a plan is not within the bar."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.advisor.plan", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--setup", action="append", choices=list(SETUPS), help="only this one; repeatable")
    parser.add_argument("--goal", type=float, default=0.9, help="share of requests within both targets")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object to stdout")
    options = parser.parse_args()
    machine, tell = this_machine(), Console(stderr=True)
    try:
        rows = asyncio.run(run(options, tell))
    except (SplitserveError, RuntimeError) as error:
        tell.print(f"error: {error}")
        return 1
    command = shlex.join(["python", "-m", "bench.advisor.plan", *sys.argv[1:]])
    if options.json:
        print(json.dumps(report("plan", command, machine, rows=rows), indent=2))
    else:
        for row in rows:
            print(f"{row['setup']}: {row['planned']} planned, {row['measured_replicas']} replicas measured")
    return 0 if all(row["within_bar"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
