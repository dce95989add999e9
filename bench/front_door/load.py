"""The load generator, a separate process: `python -m bench.front_door.load`.

Keeps a number of requests in flight for a while, then prints one JSON object: tokens received, their ages, and
the CPU time that the loaded process used meanwhile. With `--open` it opens that many streams instead, waits for each
one's first token, and prints the resident memory of the loaded process at some points, and the share of a core that it
then takes while nothing happens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import time
from typing import Any

import uvloop

from bench.front_door.direct_load import run_direct
from bench.front_door.grpc_load import kserve_api, own_api, run_grpc
from bench.front_door.sse_load import run_sse
from bench.front_door.tally import ProcessMeter, Tally

PROMPT = "Tell me a short story about the sea, please, number"
STEPS = 10
"""Numbers of open streams at which memory is read."""
OPENED_WAIT_S = 90.0


def parse_arguments() -> argparse.Namespace:
    """The command-line parser."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--entrypoint", choices=("grpc", "sse", "kserve", "direct"), default="grpc")
    parser.add_argument("--target", required=True, help="host:port")
    parser.add_argument("--pid", type=int, required=True, help="process whose CPU time counts")
    parser.add_argument("--model", default="")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--warm-s", type=float, default=1.5)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--open", action="store_true")
    return parser.parse_args()


def _work(args: argparse.Namespace, tally: Tally, streams: int) -> Any:
    prompts = [f"{PROMPT} {number}" for number in range(streams)]
    match args.entrypoint:
        case "grpc":
            return run_grpc(tally, args.target, own_api(args.model, prompts, args.max_tokens))
        case "kserve":
            return run_grpc(tally, args.target, kserve_api(args.model, prompts, args.max_tokens))
        case "sse":
            return run_sse(tally, args.target, args.model, streams, PROMPT, args.max_tokens)
    return run_direct(tally, args.target, streams, args.max_tokens)


async def measured(args: argparse.Namespace) -> dict[str, Any]:
    """One window."""
    tally = Tally(ProcessMeter(args.pid))
    work = asyncio.ensure_future(_work(args, tally, args.streams))
    try:
        await asyncio.wait([work], timeout=args.warm_s)
        gc.freeze()
        tally.begin()
        await asyncio.wait([work], timeout=args.seconds)
        result = tally.result()
        if work.done():
            await work
        return result
    finally:
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work


async def opened(args: argparse.Namespace) -> dict[str, Any]:
    """Memory against streams."""
    meter, works, points = ProcessMeter(args.pid), [], []
    try:
        for _ in range(STEPS):
            tally = Tally(meter, awaited=args.streams // STEPS)
            tally.begin()
            works.append(asyncio.ensure_future(_work(args, tally, args.streams // STEPS)))
            async with asyncio.timeout(OPENED_WAIT_S):
                await tally.reached.wait()
            points.append((len(works) * tally.awaited, meter.rss_bytes()))
        began_s, cpu_s = time.monotonic(), meter.cpu_s()
        await asyncio.sleep(args.seconds)
        idle_share = (meter.cpu_s() - cpu_s) / (time.monotonic() - began_s)
        return {"rss_bytes": points, "idle_cpu_share": idle_share}
    finally:
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)


def main() -> None:
    """Prints the result."""
    args = parse_arguments()
    print(json.dumps(uvloop.run(opened(args) if args.open else measured(args))), flush=True)


if __name__ == "__main__":
    main()
