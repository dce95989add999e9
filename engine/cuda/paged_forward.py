"""One step of the model on a CUDA device: from scheduled sequences to logits on their way.

Nothing here waits for the device. Inputs travel through pinned memory, a step that only decodes replays a graph, and
the host has time for the grammar masks of the step until it asks for the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.attention import AttentionBackend
from engine.cuda.decode_graphs import DecodeGraphs
from engine.cuda.likeliest import Likeliest
from engine.cuda.step_inputs import Staging, StepInputs, flatten
from engine.forward import Forward, StepLogits
from engine.model_loading import LoadedModel
from engine.runner import ScheduledSequence
from splitserve.config import EngineConfig

FIRST_CAPACITY = 1 << 16
"""Numbers in the staging buffer at first."""


class PagedAttention(AttentionBackend, Protocol):
    """A backend that takes its step as `StepInputs`."""

    inputs: StepInputs | None
    capturable: bool


class PagedForward(Forward):
    """A model whose attention is computed by kernels over block tables."""

    def __init__(
        self, model: LoadedModel, backend: PagedAttention, config: EngineConfig, context_tokens: int
    ) -> None:
        """`context_tokens`: of one sequence at most. Captures the graphs, which takes a few seconds."""
        self._module = model.module
        self._backend = backend
        self._device = model.device
        self._block_size = config.block_size_tokens
        self._staging = Staging(FIRST_CAPACITY, model.device)
        self._graphs: DecodeGraphs | None = None
        model.context.backend = backend
        if config.cuda_graphs == "auto" and backend.capturable and model.device.type == "cuda":
            most_blocks = -(-context_tokens // config.block_size_tokens)
            self._graphs = DecodeGraphs(
                self._every_row, model.device, config.max_running_requests, most_blocks
            )

    @property
    def graph_sizes(self) -> list[int]:
        """Batches that have a CUDA graph."""
        return self._graphs.captured if self._graphs is not None else []

    def logits(self, batch: Sequence[ScheduledSequence]) -> StepLogits:
        """See `Forward.logits`."""
        flat = flatten(batch, self._block_size)
        logits = None
        if self._graphs is not None and flat.decode_only:
            logits = self._graphs.logits(flat)
        if logits is None:
            inputs = self._staging.stage(flat)
            logits = self._compute(inputs, inputs.sample_rows)
        elif len(flat.sample_order) < len(logits):
            logits = logits[flat.sample_rows.tolist()]
        return StepLogits(logits, flat.sample_order, Likeliest(logits) if flat.sample_order else None)

    def finish(self) -> None:
        """See `Forward.finish`."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _every_row(self, inputs: StepInputs) -> torch.Tensor:
        return self._compute(inputs, 0)

    def _compute(self, inputs: StepInputs, keep: torch.Tensor | int) -> torch.Tensor:
        """Logits `[kept, vocabulary]` of the rows in `keep`, of all rows for 0."""
        self._backend.inputs = inputs
        # Only rows that are sampled go through the output layer. The model's own forward pass does it,
        # because some families scale or cap logits there.
        logits: torch.Tensor = self._module(
            input_ids=inputs.token_ids,
            position_ids=inputs.positions,
            use_cache=False,
            logits_to_keep=keep,
        ).logits[0]
        self._backend.inputs = None
        return logits
