"""Engine `vllm` beside vLLM itself, on the same cores: `python -m bench.vllm [--json] [--parts decode,handoff,cpu]`.

Run it with the Python of vLLM's environment (`make setup-vllm`). The two systems run at once and take turns with the
same prompts; while one has its turn all processes of the other are stopped (SIGSTOP). A ratio is splitserve's by
vLLM's, the median of those of neighbours in time; all else are medians over the repeats. Both compute in `--dtype`,
without compilation. All times are taken at the client.

* decode: splitserve's pair, one prefill and one decode worker, the decode worker with all its processes on one core,
  beside one vLLM server whose engine has that core; its API server may use all cores. Both are asked over HTTP by the
  same client, prompts of 16 tokens. TPOT is the median over the streams of their mean time between tokens, throughput
  the tokens a second of all streams; both while all streams decode, from the last first token to the first end.
* cpu: CPU time a token in that same time, with the most streams: `front` is the decode worker without the processes
  that it has started, and vLLM's API server likewise; `engine` is what they have started. The coordinator speaks HTTP
  for splitserve's workers, which vLLM's API server does itself.
* handoff: beside two vLLM servers with NixlPushConnector, a core each. The client asks decode first and then prefill,
  under one X-Request-Id, without a proxy; splitserve's coordinator is on the way. `second_token`: from prefill's
  first token, as the client learns of it, to the second token. `ttft`: to the first token of the stream, which at
  vLLM is the decode server's; `prefill`: splitserve's TTFT beside the prefill server's answer, with the same token.
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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.machine import report, this_machine
from bench.option_values import positive_whole, whole_number
from bench.peers.vllm_server import Layout
from bench.vllm.decode import DecodePlan, decode_turns
from bench.vllm.handoff import handoff_rows
from bench.vllm.models import NAMES, SMALL, measured_model
from bench.vllm.rows import cpu_row, decode_row, table
from launcher.cluster.placement import available_cores
from splitserve.errors import SplitserveError

PARTS = ("decode", "handoff", "cpu")
STREAMS = (1, 8, 64)
TEMPERATURES = (0.0, 0.8)
LENGTHS = (128, 512, 1000)
REPEATS = 3
HANDOFF_REPEATS = 9
OUTPUT_TOKENS = 256
EXIT_STOPPED = 130
GPU_SHARE = 0.2
LONGEST_TOKENS = 512
"""What an answer and the tokens around a prompt take, at most."""
TITLES = {"rows": "Decode", "cpu": "CPU", "handoff": "Handoff"}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.vllm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", type=_parts, default=PARTS, help=f"default: {','.join(PARTS)}")
    parser.add_argument("--models", choices=NAMES, nargs="+", default=NAMES, help="of decode and cpu")
    parser.add_argument("--streams", type=positive_whole, nargs="+", default=STREAMS)
    parser.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES)
    parser.add_argument("--lengths", type=positive_whole, nargs="+", default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--repeats", type=positive_whole, default=REPEATS, help="of decode and cpu")
    parser.add_argument("--handoff-repeats", type=positive_whole, default=HANDOFF_REPEATS)
    parser.add_argument("--tokens", type=positive_whole, default=OUTPUT_TOKENS, help="of an answer of decode")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: bfloat16"
    )
    parser.add_argument("--seed", type=whole_number, default=1)
    parser.add_argument(
        "--environment", type=Path, default=Path(sys.prefix), help="vLLM's; default: this Python's"
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help=f"all engines on one GPU, each with {GPU_SHARE:g} of its memory and compiled as vLLM does it",
    )
    parser.add_argument(
        "--vllm-whole-server",
        action="store_true",
        help="in decode and cpu, vLLM's API server on that core too",
    )
    parser.add_argument("--log-dir", type=Path, help="keep the servers' logs there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write that object to a file, too")
    return parser.parse_args(arguments)


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if unknown := set(parts) - set(PARTS):
        raise argparse.ArgumentTypeError(f"must be of {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    return parts


def _layout(options: argparse.Namespace, model: str, log_dir: Path) -> Layout:
    """On CPU prefill has the first core, decode the last, and nothing is compiled, as splitserve runs vLLM there."""
    cores = available_cores()
    return Layout(
        options.environment,
        model,
        log_dir,
        (cores, cores) if options.gpu else (cores[:1], cores[-1:]),
        context_tokens=max(4096, max(options.lengths) + LONGEST_TOKENS),
        eager=not options.gpu,
        whole_server=options.vllm_whole_server,
        dtype=options.dtype,
        max_streams=max(options.streams),
        gpu_share=GPU_SHARE if options.gpu else None,
    )


async def measure(options: argparse.Namespace, log_dir: Path, tell: Console) -> dict[str, list[Any]]:
    """The rows of the wanted parts, by their names in the report."""
    found: dict[str, list[Any]] = {}
    most = max(options.streams)
    plan = DecodePlan(
        options.streams if "decode" in options.parts else [most],
        options.temperatures,
        options.repeats,
        options.tokens,
        options.seed,
    )
    with tempfile.TemporaryDirectory(prefix="bench-vllm-models-") as folder:
        for name in options.models if {"decode", "cpu"} & set(options.parts) else ():
            model = measured_model(name, Path(folder))
            layout = _layout(options, model.path, log_dir)
            turns = await decode_turns(model, layout, plan, tell)
            if "decode" in options.parts:
                found.setdefault("rows", []).extend(decode_row(case, pairs) for case, pairs in turns.items())
            if "cpu" in options.parts:
                with_most = {case: pairs for case, pairs in turns.items() if case.streams == most}
                found.setdefault("cpu", []).extend(cpu_row(case, pairs) for case, pairs in with_most.items())
        if "handoff" in options.parts:
            path = measured_model(SMALL, Path(folder)).path
            layout = replace(_layout(options, path, log_dir), push=True, whole_server=False)
            found["handoff"] = await handoff_rows(
                layout, options.lengths, options.handoff_repeats, options.seed, tell
            )
    return found


async def _until_stopped(options: argparse.Namespace, log_dir: Path, tell: Console) -> dict[str, list[Any]]:
    """As `measure`. SIGINT and SIGTERM end it with all servers, which would stand still for ever. Raises
    CancelledError then."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await measure(options, log_dir, tell)


def main(arguments: Sequence[str] | None = None) -> int:
    """Progress goes to stderr; the tables, or one JSON object with `--json`, to stdout. Exit code 1 if a system failed,
    130 if stopped by a signal."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    machine, tell = this_machine(), Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="bench-vllm-logs-") as logs:
        log_dir = options.log_dir or Path(logs)
        log_dir.mkdir(parents=True, exist_ok=True)
        try:
            found = asyncio.run(_until_stopped(options, log_dir, tell))
        except (SplitserveError, RuntimeError, OSError) as error:
            tell.print(f"bench.vllm: {error}", style="red")
            return 1
        except asyncio.CancelledError:
            tell.print("stopped")
            return EXIT_STOPPED
    command = shlex.join(["python", "-m", "bench.vllm", *arguments])
    content = {part: [asdict(row) for row in rows] for part, rows in found.items()}
    text = json.dumps(report("vllm", command, machine, **content), indent=2)
    if options.out is not None:
        options.out.write_text(text + "\n")
    if options.json:
        print(text)
    else:
        for part, rows in found.items():
            Console().print(table(TITLES[part], rows))
    return 0
