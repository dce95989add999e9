"""CUDA graphs of steps: one launch per step instead of hundreds.

There is one graph per `StepSize`; a step uses the next larger one and pads it. A padded row has a context of 0 and the
slot NOWHERE: it reads no KV and writes none. A padded chunk has no tokens. So padding needs no blocks, and capturing,
which computes padding only, touches none.

Steps with chunks of prompts are captured as long as the host takes longer to launch them than the device to compute
them. For longer chunks a graph saves nothing, and its padding costs time.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.backends.cuda.block_table import DeviceBlockTable
from engine.backends.cuda.staging import ALIGNED, PlacedStep, Staging, StepInputs, StepSize
from engine.backends.interface import FlatStep
from splitserve.logs import log_event

MAX_ROWS = 256
"""Larger batches keep the GPU busy without graphs."""
FINE = 16
"""From here on sizes grow by this much instead of doubling: a padded row costs as much as any other in linear
layers."""
BESIDE = (16, 64, 256)
"""Numbers of decode rows beside chunks of prompts; few, as each needs graphs for all lengths of chunks. A size with
more decode rows than the first number has at most as many rows in all as the longest captured chunk."""
MAX_CHUNKS = 8
"""Maximum number of chunks of a step."""
CHUNK_TOKENS = (32, 64, 128, 256, 384, 512, 640, 768, 896, 1024)
"""Numbers of tokens of all chunks of a step together."""
LAUNCH_BOUND = 1.3
"""A step that takes at most this multiple of the shortest step's time is bound by the host's launches."""
TRIALS = 3
ARRAYS = 7
"""Number of arrays of a staged step."""

Compute = Callable[[StepInputs], torch.Tensor]
"""Runs the model on a step; returns the logits `[samples, vocabulary]` of `sample_rows`."""


def bucket_sizes(max_batch: int) -> list[int]:
    """Rows of each graph for batches of up to `max_batch`: 1, 2, 4, 8, 16, 32, 48, 64, ..."""
    largest = min(max_batch, MAX_ROWS)
    sizes = [1 << power for power in range(FINE.bit_length())]
    sizes += range(2 * FINE, largest + FINE, FINE)
    return _up_to(sizes, largest)


def launch_bound(seconds: Sequence[float]) -> int:
    """Number of leading steps that are bound by the host's launches, from the times of steps in ascending size.

    A longer time before the last such step was a disturbance.
    """
    bound = LAUNCH_BOUND * min(seconds)
    return 1 + max(index for index, step_s in enumerate(seconds) if step_s <= bound)


class CudaStepGraphs:
    """Captures the graphs on construction, and replays them.

    A model that makes the host wait for the device in a forward pass, or does something else that cannot be captured,
    gets no graphs; that is logged.
    """

    def __init__(
        self,
        compute: Compute,
        device: torch.device,
        max_rows: int,
        max_tokens: int,
        table: DeviceBlockTable,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """For steps of up to `max_rows` sequences that decode, and chunks of up to `max_tokens` tokens in all. `table`:
        the block table of the sequences."""
        self._decodes = bucket_sizes(max_rows)
        self._beside = [0, *_up_to(BESIDE, self._decodes[-1])]
        self._tokens = _up_to(CHUNK_TOKENS, max_tokens) if max_tokens else []
        self._nothing = table.nothing()
        largest = self._beside[-1] + self.chunk_tokens + MAX_CHUNKS
        self._staging = Staging((largest + ALIGNED) * ARRAYS, device)
        self._compute, self._clock, self._device = compute, clock, device
        self._graphs: dict[StepSize, tuple[Any, torch.Tensor]] = {}
        self._memory: Any = None
        with torch.inference_mode():
            self._capture_all()

    @property
    def captured(self) -> list[StepSize]:
        """Sizes that have a graph, ascending."""
        return sorted(self._graphs)

    @property
    def chunk_tokens(self) -> int:
        """Maximum number of tokens of chunks that have a graph; 0: no graph has chunks."""
        return self._tokens[-1] if self._tokens else 0

    def logits(self, step: PlacedStep) -> torch.Tensor | None:
        """Logits `[samples, vocabulary]` of a step, overwritten by the next one. They may still be computed.

        None if no graph is large enough.
        """
        size = self._size_for(step.flat)
        if size is None or (captured := self._graphs.get(size)) is None:
            return None
        graph, logits = captured
        self._staging.stage(step.padded(size))
        graph.replay()
        return logits[: len(step.flat.sample_order)]

    def _size_for(self, flat: FlatStep) -> StepSize | None:
        if flat.decode_only:
            rows = _next(self._decodes, flat.num_decode)
            return None if rows is None else StepSize(rows)
        beside = _next(self._beside, flat.num_decode)
        tokens = _next(self._tokens, len(flat.token_ids) - flat.num_decode)
        if beside is None or tokens is None or flat.num_prefill > MAX_CHUNKS:
            return None
        return StepSize(beside, tokens, MAX_CHUNKS)

    def _capture_all(self) -> None:
        began_s, why = self._clock(), ""
        # If chunks cannot be captured, for lack of memory for example, only steps that only decode get graphs.
        for tokens in (self._tokens, []):
            self._tokens = tokens
            try:
                self._prepare()
                # The largest first: the others then fit into its memory pool.
                for size in sorted(self._sizes(), key=lambda size: size.rows, reverse=True):
                    self._capture(size)
                break
            except RuntimeError as error:
                why = str(error).partition("\n")[0]
                self._graphs, self._memory = {}, None
                torch.cuda.synchronize(self._device)
        if why:
            log_event("engine.cuda_graphs_off", why=why, steps="chunks" if self._graphs else "all")
        if self._graphs:
            log_event(
                "engine.cuda_graphs",
                graphs=len(self._graphs),
                chunk_tokens=self.chunk_tokens,
                seconds=round(self._clock() - began_s, 2),
            )

    def _alone(self) -> list[StepSize]:
        return [StepSize(0, tokens, MAX_CHUNKS) for tokens in self._tokens]

    def _sizes(self) -> list[StepSize]:
        mixed = (StepSize(*size, MAX_CHUNKS) for size in itertools.product(self._beside, self._tokens))
        bounded = (size for size in mixed if size.decodes <= BESIDE[0] or size.rows <= self.chunk_tokens)
        return [*map(StepSize, self._decodes), *bounded]

    def _prepare(self) -> None:
        """Compiles all kernels, which a capture must not do, and decides which chunks get graphs.

        Raises RuntimeError if a capture would fail.
        """
        for size in self._sizes():
            self._run(size)
        torch.cuda.synchronize(self._device)
        before = torch.cuda.get_sync_debug_mode()
        for size in (StepSize(1), *self._alone()[:1]):
            inputs = self._staging.stage(self._nothing.padded(size))
            torch.cuda.set_sync_debug_mode("error")
            try:
                self._compute(inputs)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        if self._tokens:
            self._tokens = self._tokens[: launch_bound([self._seconds(size) for size in self._alone()])]

    def _run(self, size: StepSize) -> None:
        self._compute(self._staging.stage(self._nothing.padded(size)))

    def _seconds(self, size: StepSize) -> float:
        """Seconds that a step takes without a graph; the minimum of TRIALS."""
        trials_s = []
        for _ in range(TRIALS):
            began_s = self._clock()
            self._run(size)
            torch.cuda.synchronize(self._device)
            trials_s.append(self._clock() - began_s)
        return min(trials_s)

    def _capture(self, size: StepSize) -> None:
        inputs = self._staging.stage(self._nothing.padded(size))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Captures only this thread's work: transports may use the device on theirs.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits = self._compute(inputs)
        self._memory = graph.pool()
        self._graphs[size] = graph, logits


def _up_to(sizes: Sequence[int], largest: int) -> list[int]:
    """The sizes up to the first that is at least `largest`."""
    return list(sizes[: bisect.bisect_left(sizes, largest) + 1])


def _next(sizes: Sequence[int], wanted: int) -> int | None:
    index = bisect.bisect_left(sizes, wanted)
    return sizes[index] if index < len(sizes) else None
