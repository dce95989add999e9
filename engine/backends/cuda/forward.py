"""One step of the model on a CUDA device, from scheduled sequences to logits.

Nothing here waits for the device: inputs are copied from pinned memory, and a step of few tokens replays a graph.
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
from engine.backends.interface import Forward, StepLogits, flatten
from engine.core.model_runner import DEFAULT_STEP_TOKENS, ScheduledSequence
from engine.model.attention_interface import AttentionBackend
from engine.model.loaded_model import LoadedModel
from kv_transfer.transports.regions import VRAM
from splitserve.config.engine import EngineConfig
from splitserve.generation.kv_blocks import blocks_for

POLL_S = 5e-5
"""Sleep between two looks: leaves the interpreter to the event loop, and adds little to a step."""


class DeviceEvent(Protocol):
    """What `torch.cuda.Event` is to `wait_for`."""

    def query(self) -> bool:
        """Whether the device has come to it."""

    def synchronize(self) -> None:
        """Waits until the device has."""


def wait_for(
    event: DeviceEvent, poll: Callable[[], None] | None, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Waits for the event. `poll` is called meanwhile, on this thread; None: the device alone is waited for."""
    if poll is None:
        event.synchronize()
        return
    while not event.query():
        poll()
        sleep(POLL_S)


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
            config.max_running_requests, columns, config.block_size_tokens, model.device
        )
        self._staging = Staging(FIRST_CAPACITY, model.device)
        self._poll: Callable[[], None] | None = None
        self._graphs: CudaStepGraphs | None = None
        model.context.backend = backend
        if config.cuda_graphs == "auto" and model.device.type == "cuda":
            max_tokens = config.max_step_tokens or DEFAULT_STEP_TOKENS[VRAM]
            self._graphs = CudaStepGraphs(
                self._compute, model.device, config.max_running_requests, max_tokens, self._table
            )

    @override
    def logits(self, batch: Sequence[ScheduledSequence]) -> StepLogits:
        flat = flatten(batch)
        step = self._table.place(flat)
        logits = self._graphs.logits(step) if self._graphs is not None else None
        if logits is None:
            logits = self._compute(self._staging.stage(step))
        argmax = AsyncArgmax(logits, self._poll) if flat.sample_order else None
        return StepLogits(logits, flat.sample_order, argmax)

    @override
    def finish(self) -> None:
        if self._device.type == "cuda":
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(self._device))
            wait_for(done, self._poll)

    @override
    def poll_while_computing(self, poll: Callable[[], None]) -> None:
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
