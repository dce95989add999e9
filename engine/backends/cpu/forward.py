"""The forward pass with our cpu kernels: decode-only steps and single chunks replay graphs, others run the model.

The model's own code runs in either case, at capture or in the step itself; only its linear layers, norms and attention
are the kernels'.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.backends.cpu.attention import CpuAttention, DecodeInputs, Part, chunk_parts
from engine.backends.cpu.core_exchange import CoreExchange
from engine.backends.cpu.graphs.decode_graphs import CpuDecodeGraphs
from engine.backends.cpu.graphs.memory_planner import MemoryPlanner
from engine.backends.cpu.graphs.prefill_graphs import ChunkStep, CpuPrefillGraphs
from engine.backends.cpu.kernels import CpuKernels
from engine.backends.cpu.ops import Code
from engine.backends.interface import Forward, StepLogits, flatten
from engine.core.types import ScheduledSequence
from engine.kv_cache.memory import KvCacheMemory
from engine.model.loaded_model import LoadedModel
from engine.pacing.lending import MIN_LENT_TOKENS
from splitserve.generation.kv_blocks import blocks_for
from splitserve.logs import log_event


class CpuForward(Forward):
    """A model in bfloat16 on cpu whose attention is computed by the kernels."""

    def __init__(
        self,
        model: LoadedModel,
        pool: KvCacheMemory,
        kernels: CpuKernels,
        max_rows: int,
        context_tokens: int,
        exchange: CoreExchange | None = None,
    ) -> None:
        """`max_rows` sequences in a step at most, of up to `context_tokens` tokens each. `exchange`: with neighbours on
        this host that lend their cores while they rest."""
        self._module, self._kernels = model.module, kernels
        self._exchange = exchange
        self._block_size = pool.layout.block_size_tokens
        self._columns = blocks_for(context_tokens, self._block_size)
        self._backend = CpuAttention(pool, kernels)
        model.context.backend = self._backend
        self._decode_inputs = DecodeInputs(max_rows, context_tokens, self._block_size)
        memory = MemoryPlanner()
        self.decode_graphs = CpuDecodeGraphs(
            kernels, self._decode_inputs, self._decode, self._eager, max_rows, memory
        )
        self.prefill_graphs = CpuPrefillGraphs(kernels, self._chunk, memory, self._columns, self._block_size)

    def logits(self, batch: Sequence[ScheduledSequence]) -> StepLogits:
        """See `Forward.logits`."""
        self.speedup = 1.0
        self.take_cores()
        order = [index for index, sequence in enumerate(batch) if sequence.sample]
        logits = None
        if all(sequence.num_new == 1 for sequence in batch):
            logits = self._captured(self.decode_graphs, batch, wanted=False)
        elif len(batch) == 1 and self.decode_graphs.graphs:
            # A decode graph exists, so this model can be captured: the first one was compared with it.
            is_long = batch[0].num_new >= MIN_LENT_TOKENS
            logits = self._captured(self.prefill_graphs, batch, wanted=True if is_long else None)
        if logits is None:
            return self._run_uncaptured(batch)
        return self._step_logits(logits if len(order) == len(batch) else logits[order], order)

    def rest(self) -> None:
        """See `Forward.rest`."""
        if self._exchange is not None:
            self._exchange.rest()

    def take_cores(self) -> None:
        """See `Forward.take_cores`."""
        if self._exchange is not None:
            self._exchange.work()

    def demand(self) -> int | None:
        """See `Forward.demand`."""
        return None if self._exchange is None else self._exchange.demand()

    def is_lent(self) -> bool:
        """See `Forward.is_lent`."""
        return self._exchange is not None and self._exchange.is_lent()

    @property
    def shares_cores(self) -> bool:
        """See `Forward.shares_cores`."""
        return self._exchange is not None

    def close(self) -> None:
        """See `Forward.close`."""
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def _captured(
        self,
        graphs: CpuDecodeGraphs | CpuPrefillGraphs,
        batch: Sequence[ScheduledSequence],
        wanted: bool | None,
    ) -> torch.Tensor | None:
        """Of a batch that may have a graph, with the cores of neighbours while these rest: `wanted` ones, or those that
        rest anyway; None: with its own."""
        exchange, kernels = self._exchange, self._kernels
        if exchange is None or wanted is None or not (lent := exchange.borrow(wanted)).cores:
            return graphs.logits(batch)
        try:
            if not kernels.use(lent):
                log_event("engine.core_exchange_off", why="this process may not run on its neighbours' cores")
                self._exchange = None
                return graphs.logits(batch)
            logits = graphs.logits(batch)
            self.speedup = 1.0 + kernels.ops_lent / (max(1, kernels.ops_run) * kernels.threads)
            return logits
        finally:
            kernels.use_own()
            exchange.give_back(lent)

    def _eager(self, batch: Sequence[ScheduledSequence]) -> torch.Tensor:
        self._decode_inputs.fill(batch)
        return self._decode(len(batch))

    def _decode(self, rows: int) -> torch.Tensor:
        """Logits `[rows, vocabulary]` of the first `rows` decode inputs."""
        inputs = self._decode_inputs
        self._backend.parts = [Part(Code.ATTEND, 0, rows, inputs)]
        return self._compute(inputs.token_ids[:, :rows], inputs.positions[:, :rows], 0)

    def _chunk(self, step: ChunkStep) -> torch.Tensor:
        """Logits `[1, vocabulary]` of a chunk's last token."""
        rows = step.token_ids.shape[1]
        self._backend.parts = [Part(Code.PREFILL, 0, rows, step.inputs)]
        return self._compute(step.token_ids, step.positions, step.last)

    def _run_uncaptured(self, batch: Sequence[ScheduledSequence]) -> StepLogits:
        flat = flatten(batch)
        self._decode_inputs.fill([sequence for sequence in batch if sequence.num_new == 1])
        parts = [Part(Code.ATTEND, 0, flat.num_decode, self._decode_inputs)] if flat.num_decode else []
        chunks = [sequence for sequence in batch if sequence.num_new != 1]
        parts += chunk_parts(chunks, flat.num_decode, self._block_size)
        self._backend.parts = parts
        # Only sampled rows go through the output layer. This is left to the model's own forward pass, because some
        # families scale or cap logits there.
        logits = self._compute(
            torch.from_numpy(flat.token_ids).unsqueeze(0),
            torch.from_numpy(flat.positions).unsqueeze(0),
            torch.from_numpy(flat.sample_rows),
        )
        return self._step_logits(logits, flat.sample_order)

    def _step_logits(self, logits: torch.Tensor, order: list[int]) -> StepLogits:
        if logits.dtype is not torch.bfloat16 or logits.stride(-1) != 1:
            return StepLogits(logits, order)
        return StepLogits(logits, order, lambda: self._kernels.argmax(logits))

    def _compute(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor | int
    ) -> torch.Tensor:
        try:
            logits: torch.Tensor = self._module(
                input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=keep
            ).logits[0]
        finally:
            self._backend.parts = None
        return logits
