"""The forward pass by kernels: steps that only decode are played from tapes, others run the model's own code."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.cpu.arena import Arena
from engine.cpu.chunk_tapes import ChunkStep, ChunkTapes
from engine.cpu.decode_inputs import DecodeInputs
from engine.cpu.decode_tapes import DecodeTapes
from engine.cpu.kernel_attention import KernelBackend, Part, chunk_parts
from engine.cpu.kernels import CpuKernels
from engine.cpu.program import Code
from engine.cuda.step_inputs import flatten
from engine.forward import Forward, StepLogits
from engine.kv_pool import KvPool
from engine.model_loading import LoadedModel
from engine.runner import ScheduledSequence


class KernelForward(Forward):
    """A model in bfloat16 on cpu whose attention is computed by the kernels."""

    def __init__(
        self, model: LoadedModel, pool: KvPool, kernels: CpuKernels, most_rows: int, context_tokens: int
    ) -> None:
        """`most_rows`: sequences of a step at most; `context_tokens`: of one sequence."""
        self._module, self._kernels = model.module, kernels
        self._block_size = pool.layout.block_size_tokens
        self._columns = -(-context_tokens // self._block_size)
        self._backend = KernelBackend(pool, kernels)
        model.context.backend = self._backend
        self._decoding = DecodeInputs(most_rows, context_tokens, self._block_size)
        arena = Arena()
        self.tapes = DecodeTapes(kernels, self._decoding, self._decode, self._eager, most_rows, arena)
        self.chunk_tapes = ChunkTapes(kernels, self._chunk, arena, self._columns, self._block_size)

    def logits(self, batch: Sequence[ScheduledSequence]) -> StepLogits:
        """See `Forward.logits`."""
        order = [index for index, sequence in enumerate(batch) if sequence.sample]
        logits = None
        if all(sequence.num_new == 1 for sequence in batch):
            logits = self.tapes.logits(batch)
        elif len(batch) == 1 and self.tapes.tapes:
            # Whether this model can be noted down is known from the tapes that were compared with it.
            logits = self.chunk_tapes.logits(batch)
        if logits is None:
            return self._pass(batch)
        return self._step_logits(logits if len(order) == len(batch) else logits[order], order)

    def _eager(self, batch: Sequence[ScheduledSequence]) -> torch.Tensor:
        self._decoding.fill(batch)
        return self._decode(len(batch))

    def _decode(self, rows: int) -> torch.Tensor:
        """Logits `[rows, vocabulary]` of the first decoding rows."""
        inputs = self._decoding
        self._backend.step = [Part(Code.ATTEND, 0, rows, inputs)]
        return self._compute(inputs.token_ids[:, :rows], inputs.positions[:, :rows], 0)

    def _chunk(self, step: ChunkStep) -> torch.Tensor:
        """Logits `[1, vocabulary]` of a chunk's last token."""
        rows = step.token_ids.shape[1]
        self._backend.step = [Part(Code.PREFILL, 0, rows, step.inputs)]
        return self._compute(step.token_ids, step.positions, step.last)

    def _pass(self, batch: Sequence[ScheduledSequence]) -> StepLogits:
        flat = flatten(batch, self._block_size)
        self._decoding.fill([sequence for sequence in batch if sequence.num_new == 1])
        parts = [Part(Code.ATTEND, 0, flat.num_decode, self._decoding)] if flat.num_decode else []
        chunks = [sequence for sequence in batch if sequence.num_new != 1]
        parts += chunk_parts(chunks, flat.num_decode, self._block_size)
        self._backend.step = parts
        # Only rows that are sampled go through the output layer. The model's own forward pass does it,
        # because some families scale or cap logits there.
        logits = self._compute(
            torch.from_numpy(flat.token_ids).unsqueeze(0),
            torch.from_numpy(flat.positions).unsqueeze(0),
            torch.from_numpy(flat.sample_rows),
        )
        return self._step_logits(logits, flat.sample_order)

    def _step_logits(self, logits: torch.Tensor, order: list[int]) -> StepLogits:
        if logits.dtype is not torch.bfloat16 or logits.stride(-1) != 1:
            return StepLogits(logits, order)
        return StepLogits(logits, order, lambda: self._kernels.likeliest(logits))

    def _compute(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | int
    ) -> torch.Tensor:
        try:
            logits: torch.Tensor = self._module(
                input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=keep
            ).logits[0]
        finally:
            self._backend.step = None
        return logits
