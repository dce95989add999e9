"""One step of the model on a CUDA device, from scheduled sequences to logits.

Nothing here waits for the device: inputs are copied from pinned memory, and a step that only decodes replays a graph.
The host computes the step's grammar masks meanwhile, until it asks for the tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from typing_extensions import override

from engine.backends.cuda.block_table import DeviceBlockTable
from engine.backends.cuda.staging import Staging, StepInputs
from engine.backends.cuda.step_graphs import CudaStepGraphs
from engine.backends.interface import Forward, PromptRows, StepLogits, compute_logits, flatten
from engine.core.model_runner import ScheduledSequence
from engine.model.attention_interface import AttentionBackend
from engine.model.loaded_model import LoadedModel
from splitserve.config.engine import EngineConfig
from splitserve.generation.kv_blocks import blocks_for

POLL_S = 5e-5
"""Sleep between two queries of an event: lets the event loop run, and adds little to a step."""


def wait_for(
    event: torch.cuda.Event, poll: Callable[[], None] | None, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Waits until the device has reached an event. Meanwhile calls `poll`, unless it is None, on this thread."""
    if poll is None:
        event.synchronize()
        return
    while not event.query():
        poll()
        sleep(POLL_S)


FIRST_CAPACITY = 1 << 16
"""Initial capacity of the staging buffer, in int64 numbers."""


class PagedAttention(AttentionBackend, Protocol):
    """An attention backend that reads the step from `inputs`."""

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
            config.max_running_requests, columns, config.block_size_tokens, model.device
        )
        self._staging = Staging(FIRST_CAPACITY, model.device)
        self._poll: Callable[[], None] | None = None
        self._graphs: CudaStepGraphs | None = None
        model.context.backend = backend
        if config.cuda_graphs == "auto" and model.device.type == "cuda":
            rows = config.max_running_requests
            self._graphs = CudaStepGraphs(self._compute, model.device, rows, self._table)

    @override
    def logits(self, batch: Sequence[ScheduledSequence]) -> StepLogits:
        flat = flatten(batch)
        step = self._table.place(flat)
        # A graph does not keep what the layers return.
        graphs = self._graphs if flat.prompts is None else None
        logits = graphs.logits(step) if graphs is not None else None
        if logits is None:
            logits = self._compute(self._staging.stage(step), flat.prompts)
        argmax = AsyncArgmax(logits, self._poll) if flat.sample_order else None
        return StepLogits(logits, flat.sample_order, argmax, flat.prompts)

    @override
    def finish(self) -> None:
        if self._device.type == "cuda":
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(self._device))
            wait_for(done, self._poll)

    @override
    def poll_while_computing(self, poll: Callable[[], None]) -> None:
        self._poll = poll

    def _compute(self, inputs: StepInputs, prompts: PromptRows | None = None) -> torch.Tensor:
        """Logits `[samples, vocabulary]` of the rows in `sample_rows`."""
        self._backend.inputs = inputs
        logits = compute_logits(self._module, inputs.token_ids, inputs.positions, inputs.sample_rows, prompts)
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
        self._done = torch.cuda.Event() if tokens.is_cuda else None
        if self._done is not None:
            self._done.record()

    def __call__(self) -> list[int]:
        """The token of each row's largest logit; -1 where that is not finite, as in a row with a NaN."""
        if self._done is not None:
            wait_for(self._done, self._poll)
        tokens: list[int] = self._on_host.tolist()
        return tokens


def prepare_device(device: torch.device) -> None:
    """Selects the calling thread's device, and sets the precision of matrix products for the process.

    * No TF32, which keeps 10 bits of the mantissa: users choose float32 for exact results.
    * bfloat16 products are summed in float32 even where cuBLAS splits a sum over several multiprocessors. Otherwise it
      may combine the parts in bfloat16, which makes results depend on the batch and long sums inaccurate.
    """
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
