"""A spot notice under load, and whether its streams notice: `python -m bench.chaos.spot [--json]`.

The cluster of `bench.chaos`: two coordinators, two prefill and two decode workers with the real model in float32. Short
and long streams arrive at `--load` of the tokens that the undisturbed cluster gives. Then worker decode-0 gets a notice
of `--notice` seconds by signal, takes nothing new, and is killed when they are over. It is not started again. With
`--long-tokens 900` a stream takes longer than 30 s, so some of those that are there at the notice have to move.

* streams, completed, failed: those offered, those that came to their regular end, and the rest.
* at_notice, at_end: streams on that worker when the notice came, and a second before it was killed.
* resumed: streams that needed more than one attempt; moved: those of them that had left the worker before its end.
* longest_s: the longest stream from its begin to its end.
* wrong_tokens: tokens that differ from the greedy ones of `transformers`, in float32.
* longest_gap_s: longest time between two tokens of one stream.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.chaos.members import ChaosCluster, running_cluster
from bench.chaos.run import AT_ONCE, MODEL, run_and_print
from bench.chaos.streams import Known, StreamTally, capacity_per_s, offer, references
from bench.machine import report, this_machine
from bench.option_values import positive_number, positive_whole, whole_number

PREEMPTED = "decode-0"
CALIBRATION_S = 10.0
SHORT_PROMPTS, LONG_SHARE = 4, 2
"""Different short prompts, and how often the long one stands beside them. Its reference takes minutes."""
STREAM_S = 600.0
"""A long one on a busy machine, with what it has to compute again."""


def main() -> int:
    """Runs it; exit code 1 where a stream failed or tokens were wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--notice",
        type=positive_number,
        default=30.0,
        metavar="SECONDS",
        help="length of the notice; default: 30",
    )
    parser.add_argument(
        "--before",
        type=positive_number,
        default=15.0,
        metavar="SECONDS",
        help="of load before it; default: 15",
    )
    parser.add_argument(
        "--load",
        type=positive_number,
        default=0.3,
        help="share of the measured capacity, in tokens; default: 0.3",
    )
    parser.add_argument(
        "--long-tokens",
        type=positive_whole,
        default=400,
        metavar="TOKENS",
        help="length of long answers; default: 400",
    )
    parser.add_argument("--seed", type=whole_number, default=0)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--log", type=Path, default=Path("build/spot.log"), help="the processes' output")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    found = run_and_print(parser.parse_args(), _run)
    return 1 if found["failed"] or found["wrong_tokens"] else 0


async def _run(options: argparse.Namespace) -> dict[str, Any]:
    short = references(options.model, SHORT_PROMPTS)
    known = [*short, *LONG_SHARE * references(options.model, 1, seed=6, max_tokens=options.long_tokens)]
    tally, stop = StreamTally(STREAM_S), asyncio.Event()
    worker_options = ("--spot-notice", str(options.notice))
    async with running_cluster(options.model, options.log, worker_options) as cluster:
        # The first answers compile nothing but connect everything.
        await capacity_per_s(cluster.target, short, AT_ONCE, 3.0)
        capacity = await capacity_per_s(cluster.target, short, AT_ONCE, CALIBRATION_S)
        rate = options.load * capacity * _mean_tokens(short) / _mean_tokens(known)
        load = asyncio.create_task(offer(cluster.target, known, rate, stop, tally, options.seed + 1))
        await asyncio.sleep(options.before)
        worker = next(member for member in cluster.members if member.name == PREEMPTED)
        at_notice = await _streams_on_it(cluster)
        worker.signal(signal.SIGUSR1)
        await asyncio.sleep(options.notice - 1)
        at_end = await _streams_on_it(cluster)
        await asyncio.sleep(1)
        worker.lose()
        stop.set()
        await load
    found = {
        "notice_s": options.notice,
        "capacity_per_s": round(capacity, 3),
        "offered_per_s": round(rate, 3),
        "streams": tally.streams,
        "completed": tally.completed,
        "failed": tally.streams - tally.completed,
        "resumed": tally.resumed,
        "moved": max(0, tally.resumed - at_end),
        "wrong_tokens": tally.wrong_tokens,
        "at_notice": at_notice,
        "at_end": at_end,
        "longest_gap_s": round(tally.longest_gap_s, 3),
        "longest_ttft_s": round(tally.longest_ttft_s, 3),
        "longest_s": round(tally.longest_s, 3),
        "errors": dict(tally.errors),
    }
    command = shlex.join(["python", "-m", "bench.chaos.spot", *sys.argv[1:]])
    return report("spot", command, this_machine(), **found)


def _mean_tokens(known: Sequence[Known]) -> float:
    return fmean(len(one.answer) for one in known)


async def _streams_on_it(cluster: ChaosCluster) -> int:
    info = await cluster.info(cluster.direct[0])
    workers = [] if info is None else [w for w in info.workers if w.worker_id == PREEMPTED]
    return sum(worker.running_requests + worker.waiting_requests for worker in workers)


if __name__ == "__main__":
    sys.exit(main())
