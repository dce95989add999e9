"""The engine against the machine's limits, and against peers: `python -m bench.engine [--peer vllm] [--json]`.

On a GPU: `python -m bench.engine --device cuda --random-weights llama-3.1-8b`, a model of these shapes that needs no
files (`bench/models`). Its limits are the rates of copying in the GPU's memory and of bf16 matrix products there.

Every engine runs in a process of its own with as many threads and is asked the same questions in turns, so that what
else the machine does meets all alike; while one works the others wait. A decode row is the median time of a step in
which every sequence of the batch gets a token; a prefill row that of a whole prompt, first token included. Times hold
everything an engine does for a step: scheduling, model, sampling, detokenization.

`share_of_limit` compares with what the same threads reach in the same minute: for decode bytes of weights and KV over
the time, by the rate of reading memory; for prefill operations over the time, by the rate of bf16 matrix products.

vLLM needs an environment of its own, made by `make peer-vllm`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from bench.engine_rows import OWN, Case, Row, Work, make_row, medians
from bench.machine import report, this_machine
from splitserve.config import ClusterConfig
from splitserve.core_layout import available_cores
from splitserve.models import resolve_model

DECODE = [(batch, context) for context in (128, 1024, 4096) for batch in (1, 8, 32, 64)]
PROMPTS = (128, 512, 2048, 8192)
STEPS = 12
PROMPT_STEPS = 5
LONG_PROMPT, LONG_PROMPT_STEPS = 8192, 3
MANY_TOKENS = 64 * 1024
"""A case with more tokens of context in all is left out: computing its prompts takes minutes on a few cores."""
MANY_TOKENS_ON_GPU = 256 * 1024
TURNS = 3
PEERS = ("vllm", "transformers")
MODELS = Path(__file__).parent / "models"
"""Configurations for `--random-weights`."""
SETTLE_S = 0.2


def cases(context_tokens: int, many_tokens: int) -> list[Case]:
    """What is timed of a model with that context."""
    decode = [
        Case("decode", batch, context, STEPS)
        for batch, context in DECODE
        if context + STEPS + 8 < context_tokens and batch * context <= many_tokens
    ]
    prefill = [
        Case("prefill", 1, tokens, PROMPT_STEPS if tokens < LONG_PROMPT else LONG_PROMPT_STEPS)
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


class EngineProcess:
    """One engine, asked over its standard streams."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name, self._process = name, process
        self._read()

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer. Raises RuntimeError when the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self._process.wait()}; its log tells why")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def engine_process(
    name: str, folder: str, threads: int, logs: Path, options: Sequence[str] = ()
) -> Iterator[EngineProcess]:
    """Starts an engine on the first `threads` cores; ends it after use. `options` are for our own."""
    cores = available_cores()[:threads]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "bench.engines.own", folder, str(threads), *options]
    if name == "transformers":
        command = [sys.executable, "-m", "bench.engines.transformers_loop", folder, str(threads)]
    elif name == "vllm":
        home = Path(".peers/vllm").resolve()
        command = [
            str(home / "bin" / "python"),
            str(Path(__file__).parent / "engines" / "vllm_steps.py"),
            folder,
        ]
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "8",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(home / "cache"),
            "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}",
        }
    with (logs / f"{name}-{threads}.log").open("w") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),  # noqa: PLW1509 - no threads here
        )
    try:
        yield EngineProcess(name, process)
    finally:
        process.kill()
        process.wait()


def measure(
    asked: Sequence[Case],
    folder: str,
    threads: int,
    peers: Sequence[str],
    logs: Path,
    tell: Console,
    options: Sequence[str] = (),
) -> tuple[list[Row], dict[str, Any]]:
    """All cases with so many threads, and the machine's limits, medians of those seen beside each."""
    work, rows = work_of(folder), []
    seen: list[dict[str, Any]] = []
    with ExitStack() as stack:
        engines = [
            stack.enter_context(engine_process(n, folder, threads, logs, options)) for n in (OWN, *peers)
        ]
        for case in asked:
            beside: list[dict[str, Any]] = []
            steps: dict[str, list[float]] = {engine.name: [] for engine in engines}
            outside_s: list[float] = []
            for turn in range(TURNS):
                # What two cores of a shared host can read changes by half from one minute to the next.
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


def table(rows: Sequence[Row]) -> Table:
    """As people read it."""
    shown = Table(title="Engine")
    columns = tuple(asdict(rows[0]))
    for column in columns:
        shown.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        shown.add_row(*("" if value is None else str(value) for value in asdict(row).values()))
    return shown


def main() -> int:
    """Progress goes to stderr; the table, or one JSON object with `--json`, to stdout."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=ClusterConfig().model)
    parser.add_argument(
        "--device", default="cpu", help="cpu (default) or cuda[:N]; peers compute on cpu only"
    )
    parser.add_argument(
        "--random-weights",
        choices=sorted(folder.name for folder in MODELS.iterdir()),
        help="a model of these shapes, made up",
    )
    parser.add_argument("--threads", type=int, nargs="+", help="default: all cores, and on cpu one as well")
    parser.add_argument("--peer", choices=PEERS, action="append", default=[])
    parser.add_argument("--phase", choices=("decode", "prefill"), help="only this one")
    parser.add_argument("--batch", type=int, nargs="+", help="only these batches of decode")
    parser.add_argument("--context", type=int, nargs="+", help="only these lengths")
    parser.add_argument(
        "--logs", type=Path, default=Path("."), metavar="FOLDER", help="for the engines' stderr"
    )
    parser.add_argument("--json", action="store_true")
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
    rows: list[Row] = []
    limits: dict[int, dict[str, Any]] = {}
    all_cores = len(available_cores())
    for threads in options.threads or ([all_cores, 1] if on_cpu else [all_cores]):
        more, limits[threads] = measure(asked, folder, threads, options.peer, options.logs, tell, own)
        rows += more
    if options.json:
        command = shlex.join(["python", "-m", "bench.engine", *sys.argv[1:]])
        found = report("engine", command, machine, limits=limits, rows=[asdict(row) for row in rows])
        print(json.dumps(found, indent=2))
    else:
        Console().print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
