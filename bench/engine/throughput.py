"""The engine against the machine's limits, and against peers: `python -m bench.engine [--peer vllm] [--json]`.

On a GPU: `python -m bench.engine --device cuda --random-weights llama-3.1-8b`, a model of these shapes that needs no
files but its configuration (`bench/random_models`). Its limits are the rates of copying in the GPU's memory and of bf16
matrix products there.

Every engine runs in its own process with equally many threads and gets the same questions in turns, so that what
else the machine does meets all alike; while one works the others wait. A decode row is the median time of a step in
which every sequence of the batch gets a token; a prefill row that of a whole prompt, first token included. Times hold
everything an engine does for a step: scheduling, model, sampling, detokenization.

`share_of_limit` compares with what the same threads reach in the same minute: for decode bytes of weights and KV over
the time, by the rate of reading memory; for prefill operations over the time, by the rate of bf16 matrix products.

vLLM needs its own environment, made by `make peer-vllm`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from bench.engine.processes.engine_process import GIB, MOST_KV_GIB, engine_command, engine_process, kv_gib
from bench.engine.rows import OWN, EngineCase, EngineRow, Work, make_row, medians
from bench.machine import report, this_machine
from bench.option_values import positive_whole
from launcher.cluster.placement import available_cores
from splitserve.config.cluster import ClusterConfig
from splitserve.errors import SplitserveError
from splitserve.models.sources import resolve_model

DECODE = [(batch, context) for context in (128, 1024, 4096) for batch in (1, 8, 32, 64)]
PROMPTS = (128, 512, 2048, 8192)
STEPS = 12
PROMPT_STEPS = 5
LONG_PROMPT, LONG_PROMPT_STEPS = 8192, 3
MANY_TOKENS = 64 * 1024
"""Cases with more context tokens in total are skipped: their prompts take minutes on a few cores."""
MANY_TOKENS_ON_GPU = 256 * 1024
TURNS = 3
PEERS = ("vllm", "transformers")
MODELS = Path(str(files("bench"))) / "random_models"
"""Configurations for `--random-weights`, one per folder."""
LOGS = Path("build/bench-engine")
SETTLE_S = 0.2


def cases(context_tokens: int, many_tokens: int) -> list[EngineCase]:
    """What is timed of a model with that context."""
    decode = [
        EngineCase("decode", batch, context, STEPS)
        for batch, context in DECODE
        if context + STEPS + 8 < context_tokens and batch * context <= many_tokens
    ]
    prefill = [
        EngineCase("prefill", 1, tokens, PROMPT_STEPS if tokens < LONG_PROMPT else LONG_PROMPT_STEPS)
        for tokens in PROMPTS
        if tokens + 1 < context_tokens
    ]
    return decode + prefill


def work_of(folder: str) -> Work:
    """The model's least work, from its configuration: decoder layers with gated MLPs."""
    config = AutoConfig.from_pretrained(folder)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    layer = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    return Work(
        weights=config.num_hidden_layers * layer,
        output=config.vocab_size * config.hidden_size,
        kv_bytes=2 * 2 * keys * config.num_hidden_layers,
        attention=config.num_hidden_layers * queries,
    )


