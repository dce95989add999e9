"""Faults on a running cluster, and whether its streams notice: `python -m bench.chaos --minutes N [--json]`.

Two coordinators, two prefill and two decode workers with the real model in float32, real processes and real NIXL.
First the capacity is measured: what the undisturbed cluster completes with AT_ONCE clients that ask again at once. Then
streams arrive at `--load` of it, and every few seconds there is one fault:

* kill: SIGKILL of a worker; kill coordinator: of a coordinator. They are started again at once.
* pause: SIGSTOP of any process, SIGCONT after 0.5 to 8 s.
* reset: all TCP connections to one process are reset, those of streams too.
* drain: SIGTERM of a worker, which finishes its streams and is started again.

A fault hits a role only while both of its members serve, so one of two is always left. Clients know both coordinators.

With `--engine vllm`, run by the Python of vLLM's environment, a worker takes half a minute to start: `--every 40`.
With `--step-noise` each time that a worker measures of a step is multiplied by exp(SIGMA * z), z standard normal.
With `--ttft` and `--tpot` all streams have targets, so that workers of either pool compute prompts (`local_prefill`).

* streams, completed: those offered, and those that came to their regular end.
* computed_by_decode: those of them whose prompt the decode worker computed itself, with no handoff.
* wrong_tokens: tokens that differ from the greedy ones of `transformers`, in float32.
* longest_gap_s: longest time between two tokens of one stream; longest_ttft_s: until the first.
* own_ends: how often a process ended that nobody had told to.
* leaked_blocks: KV blocks that are not free a while after the last stream, and calls or sequences that are left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from bench.chaos.faults import Fault, attack
from bench.chaos.members import ChaosCluster, running_cluster
from bench.chaos.streams import StreamTally, capacity_per_s, offer, references
from bench.machine import report, this_machine
from bench.option_values import positive_number, positive_whole, whole_number

MODEL = "smollm2-135m-instruct"
AT_ONCE = 8
CALIBRATION_S = 15.0
SETTLE_S = 90.0
LEFT = (
    "running_requests",
    "waiting_requests",
    "reserved_blocks",
    "quarantined_blocks",
    "waiting_reservations",
)


def main() -> int:
    """Runs the attack; exit code 1 where tokens were wrong, blocks leaked, or a process ended by itself."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=positive_number, default=10.0, help="length of the attack")
    parser.add_argument(
        "--load", type=positive_number, default=0.8, help="share of the measured capacity; default: 0.8"
    )
    parser.add_argument(
        "--every", type=positive_number, default=8.0, metavar="SECONDS", help="between faults; default: 8"
    )
    parser.add_argument("--prompts", type=positive_whole, default=24, help="different ones; default: 24")
    parser.add_argument("--ttft", type=positive_number, metavar="SECONDS", help="target for the first token")
    parser.add_argument("--tpot", type=positive_number, metavar="SECONDS", help="target for the others")
    parser.add_argument(
        "--step-noise", type=float, default=0.0, metavar="SIGMA", help="noise in the workers' measured times"
    )
    parser.add_argument("--seed", type=whole_number, default=0)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch", help="default: torch")
    parser.add_argument("--log", type=Path, default=Path("build/chaos.log"), help="the processes' output")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    figures = run_and_print(parser.parse_args(), _run)
    return 1 if figures["wrong_tokens"] or figures["leaked_blocks"] or figures["own_ends"] else 0


def run_and_print(
    options: argparse.Namespace, run: Callable[[argparse.Namespace], Coroutine[Any, Any, dict[str, Any]]]
) -> dict[str, Any]:
    """Runs a bench with options `log` and `json`, and prints what it has found."""
    options.log.parent.mkdir(parents=True, exist_ok=True)
    figures = asyncio.run(run(options))
    if options.json:
        print(json.dumps(figures))
    else:
        for field, value in figures.items():
            print(f"{field}: {value}")
    return figures


async def _run(options: argparse.Namespace) -> dict[str, Any]:
    known = references(options.model, options.prompts)
    tally, stop = StreamTally(), asyncio.Event()
    began_s = time.monotonic()

    def tell(fault: Fault) -> None:
        pause = f" for {fault.pause_s:.1f} s" if fault.pause_s else ""
        so_far = f"{tally.completed} of {tally.streams} streams complete"
        print(
            f"{time.monotonic() - began_s:6.1f} s: {fault.kind} {fault.role}-{fault.number}{pause}; {so_far}",
            file=sys.stderr,
        )

    targets = {"--ttft-slo": options.ttft, "--tpot-slo": options.tpot}
    slo = [word for name, value in targets.items() if value is not None for word in (name, f"{value:g}")]
    async with running_cluster(
        options.model,
        options.log,
        coordinator_options=slo,
        step_noise=options.step_noise,
        engine=options.engine,
    ) as cluster:
        # The first answers compile nothing but connect everything.
        await capacity_per_s(cluster.target, known, AT_ONCE, 3.0)
        capacity = await capacity_per_s(cluster.target, known, AT_ONCE, CALIBRATION_S)
        rate = options.load * capacity
        began_s = time.monotonic()
        load = asyncio.create_task(offer(cluster.target, known, rate, stop, tally, options.seed + 1))
        faults = await attack(cluster, options.minutes * 60, options.every, options.seed, tell)
        stop.set()
        await load
        leaked = await _left(cluster)
    figures = {
        "minutes": options.minutes,
        "capacity_per_s": round(capacity, 3),
        "offered_per_s": round(rate, 3),
        "streams": tally.streams,
        "completed": tally.completed,
        "resumed": tally.resumed,
        "computed_by_decode": tally.computed_by_decode,
        "wrong_tokens": tally.wrong_tokens,
        "leaked_blocks": sum(leaked.values()),
        "left": leaked,
        "own_ends": sum(member.own_ends for member in cluster.members),
        "faults": sum(faults.values()),
        "faults_by_kind": dict(faults),
        "longest_gap_s": round(tally.longest_gap_s, 3),
        "longest_ttft_s": round(tally.longest_ttft_s, 3),
        "errors": dict(tally.errors),
    }
    return report(
        "chaos", shlex.join(["python", "-m", "bench.chaos", *sys.argv[1:]]), this_machine(), **figures
    )


async def _left(cluster: ChaosCluster) -> dict[str, int]:
    """What is held though nothing runs, by worker and count, once everything serves again and had time to settle."""
    await cluster.until_whole()
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        left: dict[str, int] = {}
        for address in cluster.direct:
            info = await cluster.info(address)
            if info is None:
                left[f"{address} does not answer"] = 1
                continue
            for worker in info.workers:
                left |= {f"{worker.worker_id}.{name}": n for name in LEFT if (n := getattr(worker, name))}
                if missing := worker.total_blocks - worker.free_blocks:
                    left[f"{worker.worker_id}.blocks"] = missing
        if not left or time.monotonic() > deadline_s:
            return left
        await asyncio.sleep(0.5)
