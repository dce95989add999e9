"""CUDA graphs of steps that only decode: one launch per step instead of hundreds.

There is one graph per size in `bucket_sizes`; a step uses the next larger one and pads it. A padded row has a context
of 0 and the slot NOWHERE: it reads no KV and writes none. So padding needs no blocks, and capturing, which computes
padded rows only, touches none.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

import torch

from engine.backends.cuda.block_table import DeviceBlockTable
from engine.backends.cuda.staging import ALIGNED, PlacedStep, Staging, StepInputs
from splitserve.logs import log_event

MAX_ROWS = 256
"""Larger batches keep the GPU busy without graphs."""
FINE = 16
"""From here on sizes grow by this much instead of doubling: in the linear layers padded rows cost as much as others."""
ARRAYS = 7
"""Arrays of a staged step."""


def bucket_sizes(max_batch: int) -> list[int]:
    """Rows of each graph for batches of up to `max_batch`: 1, 2, 4, 8, 16, 32, 48, 64, ..."""
    largest = min(max_batch, MAX_ROWS)
    sizes = [1 << power for power in range(FINE.bit_length())]
    sizes += range(2 * FINE, largest + FINE, FINE)
    return sizes[: bisect.bisect_left(sizes, largest) + 1]


class CudaDecodeGraphs:
    """Captures the graphs on construction, and replays them.

    `compute` runs the model on a decode-only step: `StepInputs` to logits `[rows, vocabulary]`. A model that makes the
    host wait for the device in a forward pass, or does something else that cannot be captured, gets no graphs; that is
    logged once.
    """

    def __init__(
        self,
        compute: Callable[[StepInputs], torch.Tensor],
        device: torch.device,
        max_rows: int,
        table: DeviceBlockTable,
    ) -> None:
        """`max_rows` sequences in a step at most; `table` has their blocks."""
        self._sizes = bucket_sizes(max_rows)
        self._nothing = table.nothing()
        self._staging = Staging((self._sizes[-1] + ALIGNED) * ARRAYS, device)
        self._compute = compute
        self._graphs: dict[int, tuple[Any, torch.Tensor]] = {}
        self._memory: Any = None
        with torch.inference_mode():
            self._capture_all(device)

    @property
    def captured(self) -> list[int]:
        """Sizes that have a graph, ascending."""
        return sorted(self._graphs)

    def logits(self, step: PlacedStep) -> torch.Tensor | None:
        """Logits `[samples, vocabulary]` of a decode-only step, overwritten by the next one. They may still be
        computed.

        None if no graph is large enough.
        """
        rows = step.flat.num_decode
        index = bisect.bisect_left(self._sizes, rows)
        if not self._graphs or index == len(self._sizes):
            return None
        graph, logits = self._graphs[self._sizes[index]]
        inputs = self._staging.stage(step.padded(self._sizes[index]))
        graph.replay()
        # By indices that are on the device: those of the host would be copied there, and the device waited for.
        return logits[:rows] if len(step.flat.sample_order) == rows else logits[inputs.sample_rows]

    def _capture_all(self, device: torch.device) -> None:
        why = self._why_not(device)
        if why is None:
            try:
                # The largest first: the others then fit into its memory pool.
                for size in reversed(self._sizes):
                    self._capture(size)
            except RuntimeError as error:
                why = str(error).partition("\n")[0]
        if why is not None:
            self._graphs = {}
            torch.cuda.synchronize(device)
            log_event("engine.cuda_graphs_off", why=why)

    def _why_not(self, device: torch.device) -> str | None:
        """Why a capture would fail, None if it would not. Also compiles all kernels, which a capture must not do."""
        for size in self._sizes:
            self._compute(self._staging.stage(self._nothing.padded(size)))
        torch.cuda.synchronize(device)
        inputs = self._staging.stage(self._nothing.padded(1))
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            self._compute(inputs)
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return None

    def _capture(self, size: int) -> None:
        inputs = self._staging.stage(self._nothing.padded(size))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Captures only this thread's work: transports may use the device on theirs.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits = self._compute(inputs)
        self._memory = graph.pool()
        self._graphs[size] = graph, logits
