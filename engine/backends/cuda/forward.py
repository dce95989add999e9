"""One step of the model on a CUDA device, from scheduled sequences to logits.

Nothing here waits for the device: inputs are copied from pinned memory, and a step of few tokens replays a graph.
The host computes the step's grammar masks meanwhile, until it asks for the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from engine.backends.cuda.block_table import DeviceBlockTable
from engine.backends.cuda.staging import Staging, StepInputs, StepSize
from engine.backends.cuda.step_graphs import CudaStepGraphs
from engine.backends.cuda.waiting import DeviceEvent, wait_for
from engine.backends.interface import Forward, StepLogits, flatten
from engine.core.model_runner import DEFAULT_STEP_TOKENS
from engine.core.types import ScheduledSequence
from engine.model.attention_interface import AttentionBackend
from engine.model.loaded_model import LoadedModel
from engine.speculation.settings import max_decode_rows
from kv_transfer.transports.transport import VRAM
from splitserve.config.engine import EngineConfig
from splitserve.generation.kv_blocks import blocks_for

FIRST_CAPACITY = 1 << 16
"""Initial capacity of the staging buffer, in int64 numbers."""


class PagedAttention(AttentionBackend, Protocol):
    """An attention backend whose step is set as `StepInputs`."""

    inputs: StepInputs | None


class CudaForward(Forward):
    """The forward pass of a model whose attention is computed by kernels over block tables."""

    def __init__(
        self, model: LoadedModel, backend: PagedAttention, config: EngineConfig, context_tokens: int
    ) -> None:
        """`context_tokens`: maximum length of a sequence. Captures the graphs, which takes a few seconds."""
        self._module = model.module
        self._backend = backend
        self._device = model.device
        columns = blocks_for(context_tokens, config.block_size_tokens)
        self._table = DeviceBlockTable(
            max_decode_rows(config), columns, config.block_size_tokens, model.device
        )
        self._staging = Staging(FIRST_CAPACITY, model.device)
        self._poll: Callable[[], None] | None = None
        self._graphs: CudaStepGraphs | None = None
        self._graphs_measured = False
        model.context.backend = backend
        self._captures = config.cuda_graphs == "auto" and model.device.type == "cuda"
        self._max_rows = max_decode_rows(config)
        self._max_tokens = config.max_step_tokens or DEFAULT_STEP_TOKENS[VRAM]
        self.take_memory_back()

    @property
    def graph_sizes(self) -> list[StepSize]:
        """Sizes of steps that have a CUDA graph."""
        return self._graphs.captured if self._graphs is not None else []

    def forget_kv(self) -> None:
        """See `Forward.forget_kv`. A graph has the addresses of weights and blocks."""
        self._graphs = None

    def take_memory_back(self) -> None:
        """See `Forward.take_memory_back`. Captures the graphs."""
        if self._captures:
            sizes = self._max_rows, self._max_tokens
            graphs = CudaStepGraphs(
                self._compute, self._device, *sizes, self._table, measured=self._graphs_measured
            )
            self._graphs, self._max_tokens, self._graphs_measured = graphs, graphs.chunk_tokens, True

    def logits(self, batch: Sequence[ScheduledSequence]) -> StepLogits:
        """See `Forward.logits`."""
        flat = flatten(batch)
        step = self._table.place(flat)
        logits = self._graphs.logits(step) if self._graphs is not None else None
        if logits is None:
            logits = self._compute(self._staging.stage(step))
        argmax = AsyncArgmax(logits, self._poll) if flat.sample_order else None
        return StepLogits(logits, flat.sample_order, argmax)

    def finish(self) -> None:
        """See `Forward.finish`."""
        if self._device.type == "cuda":
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(self._device))
            wait_for(done, self._poll)

    def poll_while_computing(self, poll: Callable[[], None]) -> None:
        """See `Forward.poll_while_computing`."""
        self._poll = poll

    def _compute(self, inputs: StepInputs) -> torch.Tensor:
        """Logits `[samples, vocabulary]` of the rows in `sample_rows`."""
        self._backend.inputs = inputs
        # Only sampled rows go through the output layer. This is left to the model's own forward pass, because some
        # families scale or cap logits there.
        logits: torch.Tensor = self._module(
            input_ids=inputs.token_ids,
            position_ids=inputs.positions,
            use_cache=False,
            logits_to_keep=inputs.sample_rows,
        ).logits[0]
        self._backend.inputs = None
        return logits


class AsyncArgmax:
    """The argmax of each row of logits `[rows, vocabulary]`. Construction queues work and copy; a call waits."""

    def __init__(self, logits: torch.Tensor, poll: Callable[[], None] | None = None) -> None:
        """`poll`: see `wait_for`."""
        self._poll = poll
        best, indices = logits.max(dim=-1)
        tokens = torch.where(torch.isfinite(best), indices, -1)
        self._on_host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=tokens.is_cuda)
        self._on_host.copy_(tokens, non_blocking=True)
        self._done: DeviceEvent | None = None
        if tokens.is_cuda:
            self._done = event = torch.cuda.Event()
            event.record()

    def __call__(self) -> list[int]:
        """The token of each row's largest logit; -1 where that is not finite, as in a row with a NaN."""
        if self._done is not None:
            wait_for(self._done, self._poll)
        tokens: list[int] = self._on_host.tolist()
        return tokens


def prepare_device(device: torch.device) -> None:
    """Selects the calling thread's device, and sets the precision of matrix products for the process.

    * No TF32, which keeps 10 bits of the mantissa: float32 is for those who want exact answers.
    * bfloat16 products are summed in float32 even where cuBLAS splits a sum over several multiprocessors. Otherwise it
      may combine the parts in bfloat16, which depends on the batch and costs accuracy in long sums.
    """
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
