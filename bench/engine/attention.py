"""Decode attention on cpu against reading the same KV: `python -m bench.engine.attention [--json]`. Under a minute.

The kernel alone, over the pool's blocks of all layers of SmolLM2-135M's shape, as one step calls it; blocks are in
random order, as after hours of service. In turns with it (A B B A ...) the same threads read each layer's piece of the
same blocks, in the order of the block tables, and compute nothing. Of each case:

* attend_ms, read_ms: medians of a pass over all layers;
* attend_gb_per_s, read_gb_per_s: bytes of KV over these times;
* share: the median over the turns of read_ms / attend_ms of the same turn;
* speedup: the median over the turns of bfloat16's attend_ms / attend_ms. With `--kv bfloat16 int8` both are in the same
turns.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

import numpy as np
import torch

from bench.engine.turns import show
from bench.machine import this_machine
from bench.option_values import positive_whole
from engine.backends.cpu.attention import DecodeInputs
from engine.backends.cpu.kernels import CpuKernels
from engine.backends.cpu.ops import Code, Ops, attend_op, read_op
from engine.core.types import SamplingParams, ScheduledSequence
from engine.kv_cache.memory import KvCacheMemory
from kv_transfer.layout import INT8, KvLayout

BFLOAT16 = "bfloat16"
CASES = ("8x1024", "32x1024", "8x4096")
LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 30, 9, 3, 64, 16
TURNS = 12


@dataclass(frozen=True)
class AttentionRow:
    """One case; see the module."""

    kv: str
    batch: int
    context_tokens: int
    threads: int
    attend_ms: float
    read_ms: float
    attend_gb_per_s: float
    read_gb_per_s: float
    share: float
    speedup: float | None


class AttentionCase:
    """KV of `batch` sequences of `context` tokens in a pool of their own, and the operations of one step over it."""

    def __init__(self, batch: int, context: int, kv: str = BFLOAT16) -> None:
        self.batch, self.context, self.kv = batch, context, kv
        layout = KvLayout("model", kv, BLOCK, LAYERS, KV_HEADS, HEAD_DIM)
        columns = -(-context // BLOCK)
        num_blocks = batch * columns
        self.pool = KvCacheMemory(layout, num_blocks, torch.device("cpu"))
        if self.pool.scales is None:
            self.pool.tensor.view(torch.int16).random_(0x3C00, 0x3F80)  # 0.008 to 1.0
        else:
            self.pool.bytes.random_(0, 255)
            self.pool.scales.fill_(1 / 127)
        blocks = random.Random(0).sample(range(num_blocks), num_blocks)
        self.table = torch.tensor(blocks, dtype=torch.int32)
        self.inputs = DecodeInputs(batch, context, BLOCK)
        tables = [blocks[row * columns : (row + 1) * columns] for row in range(batch)]
        self.inputs.fill(
            [
                ScheduledSequence(str(row), [0] * context, 1, context - 1, 1, table, True, SamplingParams())
                for row, table in enumerate(tables)
            ]
        )
        self._query = torch.randn(HEADS, batch, HEAD_DIM).to(torch.bfloat16)
        self._key, self._value = torch.randn(2, KV_HEADS, batch, HEAD_DIM).to(torch.bfloat16)
        self.output = torch.empty(batch, HEADS, HEAD_DIM, dtype=torch.bfloat16)

    @property
    def kv_bytes(self) -> int:
        """Of all blocks: what one pass reads."""
        return int(self.pool.bytes.numel())

    def ops(self) -> Ops:
        """One ATTEND for each layer."""
        parts = (self._query, self._key, self._value, self.output)
        return np.concatenate(
            [
                attend_op(
                    Code.ATTEND,
                    *parts,
                    self.pool.view(layer),
                    self.inputs.step,
                    scale=HEAD_DIM**-0.5,
                    softcap=None,
                    window=None,
                )
                for layer in range(LAYERS)
            ]
        )

    def reads(self, threads: int) -> Ops:
        """One READ for each layer, of the same blocks."""
        pieces = self.pool.bytes.view(len(self.pool.bytes), LAYERS, -1).unbind(1)
        self._seen = torch.zeros(threads, dtype=torch.int64)
        # READ takes whole 256 bytes: a piece's last ones, some of the scales, are left out.
        whole = pieces[0].shape[1] // 256 * 256
        return np.concatenate([read_op(piece[:, :whole], self.table, self._seen) for piece in pieces])


def time_cases(
    cases: Sequence[AttentionCase], kernels: CpuKernels, threads: int, turns: int
) -> list[AttentionRow]:
    """Times attention and reading of all cases in turns, after one pass of each."""
    works = [work for case in cases for work in (case.ops(), case.reads(threads))]
    times: list[list[float]] = [[] for _ in works]
    for turn in range(turns + 1):
        for index in range(len(works)) if turn % 2 else reversed(range(len(works))):
            began = time.perf_counter()
            kernels.run(works[index])
            times[index].append(time.perf_counter() - began)
    times = [found[1:] for found in times]
    base = next((times[2 * n] for n, case in enumerate(cases) if case.kv == BFLOAT16), None)
    return [_row(case, threads, times[2 * n], times[2 * n + 1], base) for n, case in enumerate(cases)]


def _row(
    case: AttentionCase,
    threads: int,
    attend_s: Sequence[float],
    read_s: Sequence[float],
    base_s: Sequence[float] | None,
) -> AttentionRow:
    attended, taken = median(attend_s), median(read_s)
    speedup = None
    if base_s is not None and base_s is not attend_s:
        speedup = round(median(b / a for b, a in zip(base_s, attend_s, strict=True)), 2)
    return AttentionRow(
        kv=case.kv,
        batch=case.batch,
        context_tokens=case.context,
        threads=threads,
        attend_ms=round(attended * 1e3, 2),
        read_ms=round(taken * 1e3, 2),
        attend_gb_per_s=round(case.kv_bytes / attended / 1e9, 1),
        read_gb_per_s=round(case.kv_bytes / taken / 1e9, 1),
        share=round(median(r / a for r, a in zip(read_s, attend_s, strict=True)), 3),
        speedup=speedup,
    )


def main() -> int:
    """Prints a row for each case and number of threads, as a table, or one JSON object with `--json`."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine.attention", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--case", nargs="+", default=CASES, metavar="BATCHxCONTEXT")
    parser.add_argument("--kv", nargs="+", default=(BFLOAT16,), choices=(BFLOAT16, INT8))
    parser.add_argument("--threads", type=positive_whole, nargs="+", default=(1, 2))
    parser.add_argument("--turns", type=positive_whole, default=TURNS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    machine = this_machine()
    kernels = {threads: CpuKernels(threads) for threads in options.threads}
    rows = []
    for name in options.case:
        batch, context = map(int, name.split("x"))
        cases = [AttentionCase(batch, context, kv) for kv in options.kv]
        for threads in options.threads:
            found = time_cases(cases, kernels[threads], threads, options.turns)
            rows += [asdict(row) for row in found]
    show("attention", sys.argv[1:], machine, rows, as_json=options.json, turns=options.turns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
