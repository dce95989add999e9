"""What tiers below the KV blocks are worth: `python -m bench.kv_tiers`.

* ttft: time to the first token of a prompt whose prefix is computed, or lies in the pool, in host memory, or on a disk
  after a restart of the worker. The disk's file has just been written, so it is mostly read from the page cache.
* conversations: a synthetic trace on the real model with a pool that is too small for it.
* cluster: with `--cluster`, part of `--trace` on a prefill and a decode worker, without and with host memory below the
  pools, at the times of the trace.
* second-turn: with `--second-turn`, a conversation's second turn on a prefill and a decode worker, as its client sees
  it: its history in the pools, in host memory, and on disk after a restart of both.
* shares: hit shares by replay of the books alone, for both ways to evict; with `--trace`, of a Mooncake trace.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from autoscaler.simulation.traces.trace import BLOCK_TOKENS, load_trace
from bench.kv_tiers.conversations import Conversations
from bench.kv_tiers.second_turn import second_turn_rows
from bench.kv_tiers.shares import ReplayedPrompt, ShareRow, share_of, share_rows
from bench.kv_tiers.trace_replay import cluster_rows
from bench.kv_tiers.ttft import TieredEngine, trace_rows, ttft_rows
from bench.machine import report, this_machine
from bench.option_values import positive_number, positive_whole
from splitserve.generation.kv_blocks import extend_block_hashes

MODEL = "smollm2-135m-instruct"
BLOCK = 16
POOL_BLOCKS = 96
QUICK = Conversations(users=4, turns=2)
FULL = Conversations(users=8, turns=3)
LARGE = Conversations(users=60, turns=8, system_tokens=512, turn_tokens=(64, 400))


def conversation_prompts(trace: Conversations) -> list[ReplayedPrompt]:
    """The trace's prompts, with the hashes that the engine has for them."""
    found = []
    for prompt in trace.prompts():
        hashes: list[bytes] = []
        extend_block_hashes(hashes, prompt, BLOCK, b"", len(prompt) // BLOCK)
        found.append(ReplayedPrompt(hashes, len(prompt), BLOCK))
    return found


def mooncake_prompts(path: Path) -> list[ReplayedPrompt]:
    """The prompts of a trace whose blocks have ids."""
    return [
        ReplayedPrompt(
            [each.to_bytes(32, "big") for each in request.block_ids], request.prompt_tokens, BLOCK_TOKENS
        )
        for request in load_trace(path).requests
    ]


def shares(quick: bool, trace: Path | None) -> list[ShareRow]:
    """Replays of conversations, and of a trace if there is one; sizes are shares of all blocks of the trace."""
    prompts = conversation_prompts(QUICK if quick else LARGE)
    rows = share_rows("conversations", prompts, _sizes(prompts))
    if trace is not None:
        prompts = mooncake_prompts(trace)
        rows += share_rows(trace.stem, prompts, _sizes(prompts))
    return rows


def _sizes(prompts: Sequence[ReplayedPrompt]) -> list[tuple[int, int, int]]:
    everything = len({each for prompt in prompts for each in prompt.hashes})
    pool = max(4, everything // 32)
    return [(pool, 0, 0), *((pool, times * pool, 0) for times in (2, 4, 8, 16))]


def _row(kind: str, row: Any) -> dict[str, Any]:
    values = {
        name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(row).items()
    }
    return {"kind": kind, **values}


def _tables(rows: Iterable[dict[str, Any]]) -> Iterable[Table]:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(row["kind"], []).append(row)
    for kind, own in kinds.items():
        columns = [name for name in own[0] if name != "kind"]
        table = Table(*columns, title=kind)
        for row in own:
            table.add_row(*(str(row[name]) for name in columns))
        yield table


def main() -> int:
    """Runs the benchmark and prints its rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=positive_whole, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tokens", type=positive_whole, nargs="+", default=[512, 2000])
    parser.add_argument("--turns", type=positive_whole, default=5)
    parser.add_argument("--trace", type=Path, help="a Mooncake trace (JSON lines)")
    parser.add_argument(
        "--cluster", type=positive_whole, metavar="REQUESTS", help="only replay so many of --trace on workers"
    )
    parser.add_argument(
        "--load",
        type=positive_number,
        default=0.9,
        help="of --cluster: time to compute all prompts, over time",
    )
    parser.add_argument(
        "--second-turn", action="store_true", help="only that, with --tokens of history, on workers"
    )
    parser.add_argument("--quick", action="store_true", help="one short prompt and a short trace")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    options = parser.parse_args()
    machine = this_machine()
    rows: list[dict[str, Any]] = []
    if options.cluster:
        if options.trace is None:
            parser.error("--cluster needs --trace")
        replayed = cluster_rows(options.model, options.trace, options.cluster, options.load)
        rows = [_row("cluster", row) for row in asyncio.run(replayed)]
    elif options.second_turn:
        dealt = second_turn_rows(options.model, options.dtype, options.tokens, options.turns)
        rows = [_row("second-turn", row) for row in asyncio.run(dealt)]
    else:
        rows = _engine_rows(options)
    command = shlex.join(["python", "-m", "bench.kv_tiers", *sys.argv[1:]])
    if options.json:
        print(
            json.dumps(
                report("kv_tiers", command, machine, model=options.model, dtype=options.dtype, rows=rows)
            )
        )
        return 0
    for table in _tables(rows):
        Console().print(table)
    return 0


def _engine_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    tokens, turns, trace = ([128], 1, QUICK) if options.quick else (options.tokens, options.turns, FULL)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for length in tokens:
            # Of blocks that were written for an earlier length nothing is left: pools begin empty.
            engine = TieredEngine(
                options.model, options.dtype, options.threads, 64 + 2 * length // BLOCK, Path(folder) / "tier"
            )
            rows += [_row("ttft", row) for row in ttft_rows(engine, length, turns)]
            engine.close()
        engine = TieredEngine(
            options.model, options.dtype, options.threads, POOL_BLOCKS, Path(folder) / "tier"
        )
        prompts = conversation_prompts(trace)
        endless = share_of(prompts, sum(len(each.hashes) for each in prompts), 0, 0, "age")
        rows += [_row("conversations", row) for row in trace_rows(engine, trace, POOL_BLOCKS, endless)]
        engine.close()
    rows += [_row("shares", row) for row in shares(options.quick, options.trace)]
    return rows


if __name__ == "__main__":
    sys.exit(main())
