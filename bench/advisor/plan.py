"""Plans how many replicas a mix of traffic needs, then measures the fewest real ones that reach the goal.

`python -m bench.advisor.plan --json`. The engine model is fitted from a recording of half the traffic on 1P:1D; the
plan reads the whole traffic through a column map. Then clusters of one replica less serve that traffic, split and
colocated, as processes behind a coordinator, and clusters of fewer or more, until it is known how few reach the goal at
the client. That no cluster of n replicas reaches it is taken to hold for fewer than n.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
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
from bench.option_values import positive_number, whole_number
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


def clusters(replicas: int, prefill_share: float) -> list[ClusterShape]:
    """All clusters of so many replicas, those first that divide them as the plan does."""
    split = [ClusterShape("split", prefill, replicas - prefill) for prefill in range(1, replicas)]
    split.sort(key=lambda one: abs(one.prefill - replicas * prefill_share))
    return [*split, ClusterShape("colocated", 0, replicas)]


class _Measured:
    """Real clusters, each with the same traffic; of each size until the first that reaches the goal."""

    def __init__(
        self, trace: Trace, slo: Slo, share: float, options: argparse.Namespace, tell: Console
    ) -> None:
        self._trace, self._slo, self._share, self._options, self._tell = trace, slo, share, options, tell
        self.rows: list[dict[str, Any]] = []

    async def reached(self, replicas: int) -> bool:
        """Whether a cluster of so many replicas reaches the goal."""
        load = OtherLoad()
        for shape in clusters(replicas, self._share) if replicas else ():
            load.mark()
            async with served(shape, self._options) as client:
                answers = await replayed(client, self._trace)
            row = {
                "cluster": shape.name,
                "measured": round(attainment(answers, self._slo), 4),
                "failed": sum(answer is None for answer in answers),
                "other_load": round(load.share(), 3),
            }
            self._tell.print(self._trace.name, row)
            self.rows.append(row)
            if row["measured"] >= self._options.goal:
                return True
        return False

    async def fewest(self, planned: int) -> int | None:
        """The fewest replicas that reach the goal, from one less than planned down, or up by `WITHIN`; None beyond."""
        replicas = max(1, planned - WITHIN)
        if await self.reached(replicas):
            while await self.reached(replicas - 1):
                replicas -= 1
            return replicas
        for more in range(replicas + 1, planned + WITHIN + 1):
            if await self.reached(more):
                return more
        return None


async def compared(name: str, options: argparse.Namespace, tell: Console) -> dict[str, Any]:
    """One set-up: planned, measured."""
    options.model, mix = SETUPS[name]
    plan = await planned(name, mix, options)
    chosen = plan[plan["best"]]
    tell.print(name, "planned", chosen["name"], f"{chosen['attainment']:.1%}")
    trace = mix.trace(name, options.seconds, options.seed)
    split = plan["split"]
    share = split["prefill_gpus"] / split["gpus"] if split else 0.5
    measured = _Measured(trace, mix.slo, share, options, tell)
    least = await measured.fewest(chosen["gpus"])
    return {
        "setup": name,
        "model": options.model,
        "requests": len(trace.requests),
        "planned": chosen["name"],
        "planned_replicas": chosen["gpus"],
        "predicted": round(chosen["attainment"], 4),
        "measured_replicas": least,
        "within_bar": least is not None and abs(least - chosen["gpus"]) <= WITHIN,
        "rows": measured.rows,
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
    parser.add_argument(
        "--goal", type=positive_number, default=0.9, help="share of requests within both targets"
    )
    parser.add_argument("--seconds", type=positive_number, default=30.0, help="length of each run")
    parser.add_argument("--seed", type=whole_number, default=0)
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
