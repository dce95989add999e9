"""Goodput of several systems under open load, in turns on the same cores: `python -m bench.goodput [--json]`.

Each run starts one system alone (another one that only stands by would use the cores: vLLM's idle servers do), warms it
up, and sends it the requests of a seed at their scheduled times from a process of its own. Every system gets the same
requests; no two runs of a system share prompts. Order of systems: forward for even seeds, backward for odd ones.

* attained: share of all requests sent whose first token came within `--ttft` of the *scheduled* time and whose mean
  time a token after it is within `--tpot`. Refused, failed and timed-out ones are misses. `low` and `high`: 95%
  interval by bootstrap over seeds; with one seed there is none. A few seeds prove nothing: a verdict needs 10 of 300.
* differences: the default's attained share less another system's, paired by seed.
* goodput: the highest rate with 90% attained, interpolated linearly between the last tried rate that attains it and the
  next one; `tried` is without interpolation.
* of each row also: short and long prompts (512 tokens and more) apart, by class, weighted by tokens, TPOT attained of
  complete ones, TTFT and TPOT, the longest gap between two events, lateness of misses, what others used of the cores,
  the cores' speed, and how late the generator sent. A row is marked where that was too late (`late_generator`, * in the
  table) or where others used more than a tenth of the cores (`busy_machine`, !): it says less.

Systems (`systems.py`): default, split (the pools kept apart), colocated and colocated-plain (without targets) are
splitserve's; vllm is one server on all cores, vllm-pair its NixlConnector pair. All are asked over HTTP, by the same
client. A full verdict takes days; `--runs FILE` keeps runs, and a later call goes on with them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from autoscaler.simulation.scenario import Slo
from bench.goodput.mixes import MIXES
from bench.goodput.outcome import attained_share
from bench.goodput.rows import cells_of, differences, goodput_of, row_of
from bench.goodput.systems import OWN, SYSTEMS, ServingOptions
from bench.goodput.tables import WIDTH, tables
from bench.goodput.turns import FinishedTurn, finished_turns, turn_order
from bench.machine import report, this_machine
from bench.option_values import positive_number, positive_whole, whole_number
from splitserve.errors import SplitserveError

MODEL = "smollm2-135m-instruct"
EXIT_STOPPED = 130
QUICK = {"systems": OWN, "mixes": ("measured",), "rates": (2.0,), "seeds": 1, "requests": 10}
FULL = {
    "systems": tuple(SYSTEMS),
    "mixes": tuple(MIXES),
    "rates": (0.5, 1.0, 2.0, 3.0, 4.0),
    "seeds": 10,
    "requests": 300,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Progress goes to stderr, the result to stdout. Exit code 1 if a system failed, 130 if stopped by a signal."""
    options = _options(arguments)
    machine, tell = this_machine(), Console(stderr=True)
    slo = Slo(options.ttft, options.tpot)
    try:
        turns = asyncio.run(_until_stopped(options, slo, tell))
    except (SplitserveError, RuntimeError, OSError) as error:
        tell.print(f"error: {error}", markup=False)
        return 1
    except asyncio.CancelledError:
        tell.print("stopped")
        return EXIT_STOPPED
    cells = cells_of(turns)
    results: dict[str, Any] = {
        "rows": [row_of(cell, slo) for cell in cells],
        "differences": differences(cells, slo),
        "goodput": goodput_of(cells, slo),
    }
    if options.json:
        command = shlex.join(["python", "-m", "bench.goodput", *(arguments or sys.argv[1:])])
        targets = {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s}
        print(json.dumps(report("goodput", command, machine, targets=targets, **results), indent=2))
    else:
        shown = Console(width=max(WIDTH, Console().width))
        for table in tables(results):
            shown.print(table)
    return 0


async def _until_stopped(options: argparse.Namespace, slo: Slo, tell: Console) -> list[FinishedTurn]:
    """All turns. SIGINT and SIGTERM cancel it; the processes then end on the way out."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    loads = [(mix, rate) for mix in options.mixes for rate in options.rates]
    conditions = f"{options.model}, TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s:g} s"
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    keys = turn_order(loads, seeds, options.requests, options.systems, conditions)
    turns = []
    with tempfile.TemporaryDirectory(prefix="goodput-logs-") as logs:
        folder = options.log_dir or Path(logs)
        folder.mkdir(parents=True, exist_ok=True)
        serving = ServingOptions(options.model, slo, options.environment, folder)
        async for turn in finished_turns(keys, serving, options.timeout, options.runs):
            turns.append(turn)
            share = attained_share(turn.requests, slo) or 0.0
            key = turn.key
            tell.print(f"{key.mix} {key.rate:g}/s seed {key.seed} {key.system}: {share:.3f}")
    return turns


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.goodput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), metavar="SYSTEM")
    parser.add_argument("--mixes", nargs="+", choices=list(MIXES), metavar="MIX", help=", ".join(MIXES))
    parser.add_argument("--rates", nargs="+", type=positive_number, metavar="R", help="requests a second")
    parser.add_argument("--seeds", type=positive_whole, help="how many; default: 10")
    parser.add_argument(
        "--first-seed", type=whole_number, default=0, metavar="N", help="where they begin; default: 0"
    )
    parser.add_argument("--requests", type=positive_whole, help="of a run; default: 300")
    parser.add_argument("--ttft", type=positive_number, default=1.0, help="target in seconds; default: 1")
    parser.add_argument("--tpot", type=positive_number, default=0.05, help="target in seconds; default: 0.05")
    parser.add_argument("--timeout", type=positive_number, default=60.0, help="of a request, in seconds")
    parser.add_argument("--model", default=MODEL, help="`simulated` for splitserve alone")
    parser.add_argument("--environment", type=Path, default=Path(".peers/vllm"), help="vLLM's")
    parser.add_argument(
        "--runs", type=Path, metavar="FILE", help="keep runs there, and go on with those there"
    )
    parser.add_argument("--log-dir", type=Path, help="keep the servers' logs there")
    parser.add_argument(
        "--quick", action="store_true", help="a minute or two: splitserve's systems, ten requests"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object to stdout")
    options = parser.parse_args(arguments)
    for name, value in (QUICK if options.quick else FULL).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options
