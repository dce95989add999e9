"""The forward pass with our cpu kernels: steps replay graphs, and run the model where there is none.

The model's own code runs in either case, at capture or in the step itself. The kernels compute only its linear layers,
norms and attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from engine.backends.cpu.attention import CpuAttention, DecodeInputs, Part, chunk_parts
from engine.backends.cpu.graphs.resizable import StepRows
from engine.backends.cpu.graphs.step_graphs import CpuStepGraphs, GraphInputs
from engine.backends.cpu.kernels import CpuKernels
from engine.backends.cpu.ops import Code
from engine.backends.interface import FlatStep, Forward, PromptRows, StepLogits, compute_logits, flatten
from engine.core.model_runner import ScheduledSequence
from engine.kv_cache.memory import KvCacheMemory
from engine.model.loaded_model import LoadedModel
from splitserve.generation.kv_blocks import blocks_for


class CpuForward(Forward):
    """A model in bfloat16 on cpu whose attention is computed by the kernels."""

    def __init__(
        self, model: LoadedModel, pool: KvCacheMemory, kernels: CpuKernels, max_rows: int, context_tokens: int
    ) -> None:
        """`max_rows` sequences in a step at most, of up to `context_tokens` tokens each."""
        self._module = model.module
        self._block_size = pool.layout.block_size_tokens
        columns = blocks_for(context_tokens, self._block_size)
        self._backend = CpuAttention(pool, kernels)
        model.context.backend = self._backend
        self._decode_inputs = DecodeInputs(max_rows, context_tokens, self._block_size)
        self.step_graphs = CpuStepGraphs(
            kernels, self._decode_inputs, self._compute, self._run_model, columns, self._block_size
        )

    @override
    def logits(self, batch: Sequence[ScheduledSequence]) -> StepLogits:
        step = flatten(batch)
        # A graph does not keep what the layers return.
        logits = self.step_graphs.logits(step) if step.prompts is None else None
        self.prepared = self.step_graphs.prepared and step.prompts is None
        logits = self._run_model(step) if logits is None else logits
        return StepLogits(logits, step.sample_order, prompts=step.prompts)

    def _run_model(self, step: FlatStep) -> torch.Tensor:
        """Logits `[sampled, vocabulary]` of a step, without a graph."""
        self._decode_inputs.fill(step.sequences[: step.num_decode])
        parts = [Part(Code.ATTEND, 0, step.num_decode, self._decode_inputs)] if step.num_decode else []
        parts += chunk_parts(step.sequences[step.num_decode :], step.num_decode, self._block_size)
        inputs = GraphInputs.make(StepRows(step.num_decode, len(step.token_ids), len(step.sample_rows)))
        inputs.fill(step)
        return self._compute(inputs, parts, step.prompts)

    def _compute(
        self, inputs: GraphInputs, parts: Sequence[Part], prompts: PromptRows | None = None
    ) -> torch.Tensor:
        """Logits `[sampled, vocabulary]` of a step with these parts."""
        self._backend.parts = parts
        try:
            return compute_logits(self._module, inputs.token_ids, inputs.positions, inputs.sampled, prompts)
        finally:
            self._backend.parts = None
