"""Captured steps: chunks of prompts, sequences that decode, or both. One graph computes any step of up to its rows.

A graph is captured when a step first needs it; the warm-up captures the smallest one. The first step of each kind is
compared with the model's own forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.backends.cpu.attention import ChunkInputs, DecodeInputs, Part
from engine.backends.cpu.graphs.capture import (
    Call,
    CpuGraph,
    GraphCapture,
    GraphCaptureError,
    MemoryPlanner,
)
from engine.backends.cpu.graphs.resizable import Chunk, ResizableOps, RowCounts, StepRows
from engine.backends.cpu.kernels import CpuKernels
from engine.backends.cpu.linears import relative_difference
from engine.backends.cpu.ops import Code
from engine.backends.interface import FlatStep
from splitserve.generation.kv_blocks import blocks_for
from splitserve.logs import log_event

TOTAL_ROWS = (80, 512, 1024, 2048, 4096)
SAMPLED_ROWS = (64, 256)
"""Rows that graphs are captured with; several, as operations without a kernel always compute all rows of their graph.
The smallest total is above the warm-up's prompt, so that the warm-up checks a step of fewer rows than the graph's."""
MAX_CHUNKS = 16
"""Maximum number of chunks of a step."""
_DECODES = 32
"""Maximum number of decode rows in a capture; a replay may have more."""
_FEW = StepRows(decodes=4, total=24, sampled=4)
MAX_DIFFERENCE = 0.05
"""Relative norm of the difference of bfloat16 logits: the kernels may round a value to its other neighbour."""

Compute = Callable[["GraphInputs", Sequence[Part]], torch.Tensor]
"""Runs the model on all rows of the inputs; returns the logits `[sampled, vocabulary]`."""


@dataclass(frozen=True, slots=True)
class GraphInputs:
    """Inputs of one graph, all int64: `token_ids`, `positions` `[1, rows]`; `sampled` `[sampled]`: rows whose logits
    are wanted."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    sampled: torch.Tensor

    @classmethod
    def make(cls, rows: StepRows) -> GraphInputs:
        """Inputs for these rows, all zero."""
        zeros = torch.zeros(2, 1, rows.total, dtype=torch.int64)
        return cls(zeros[0], zeros[1], torch.zeros(rows.sampled, dtype=torch.int64))

    def fill(self, step: FlatStep) -> None:
        """Copies in a step of at most as many rows. Rows beyond it keep their content."""
        count, sampled = len(step.token_ids), len(step.sample_rows)
        self.token_ids[0, :count] = torch.from_numpy(step.token_ids)
        self.positions[0, :count] = torch.from_numpy(step.positions)
        self.sampled[:sampled] = torch.from_numpy(step.sample_rows)


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A captured graph whose operations can be resized."""

    inputs: GraphInputs
    graph: CpuGraph
    parts: Sequence[ResizableOps | Call]

    def replay(self, kernels: CpuKernels, rows: StepRows, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Logits `[sampled, vocabulary]` of the step in the inputs."""
        for part in self.parts:
            if isinstance(part, ResizableOps):
                kernels.run(part.of(rows, chunks))
            else:
                part()
        return self.graph.output[: rows.sampled]


