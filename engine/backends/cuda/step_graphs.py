"""CUDA graphs of steps that only decode: one launch per step instead of hundreds.

There is one graph per number of rows in `bucket_sizes`; a step uses the next larger one and pads it. A padded row has a
context of 0 and the slot NOWHERE: it reads no KV and writes none. So padding needs no blocks, and capturing, which
computes padding only, touches none.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from typing import Any

import torch

from engine.backends.cuda.block_table import DeviceBlockTable
from engine.backends.cuda.staging import ALIGNED, PlacedStep, Staging, StepInputs
from splitserve.logs import log_event

MAX_ROWS = 256
"""Larger batches keep the GPU busy without graphs."""
FINE = 16
"""From here on sizes grow by this much instead of doubling: a padded row costs as much as any other in linear
layers."""
ARRAYS = 7
"""Number of arrays of a staged step."""

Compute = Callable[[StepInputs], torch.Tensor]
"""Runs the model on a step; returns the logits `[samples, vocabulary]` of `sample_rows`."""


def bucket_sizes(max_batch: int) -> list[int]:
    """Rows of each graph for batches of up to `max_batch`: 1, 2, 4, 8, 16, 32, 48, 64, ..."""
    largest = min(max_batch, MAX_ROWS)
    sizes = [1 << power for power in range(FINE.bit_length())]
    sizes += range(2 * FINE, largest + FINE, FINE)
    return sizes[: bisect.bisect_left(sizes, largest) + 1]


class CudaStepGraphs:
    """Captures the graphs on construction, and replays them.

    A model that makes the host wait for the device in a forward pass, or does something else that cannot be captured,
    gets no graphs; that is logged.
    """

    def __init__(
        self, compute: Compute, device: torch.device, max_rows: int, table: DeviceBlockTable
    ) -> None:
        """For steps of up to `max_rows` sequences. `table`: the block table of the sequences."""
        self._nothing = table.nothing()
        self._compute, self._device = compute, device
        self._graphs: dict[int, tuple[Any, torch.Tensor]] = {}
        self._memory: Any = None
        self.captured: list[int] = []
        """Numbers of rows that have a graph, ascending."""
        sizes = bucket_sizes(max_rows)
        self._staging = Staging((sizes[-1] + ALIGNED) * ARRAYS, device)
        with torch.inference_mode():
            self._capture_all(sizes)

    def logits(self, step: PlacedStep) -> torch.Tensor | None:
        """Logits `[samples, vocabulary]` of a step, overwritten by the next one. They may still be computed.

        None if the step has chunks of prompts, or no graph is large enough.
        """
        at = bisect.bisect_left(self.captured, step.flat.num_decode)
        if at == len(self.captured) or not step.flat.decode_only:
            return None
        rows = self.captured[at]
        graph, logits = self._graphs[rows]
        self._staging.stage(step.padded(rows))
        graph.replay()
        return logits[: len(step.flat.sample_order)]

    def _capture_all(self, sizes: list[int]) -> None:
        began_s = time.perf_counter()
        try:
            self._prepare(sizes)
            # The largest first: the others then fit into its memory pool.
            for rows in reversed(sizes):
                self._capture(rows)
        except RuntimeError as error:
            self._graphs, self._memory = {}, None
            torch.cuda.synchronize(self._device)
            log_event("engine.cuda_graphs_off", why=str(error).partition("\n")[0])
            return
        self.captured = sizes
        seconds = round(time.perf_counter() - began_s, 2)
        log_event("engine.cuda_graphs", graphs=len(self._graphs), seconds=seconds)

    def _prepare(self, sizes: list[int]) -> None:
        """Compiles all kernels, which a capture must not do. Raises RuntimeError if a capture would fail."""
        for rows in sizes:
            self._compute(self._staging.stage(self._nothing.padded(rows)))
        torch.cuda.synchronize(self._device)
        before = torch.cuda.get_sync_debug_mode()
        inputs = self._staging.stage(self._nothing.padded(1))
        torch.cuda.set_sync_debug_mode("error")
        try:
            self._compute(inputs)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def _capture(self, rows: int) -> None:
        inputs = self._staging.stage(self._nothing.padded(rows))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Captures only this thread's work: transports may use the device on theirs.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits = self._compute(inputs)
        self._memory = graph.pool()
        self._graphs[rows] = graph, logits