def measure(
    asked: Sequence[EngineCase],
    folder: str,
    threads: int,
    peers: Sequence[str],
    logs: Path,
    tell: Console,
    options: Sequence[str] = (),
    *,
    on_cpu: bool = True,
) -> tuple[list[EngineRow], dict[str, Any]]:
    """All cases with `threads` threads, and the machine's limits: medians of those measured beside each case.

    Raises UnavailableError when an engine ends, or when there is too little memory for the largest case.
    """
    work, rows, kv_space_gib = work_of(folder), [], MOST_KV_GIB
    if on_cpu:
        needed = max((work.kv_needed(case) for case in asked), default=0)
        kv_space_gib = kv_gib(psutil.virtual_memory().available, needed, work.weight_bytes, 1 + len(peers))
        options = [*options, "--kv-bytes", str(kv_space_gib * GIB)]
    seen: list[dict[str, Any]] = []
    with ExitStack() as stack:
        engines = []
        for name in (OWN, *peers):
            command = engine_command(name, folder, threads, options, kv_space_gib)
            engines.append(stack.enter_context(engine_process(command, logs / f"{name}-{threads}.log")))
        for case in asked:
            beside: list[dict[str, Any]] = []
            steps: dict[str, list[float]] = {engine.name: [] for engine in engines}
            outside_s: list[float] = []
            for turn in range(TURNS):
                # Memory bandwidth on a shared host varies by half from one minute to the next.
                beside.append(engines[0].ask({"phase": "limits"}))
                for engine in engines if turn % 2 else reversed(engines):
                    answer = engine.ask(case.question)
                    steps[engine.name] += answer["step_s"]
                    outside_s += answer.get("outside_s", [])
                    time.sleep(SETTLE_S)
            rows.append(make_row(case, threads, steps, outside_s, work, medians(beside)))
            tell.print(rows[-1])
            seen += beside
    return rows, medians(seen)


def table(rows: Sequence[EngineRow]) -> Table:
    """The result as a table."""
    shown = Table(title="Engine")
    columns = tuple(asdict(rows[0]))
    for column in columns:
        shown.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        shown.add_row(*("" if value is None else str(value) for value in asdict(row).values()))
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=ClusterConfig().model)
    parser.add_argument(
        "--device", default="cpu", help="cpu (default) or cuda[:N]; peers compute on cpu only"
    )
    parser.add_argument(
        "--random-weights",
        choices=sorted(folder.name for folder in MODELS.iterdir()),
        help="a random model of these shapes",
    )
    parser.add_argument(
        "--threads", type=positive_whole, nargs="+", help="default: all cores, and on cpu one as well"
    )
    parser.add_argument("--peer", choices=PEERS, action="append", default=[])
    parser.add_argument("--phase", choices=("decode", "prefill"), help="only this one")
    parser.add_argument("--batch", type=positive_whole, nargs="+", help="only these batches of decode")
    parser.add_argument("--context", type=positive_whole, nargs="+", help="only these lengths")
    parser.add_argument(
        "--logs", type=Path, default=LOGS, metavar="FOLDER", help=f"for the engines' stderr (default: {LOGS})"
    )
    parser.add_argument("--json", action="store_true")
    return parser


def main() -> int:
    """Progress goes to stderr; the table, or one JSON object with `--json`, to stdout."""
    parser = _parser()
    options = parser.parse_args()
    machine, tell = this_machine(), Console(stderr=True)
    on_cpu = options.device == "cpu"
    if options.peer and (not on_cpu or options.random_weights):
        parser.error("peers need --device cpu and a model with weights")
    own = ["--device", options.device]
    if options.random_weights:
        folder = str(MODELS / options.random_weights)
        own.append("--random-weights")
    else:
        folder = str(resolve_model(options.model).path)
    limit: int = AutoConfig.from_pretrained(folder).max_position_embeddings
    asked = [
        case
        for case in cases(limit, MANY_TOKENS if on_cpu else MANY_TOKENS_ON_GPU)
        if (options.phase in (None, case.phase))
        and (not options.batch or case.phase == "prefill" or case.batch in options.batch)
        and (not options.context or case.context in options.context)
    ]
    if not asked:
        parser.error(
            f"no case of these with a context of {limit} tokens: see DECODE and PROMPTS in this module"
        )
    rows: list[EngineRow] = []
    limits: dict[int, dict[str, Any]] = {}
    all_cores = len(available_cores())
    try:
        for threads in options.threads or ([all_cores, 1] if on_cpu else [all_cores]):
            more, limits[threads] = measure(
                asked, folder, threads, options.peer, options.logs, tell, own, on_cpu=on_cpu
            )
            rows += more
    except SplitserveError as error:
        parser.exit(1, f"{parser.prog}: {error.message}\n")
    if options.json:
        command = shlex.join(["python", "-m", "bench.engine", *sys.argv[1:]])
        content = report("engine", command, machine, limits=limits, rows=[asdict(row) for row in rows])
        print(json.dumps(content, indent=2))
    else:
        Console().print(table(rows))
    return 0
