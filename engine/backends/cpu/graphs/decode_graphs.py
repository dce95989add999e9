"""Captured decode steps, one graph per batch size in `graph_sizes`; a step uses the next larger size.

Graphs are captured when first needed. The first one is compared with the model's own forward pass on the step it is
captured for, which is the warm-up's.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import torch

from engine.backends.cpu.attention import DecodeInputs
from engine.backends.cpu.graphs.capture import CAPTURE_ERRORS, CpuGraph, GraphCapture
from engine.backends.cpu.graphs.memory_planner import MemoryPlanner
from engine.backends.cpu.kernels import CpuKernels
from engine.core.types import ScheduledSequence
from engine.model.sibling_linears import relative_difference
from splitserve.logs import log_event

MAX_ROWS = 256
"""Larger batches are not captured."""
FIRST_SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64)
FURTHER_STEP = 16
MAX_DIFFERENCE = 0.05
"""Relative norm of the difference of bfloat16 logits: the kernels may round a value to its other neighbour."""


def graph_sizes(max_batch: int) -> list[int]:
    """The batch sizes that are captured, ascending, for batches of up to `max_batch` sequences."""
    largest = min(max_batch, MAX_ROWS)
    sizes = [*FIRST_SIZES, *range(FIRST_SIZES[-1] + FURTHER_STEP, MAX_ROWS + FURTHER_STEP, FURTHER_STEP)]
    return sizes[: bisect.bisect_left(sizes, largest) + 1]


class CpuDecodeGraphs:
    """Captures and replays steps that only decode."""

    def __init__(
        self,
        kernels: CpuKernels,
        inputs: DecodeInputs,
        compute: Callable[[int], torch.Tensor],
        eager: Callable[[Sequence[ScheduledSequence]], torch.Tensor],
        max_rows: int,
        memory: MemoryPlanner,
    ) -> None:
        """`compute` runs the model on the first n rows of `inputs`, `eager` on a batch; logits `[rows, vocabulary]`."""
        self._kernels, self._inputs = kernels, inputs
        self._compute, self._eager = compute, eager
        self._sizes = graph_sizes(max_rows)
        self._memory = memory
        self._works = True
        self.graphs: dict[int, CpuGraph] = {}
        """By batch size."""

    def logits(self, batch: Sequence[ScheduledSequence]) -> torch.Tensor | None:
        """Logits `[sequences, vocabulary]` of sequences that compute one token each; overwritten by the next step.

        None where the batch has no graph.
        """
        index = bisect.bisect_left(self._sizes, len(batch))
        if not self._works or index == len(self._sizes):
            return None
        size = self._sizes[index]
        if size not in self.graphs and not self._capture(size, batch):
            return None
        self._inputs.fill(batch)
        return self.graphs[size].replay()[: len(batch)]

    def _capture(self, size: int, batch: Sequence[ScheduledSequence]) -> bool:
        # All rows are padding while the graph is captured, so that no KV is written.
        self._inputs.clear()
        why = None
        try:
            with GraphCapture(self._kernels) as capture:
                logits = self._compute(size)
            graph = capture.graph(logits, self._memory)
            if not self.graphs:
                why = self._check(graph, batch)
        except CAPTURE_ERRORS as error:
            why = str(error).partition("\n")[0]
        if why is not None:
            self._works = False
            self.graphs = {}
            log_event("engine.decode_graphs_off", why=why)
            return False
        self.graphs[size] = graph
        return True

    def _check(self, graph: CpuGraph, batch: Sequence[ScheduledSequence]) -> str | None:
        """What is wrong with a graph, by inputs other than those of its capture; None if its logits are right."""
        expected = self._eager(batch).float()
        self._inputs.fill(batch)
        difference = relative_difference(graph.replay()[: len(batch)].float(), expected)
        return None if difference <= MAX_DIFFERENCE else f"logits differ by {difference:.3g}"
