"""What the benches of targets share: an engine, turns with and without targets in alternation, and their table."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from bench.engine.processes.random_model import loaded_runner
from bench.machine import Machine, report
from engine.core.engine_core import EngineCore
from engine.core.model_runner import warm_up
from engine.core.step_stats import StepMeter
from engine.core.types import SamplingParams
from engine.worker.warm_up.decode_steps import measure_decode_steps
from splitserve.config.engine import EngineConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

GREEDY = SamplingParams(temperature=0.0)
TOKENS = range(1000, 30_000)
KV_BYTES = {"cpu": 2**30, "cuda": 2**32}


def engine_of(
    model: str,
    threads: int,
    core_exchange: Path | None = None,
    *,
    meter: StepMeter | None = None,
    device: str = "cpu",
    random_weights: bool = False,
) -> EngineCore:
    """A warm engine on this many cores, without a prefix cache, that has measured decode steps, as a worker has when it
    is ready. `random_weights`: see `loaded_runner`."""
    config = EngineConfig(
        dtype="bfloat16",
        device=device,
        threads=threads,
        kv_memory_bytes=KV_BYTES["cpu" if device == "cpu" else "cuda"],
        prefix_cache=False,
        core_exchange=core_exchange,
    )
    runner, tokenizer = loaded_runner(model, config, random_weights=random_weights)
    prompt_tokens, meter = warm_up(runner, None), meter or StepMeter()
    measure_decode_steps(runner, meter.fit, prompt_tokens, config.max_running_requests)
    return EngineCore(runner, config, tokenizer, meter=meter)


def medians_of_turns(turns: int, run: Callable[[int, bool], DataclassInstance]) -> list[dict[str, Any]]:
    """Runs so many turns of each kind, A B B A ..., by number and whether with targets; a row of medians of each."""
    rows: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for turn in range(turns):
        for targets in (True, False) if turn % 2 == 0 else (False, True):
            rows[targets].append(asdict(run(turn, targets)))
    return [
        {"targets": kind, **{name: round(median(row[name] for row in own), 3) for name in own[0]}}
        for kind, own in rows.items()
    ]


def show(
    bench: str,
    arguments: Sequence[str],
    machine: Machine,
    rows: Sequence[Mapping[str, Any]],
    *,
    as_json: bool,
    **load: Any,
) -> None:
    """Prints the rows as a table, or one JSON object; `load` says what was asked for."""
    if as_json:
        command = shlex.join(["python", "-m", f"bench.engine.{bench}", *arguments])
        print(json.dumps(report(bench, command, machine, **load, rows=rows)))
        return
    table = Table()
    for name in rows[0]:
        table.add_column(name, justify="right")
    for values in rows:
        table.add_row(*(str(value) for value in values.values()))
    Console().print(table)
