"""CUDA graphs of steps that only decode: a launch a step instead of hundreds.

There is one graph for each size in `bucket_sizes`; a step takes the next larger one and fills it up with padded rows.
A padded row has a context of 0 and the slot NOWHERE: it reads no KV and writes none. So nothing in the pool is set
aside for it, and capturing, which computes padded rows only, touches no block.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

import torch

from engine.cuda.step_inputs import ALIGNED, FlatStep, Staging, StepInputs, no_sequences
from splitserve.logs import log_event

MOST_ROWS = 256
"""Larger batches keep the GPU busy without graphs."""
FINE = 16
"""From here on sizes go up by so many instead of doubling: padded rows cost as much as others in the linear layers."""
ARRAYS = 8


def bucket_sizes(most: int) -> list[int]:
    """Rows of each graph for batches of up to `most`: 1, 2, 4, 8, 16, 32, 48, 64, ..."""
    most = min(most, MOST_ROWS)
    sizes = [1 << power for power in range(FINE.bit_length())]
    sizes += range(2 * FINE, most + FINE, FINE)
    return sizes[: bisect.bisect_left(sizes, most) + 1]


class DecodeGraphs:
    """Captures the graphs when made, and replays them.

    `compute` runs the model on a decode-only step: `StepInputs` to logits `[rows, vocabulary]`. A model that makes the
    host wait for the device in every pass, or does something else that cannot be captured, gets no graphs; that is
    logged once.
    """

    def __init__(
        self,
        compute: Callable[[StepInputs], torch.Tensor],
        device: torch.device,
        most_rows: int,
        most_blocks: int,
    ) -> None:
        """`most_blocks`: of one sequence."""
        self._sizes = bucket_sizes(most_rows)
        rows = self._sizes[-1]
        self._most_entries = rows * most_blocks
        self._staging = Staging((rows + ALIGNED) * (ARRAYS + most_blocks), device)
        self._compute = compute
        self._graphs: dict[int, tuple[Any, torch.Tensor]] = {}
        self._memory: Any = None
        with torch.inference_mode():
            self._capture_all(device)

    @property
    def captured(self) -> list[int]:
        """Sizes that there are graphs for, ascending."""
        return sorted(self._graphs)

    def logits(self, flat: FlatStep) -> torch.Tensor | None:
        """Logits `[rows, vocabulary]` of a decode-only step, on their way; overwritten by the next step.

        None where no graph is large enough.
        """
        index = bisect.bisect_left(self._sizes, flat.num_decode)
        if not self._graphs or index == len(self._sizes) or flat.tables.size > self._most_entries:
            return None
        graph, logits = self._graphs[self._sizes[index]]
        self._staging.stage(flat.padded(self._sizes[index]))
        graph.replay()
        return logits[: flat.num_decode]

    def _capture_all(self, device: torch.device) -> None:
        why = self._why_not(device)
        if why is None:
            try:
                # The largest first: the others find its memory and take no more.
                for size in reversed(self._sizes):
                    self._capture(size)
            except RuntimeError as error:
                why = str(error).partition("\n")[0]
        if why is not None:
            self._graphs = {}
            torch.cuda.synchronize(device)
            log_event("engine.cuda_graphs_off", why=why)

    def _why_not(self, device: torch.device) -> str | None:
        """What a capture would fail of. Also compiles all kernels, which must not happen within a capture."""
        for size in self._sizes:
            self._compute(self._staging.stage(no_sequences().padded(size)))
        torch.cuda.synchronize(device)
        inputs = self._staging.stage(no_sequences().padded(1))
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
        inputs = self._staging.stage(no_sequences().padded(size))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Only this thread's work is captured; transports may be busy on theirs.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits = self._compute(inputs)
        self._memory = graph.pool()
        self._graphs[size] = graph, logits
