"""What laying out a step costs the host: `python -m bench.engine.step_layout`.

Decode steps of the CUDA backend, from scheduled sequences to the arrays that its kernels read, on cpu tensors: copies
to a device are copies in memory here, and nothing is computed. `kept_ms`: block tables stay from step to step, after
the first one (`kept_first_ms`). `anew_ms`: all of them are sent in each step. In turns, one thread, medians.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from statistics import median
from typing import Any

import torch

from bench.option_values import positive_whole
from engine.backends.cuda.block_table import DeviceBlockTable
from engine.backends.cuda.staging import Staging
from engine.backends.interface import flatten
from engine.core.model_runner import SamplingParams, ScheduledSequence
from splitserve.generation.kv_blocks import blocks_for

BLOCK = 16
CASES = ((1, 2000), (32, 2000), (256, 2000), (256, 8000), (32, 32000))
"""Sequences, and tokens of each."""


class StepLayout:
    """One way to lay out the steps of a batch that goes on and on."""

    def __init__(self, sequences: int, context: int, *, kept: bool) -> None:
        cpu = torch.device("cpu")
        self._kept = kept
        self._table = DeviceBlockTable(sequences, blocks_for(2 * context, BLOCK), BLOCK, cpu)
        self._staging = Staging(1 << 16, cpu)
        self._sequences = sequences

    def step(self, batch: list[ScheduledSequence]) -> float:
        """Seconds that it takes."""
        if not self._kept:
            batch = [sequence._replace(table_id=0) for sequence in batch]
        begin = time.perf_counter()
        self._staging.stage(self._table.place(flatten(batch)).padded(self._sequences))
        return time.perf_counter() - begin


def measure(sequences: int, context: int, steps: int) -> dict[str, Any]:
    """One row: the time of each way."""
    pick = random.Random(0)
    length = context + steps
    width = blocks_for(length, BLOCK)
    blocks = pick.sample(range(sequences * width), sequences * width)
    tables = [blocks[row * width : (row + 1) * width] for row in range(sequences)]
    tokens = list(range(length))
    begins = [context - pick.randrange(BLOCK) for _ in tables]
    kept, anew = (StepLayout(sequences, context, kept=way) for way in (True, False))
    times: tuple[list[float], list[float]] = ([], [])
    for step in range(steps):
        batch = [
            ScheduledSequence("", tokens, 1, begin + step, 1, table, True, SamplingParams(), table_id=row + 1)
            for row, (begin, table) in enumerate(zip(begins, tables, strict=True))
        ]
        for layout, taken in zip((kept, anew), times, strict=True):
            taken.append(layout.step(batch))
    first, *later = times[0]
    return {
        "sequences": sequences,
        "context": context,
        "anew_ms": round(median(times[1]) * 1e3, 3),
        "kept_ms": round(median(later) * 1e3, 3),
        "kept_first_ms": round(first * 1e3, 3),
    }


def main() -> None:
    """Prints a row for each of `CASES`: a line of text, or one JSON document with `--json`."""
    parser = argparse.ArgumentParser(description="host time to lay out a decode step")
    parser.add_argument("--steps", type=positive_whole, default=160, help="per case; blocks end every 16")
    parser.add_argument("--json", action="store_true", help="a JSON document instead of lines")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(sequences, context, arguments.steps) for sequences, context in CASES]
    if arguments.json:
        print(json.dumps({"rows": rows}))
        return
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