class CpuStepGraphs:
    """Captures and replays steps."""

    def __init__(
        self,
        kernels: CpuKernels,
        decodes: DecodeInputs,
        compute: Compute,
        eager: Callable[[FlatStep], torch.Tensor],
        columns: int,
        block_size: int,
    ) -> None:
        """`decodes`: inputs of the sequences that decode. `eager` runs the model on a step; `columns`: maximum number
        of blocks of a sequence."""
        self._kernels, self._decodes, self._compute, self._eager = kernels, decodes, compute, eager
        self._memory, self._columns, self._block_size = MemoryPlanner(), columns, block_size
        self._chunks = [ChunkInputs(columns)]
        self._smaller: CpuGraph | None = None
        self._checked: set[tuple[int, bool, int]] = set()
        """Kinds of steps: rows of the graph, whether any decode, and chunks: 0, 1, or 2 for several."""
        self.works = True
        """False once a capture or a check has failed."""
        self.prepared = False
        """Whether the latest step took longer because a graph was made or checked."""
        self.graphs: dict[tuple[int, int], StepGraph] = {}
        """The graphs by (maximum rows, maximum rows with logits)."""

    def logits(self, step: FlatStep) -> torch.Tensor | None:
        """Logits `[sampled, vocabulary]`, overwritten by the next step. None where the step has no graph."""
        self.prepared = False
        rows = StepRows(step.num_decode, len(step.token_ids), len(step.sample_rows))
        captured = self._graph_for(rows) if self.works and step.num_prefill <= MAX_CHUNKS else None
        if captured is None:
            return None
        kind = len(captured.inputs.token_ids[0]), step.num_decode > 0, min(step.num_prefill, 2)
        is_new = kind not in self._checked
        if is_new and not rows.sampled:
            return None  # without logits there is nothing to compare
        expected = self._eager(step).float() if is_new else None
        captured.inputs.fill(step)
        self._decodes.fill(step.sequences[: step.num_decode])
        logits = captured.replay(self._kernels, rows, self._filled_chunks(step))
        if expected is None:
            return logits
        self.prepared = True
        usable = expected.isfinite().all(dim=1)  # other rows belong to broken sequences, which fail alone
        if not usable.any():
            return logits
        difference = relative_difference(logits[usable].float(), expected[usable])
        if difference <= MAX_DIFFERENCE:
            self._checked.add(kind)
            return logits
        self._end(f"logits differ by {difference:.3g}")
        return None  # the step is computed again, and with it the KV that it wrote

    def _graph_for(self, rows: StepRows) -> StepGraph | None:
        """The smallest graph with enough rows, captured now if it is new; None if there is none."""
        total = next((size for size in TOTAL_ROWS if size >= rows.total), None)
        sampled = next((size for size in SAMPLED_ROWS if size >= rows.sampled), None)
        if total is None or sampled is None:
            return None
        graph = self.graphs.get((total, sampled))
        if graph is None:
            graph = self._capture(total, sampled)
            self.prepared = True
        return graph

    def _filled_chunks(self, step: FlatStep) -> list[Chunk]:
        while len(self._chunks) < step.num_prefill:
            self._chunks.append(ChunkInputs(self._columns))
        chunks, begin = [], step.num_decode
        for inputs, sequence in zip(self._chunks, step.sequences[step.num_decode :], strict=False):
            length = sequence.num_computed + sequence.num_new
            inputs.fill(length, sequence.num_new, sequence.block_ids[: blocks_for(length, self._block_size)])
            chunks.append(Chunk(begin, sequence.num_new, inputs.step.ctypes.data))
            begin += sequence.num_new
        return chunks

    def _capture(self, total: int, sampled: int) -> StepGraph | None:
        # All rows are padding while a graph is captured, so that no KV is written.
        self._decodes.fill(())
        self._chunks[0].fill(0, 0, ())
        max_decodes = self._decodes.rows
        many = StepRows(min(_DECODES, max_decodes), total, sampled)
        few = _FEW._replace(decodes=min(_FEW.decodes, max_decodes))
        try:
            if self._smaller is None:
                _, self._smaller = self._captured(few)
            inputs, graph = self._captured(many)
            parts = _resizable(graph, self._smaller, many, few)
        except Exception as error:  # the model's code may raise anything
            self._end(str(error).partition("\n")[0])
            return None
        self.graphs[total, sampled] = StepGraph(inputs, graph, parts)
        return self.graphs[total, sampled]

    def _captured(self, rows: StepRows) -> tuple[GraphInputs, CpuGraph]:
        inputs = GraphInputs.make(rows)
        parts = (
            Part(Code.ATTEND, 0, rows.decodes, self._decodes),
            Part(Code.PREFILL, rows.decodes, rows.total, self._chunks[0]),
        )
        with GraphCapture(self._kernels) as capture:
            logits = self._compute(inputs, parts)
        return inputs, capture.graph(logits, self._memory)

    def _end(self, why: str) -> None:
        self.works = False
        self.graphs = {}
        log_event("engine.step_graphs_off", why=why)


def _resizable(
    graph: CpuGraph, smaller: CpuGraph, many: StepRows, few: StepRows
) -> list[ResizableOps | Call]:
    parts: list[ResizableOps | Call] = []
    for part, fewer in zip(graph.parts, smaller.parts, strict=True):
        if isinstance(part, np.ndarray) and isinstance(fewer, np.ndarray):
            parts.append(ResizableOps(part, RowCounts.between(part, fewer, many, few), many))
        elif isinstance(part, np.ndarray) or isinstance(fewer, np.ndarray):
            raise GraphCaptureError("the model computes otherwise with fewer rows")
        else:
            parts.append(part)
    return parts
