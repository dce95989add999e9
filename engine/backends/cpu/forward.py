"""The forward pass with our cpu kernels: steps replay graphs, and run the model where there is none.

The model's own code runs in either case, at capture or in the step itself; only its linear layers, norms and attention
are the kernels'.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from engine.backends.cpu.attention import CpuAttention, DecodeInputs, Part, chunk_parts
from engine.backends.cpu.graphs.step_graphs import CpuStepGraphs, GraphInputs
from engine.backends.cpu.kernels import CpuKernels
from engine.backends.cpu.ops import Code
from engine.backends.interface import FlatStep, Forward, StepLogits, flatten
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
        self._module, self._kernels = model.module, kernels
        self._block_size = pool.layout.block_size_tokens
        columns = blocks_for(context_tokens, self._block_size)
        self._backend = CpuAttention(pool, kernels)
        model.context.backend = self._backend
        self._decode_inputs = DecodeInputs(max_rows, context_tokens, self._block_size)
        self.step_graphs = CpuStepGraphs(
            kernels, self._decode_inputs, self._step, self._run_model, columns, self._block_size
        )

    @override
    def logits(self, batch: Sequence[ScheduledSequence]) -> StepLogits:
        step = flatten(batch)
        logits = self.step_graphs.logits(step)
        self.prepared = self.step_graphs.prepared
        return self._step_logits(self._run_model(step) if logits is None else logits, step.sample_order)

    def _step(self, inputs: GraphInputs, parts: Sequence[Part]) -> torch.Tensor:
        """Logits `[sampled, vocabulary]` of a step with these parts."""
        self._backend.parts = parts
        return self._compute(inputs.token_ids, inputs.positions, inputs.sampled)

    def _run_model(self, step: FlatStep) -> torch.Tensor:
        """Logits `[sampled, vocabulary]` of a step, without a graph."""
        self._decode_inputs.fill(step.sequences[: step.num_decode])
        parts = [Part(Code.ATTEND, 0, step.num_decode, self._decode_inputs)] if step.num_decode else []
        parts += chunk_parts(step.sequences[step.num_decode :], step.num_decode, self._block_size)
        self._backend.parts = parts
        # Only sampled rows go through the output layer. This is left to the model's own forward pass, because some
        # families scale or cap logits there.
        return self._compute(
            torch.from_numpy(step.token_ids).unsqueeze(0),
            torch.from_numpy(step.positions).unsqueeze(0),
            torch.from_numpy(step.sample_rows),
        )

    def _step_logits(self, logits: torch.Tensor, order: list[int]) -> StepLogits:
        if logits.dtype is not torch.bfloat16 or logits.stride(-1) != 1:
            return StepLogits(logits, order)
        return StepLogits(logits, order, lambda: self._kernels.argmax(logits))

    def _compute(self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        try:
            logits: torch.Tensor = self._module(
                input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=keep
            ).logits[0]
        finally:
            self._backend.parts = None
        return logits
