"""What this version's coordinator costs beside that of another checkout: `python -m bench.observability.version_cost
--before FOLDER [--json]`.

Two coordinators with the same scripted workers, both on one core, the rest of the work on the other. One at a time is
asked over one entrypoint, 64 streams, for a short window; then the other, the second one first in every second turn.
`tokens`: answers that outlast the window, CPU microseconds per token. `requests`: answers of two tokens, CPU
microseconds per request, both tokens included. The result is the median over the turns of the ratio to the version
before: windows of one turn lie seconds apart, so what other work does to the machine affects both alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Literal

from rich.console import Console
from rich.table import Table

from bench.coordinator.cases import ENDLESS_TOKENS, FEW_TOKENS, STREAMS
from bench.coordinator.processes import (
    Cores,
    Process,
    answers,
    coordinator,
    generate_load,
    scripted_workers,
    split_cores,
)
from bench.machine import report, this_machine
from bench.observability.observation_cost import MODEL, VOCABULARY
from bench.option_values import positive_number, positive_whole
from splitserve.cluster.placement import available_cores
from splitserve.config.coordinator import CoordinatorConfig

Version = Literal["before", "after"]
Row = dict[Version, float]
MAX_TOKENS = {"tokens": ENDLESS_TOKENS, "requests": FEW_TOKENS}
WARM_S = 1.0


async def _window(front: Process, cores: Cores, entrypoint: str, kind: str, seconds: float) -> float:
    """CPU microseconds of this coordinator per token or request."""
    found = await generate_load(
        cores.rest,
        entrypoint=entrypoint,
        target=front.http if entrypoint == "sse" else front.grpc,
        pid=front.pid,
        max_tokens=MAX_TOKENS[kind],
        streams=STREAMS,
        seconds=seconds,
        warm_s=WARM_S,
        model=MODEL,
    )
    return 1e6 * float(found["cpu_s"]) / max(1, int(found[kind]))


async def measure(
    before: Path, cases: list[str], turns: int, seconds: float, step_ms: float, tell: Console
) -> dict[str, list[Row]]:
    """The windows of each case, named "entrypoint:kind"."""
    cores, plain = split_cores(available_cores()), CoordinatorConfig(max_running_requests=20_000)
    folders: dict[Version, Path | None] = {"before": before, "after": None}
    found: dict[str, list[Row]] = {case: [] for case in cases}
    async with AsyncExitStack() as stack:
        fronts: dict[Version, Process] = {}
        for name, folder in folders.items():
            fronts[name] = await stack.enter_async_context(coordinator(plain, cores.front, folder))
            await answers(fronts[name].grpc)
        targets = [front.grpc for front in fronts.values()]
        await stack.enter_async_context(scripted_workers(targets, step_ms, MODEL, VOCABULARY, cores.rest))
        for turn in range(turns):
            order = list(fronts) if turn % 2 else list(reversed(fronts))
            for case, rows in found.items():
                entrypoint, _, kind = case.partition(":")
                rows.append(
                    {name: await _window(fronts[name], cores, entrypoint, kind, seconds) for name in order}
                )
                tell.print(f"turn {turn + 1} of {turns}: {case} {rows[-1]}")
    return found


def ratio(rows: list[Row]) -> float:
    """The median of what this version takes by what the other one takes."""
    return round(median(row["after"] / row["before"] for row in rows), 3)


def main() -> int:
    """Progress goes to stderr; the table, or one JSON object with `--json`, to stdout."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.observability.version_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--before", type=Path, metavar="FOLDER", required=True, help="the other checkout")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--cases", default="grpc:tokens,sse:tokens,grpc:requests,sse:requests")
    parser.add_argument("--turns", type=positive_whole, default=7, help="windows of each version and case")
    parser.add_argument("--seconds", type=positive_number, default=2.0, help="length of a window")
    parser.add_argument(
        "--step-ms", type=positive_number, default=15.0, help="time of a step of the scripted workers"
    )
    options = parser.parse_args()
    machine, cases = this_machine(), options.cases.split(",")
    tell = Console(stderr=True)
    found = asyncio.run(measure(options.before, cases, options.turns, options.seconds, options.step_ms, tell))
    ratios = {case: ratio(rows) for case, rows in found.items()}
    if options.json:
        command = shlex.join(["python", "-m", "bench.observability.version_cost", *sys.argv[1:]])
        print(json.dumps(report("version_cost", command, machine, ratios=ratios, rows=found)))
        return 0
    table = Table("case", "before, us", "after, us", "ratio")
    for case, rows in found.items():
        medians = [f"{median(row[name] for row in rows):,.1f}" for name in ("before", "after")]
        table.add_row(case, *medians, f"{ratios[case]:.2f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
