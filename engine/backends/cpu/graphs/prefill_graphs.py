"""Captured steps that compute one prompt chunk, one graph per length of `chunk_rows`. A chunk uses the next larger
length; the rows beyond it are padding.

Graphs are captured when first needed, while the model computes such a step; the step takes 50 to 100 ms longer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.backends.cpu.attention import ChunkInputs
from engine.backends.cpu.graphs.capture import CAPTURE_ERRORS, CpuGraph, GraphCapture
from engine.backends.cpu.graphs.memory_planner import MemoryPlanner
from engine.backends.cpu.kernels import CpuKernels
from engine.core.types import ScheduledSequence
from splitserve.generation.kv_blocks import blocks_for
from splitserve.logs import log_event

MAX_GRAPHS = 36
"""Graphs kept, the least recently used evicted first: as many as there are lengths up to 512 tokens."""
SHORT_ROWS, SHORT_STEP = 64, 8
"""Up to this many rows lengths are spaced more closely: the rest of a prompt after its cached prefix is often short."""
STEP, MAX_STEPS = 16, 32


def chunk_rows(tokens: int) -> int:
    """Rows of the graph for a chunk of `tokens`. Padding: at most 7 rows up to 64 tokens, then 15, then a sixteenth."""
    step = SHORT_STEP if tokens <= SHORT_ROWS else STEP
    while tokens > MAX_STEPS * step:
        step *= 2
    return -(-tokens // step) * step


@dataclass(frozen=True, slots=True)
class ChunkStep:
    """Inputs of one graph, all int64: `token_ids`, `positions` `[1, rows]`; `last` `[1]`, the last token's row."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    last: torch.Tensor
    inputs: ChunkInputs

    @classmethod
    def make(cls, rows: int, columns: int) -> ChunkStep:
        """Inputs of `rows` tokens; `columns` is the maximum number of blocks of a sequence."""
        zeros = torch.zeros(2, 1, rows, dtype=torch.int64)
        return cls(zeros[0], zeros[1], torch.zeros(1, dtype=torch.int64), ChunkInputs(columns))

    def fill(self, sequence: ScheduledSequence, block_size: int) -> None:
        """Copies a sequence's next chunk in; it must have at most as many tokens as there are rows."""
        begin, tokens = sequence.num_computed, sequence.num_new
        end = begin + tokens
        self.token_ids[0, :tokens] = torch.tensor(sequence.token_ids[begin:end])
        self.token_ids[0, tokens:] = 0
        self.positions[0, :tokens] = torch.arange(begin, end)
        self.positions[0, tokens:] = 0
        self.last[0] = tokens - 1
        self.inputs.fill(end, tokens, sequence.block_ids[: blocks_for(end, block_size)])


class CpuPrefillGraphs:
    """Captures and replays steps that compute one prompt chunk."""

    def __init__(
        self,
        kernels: CpuKernels,
        compute: Callable[[ChunkStep], torch.Tensor],
        memory: MemoryPlanner,
        columns: int,
        block_size: int,
    ) -> None:
        """`compute` runs the model on a chunk and returns its last token's logits `[1, vocabulary]`."""
        self._kernels, self._compute, self._memory = kernels, compute, memory
        self._columns, self._block_size = columns, block_size
        self._works = True
        self.graphs: OrderedDict[int, tuple[ChunkStep, CpuGraph]] = OrderedDict()
        """By rows, the most recently used last."""

    def logits(self, batch: Sequence[ScheduledSequence]) -> torch.Tensor | None:
        """Logits `[1, vocabulary]` of a chunk's last token, overwritten by the next step. `batch` is one sequence.

        None if the model cannot be captured.
        """
        (sequence,) = batch
        if not self._works:
            return None
        rows = chunk_rows(sequence.num_new)
        captured = self.graphs.get(rows)
        if captured is None:
            return self._capture(rows, sequence)
        self.graphs.move_to_end(rows)
        step, graph = captured
        step.fill(sequence, self._block_size)
        return graph.replay()

    def _capture(self, rows: int, sequence: ScheduledSequence) -> torch.Tensor | None:
        step = ChunkStep.make(rows, self._columns)
        step.fill(sequence, self._block_size)
        try:
            with GraphCapture(self._kernels) as capture:
                logits = self._compute(step)
            graph = capture.graph(logits, self._memory)
        except CAPTURE_ERRORS as error:
            self._works = False
            log_event("engine.prefill_graphs_off", why=str(error).partition("\n")[0])
            return None
        self.graphs[rows] = step, graph
        if len(self.graphs) > MAX_GRAPHS:
            self.graphs.popitem(last=False)
        return logits
