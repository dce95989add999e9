"""The forward pass with our cpu kernels: steps replay graphs, and run the model where there is none.

The model's own code runs in either case, at capture or in the step itself; only its linear layers, norms and attention
are the kernels'.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.backends.cpu.attention import CpuAttention, DecodeInputs, Part, chunk_parts
from engine.backends.cpu.core_exchange import CoreExchange
from engine.backends.cpu.graphs.step_graphs import CpuStepGraphs, GraphInputs
from engine.backends.cpu.kernels import CpuKernels
from engine.backends.cpu.ops import Code
from engine.backends.interface import FlatStep, Forward, StepLogits, flatten
from engine.core.model_runner import StepShape
from engine.core.types import ScheduledSequence
from engine.kv_cache.memory import KvCacheMemory
from engine.model.loaded_model import LoadedModel
from engine.pacing.lending import asks_for_rests
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
        columns = blocks_for(context_tokens, self._block_size)
        self._backend = CpuAttention(pool, kernels)
        model.context.backend = self._backend
        self._decode_inputs = DecodeInputs(max_rows, context_tokens, self._block_size)
        self.step_graphs = CpuStepGraphs(
            kernels, self._decode_inputs, self._step, self._run_model, columns, self._block_size
        )

    def logits(self, batch: Sequence[ScheduledSequence]) -> StepLogits:
        """See `Forward.logits`."""
        self.speedup = 1.0
        self.take_cores()
        step = flatten(batch)
        logits = self._captured(step, asks_for_rests(len(step.token_ids), decode_only=step.decode_only))
        self.prepared = self.step_graphs.prepared
        return self._step_logits(self._run_model(step) if logits is None else logits, step.sample_order)

    @property
    def mixes_steps(self) -> bool:
        """See `Forward.mixes_steps`."""
        return self.step_graphs.works

    def first_steps(self, max_step_tokens: int) -> Sequence[StepShape]:
        """See `Forward.first_steps`."""
        return self.step_graphs.first_steps(max_step_tokens)

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

    def _captured(self, step: FlatStep, wanted: bool) -> torch.Tensor | None:
        """What graphs compute, if there is one, with the cores of neighbours while these rest: `wanted` ones, or those
        that rest anyway."""
        exchange, kernels = self._exchange, self._kernels
        if exchange is None or not (lent := exchange.borrow(wanted)).cores:
            return self.step_graphs.logits(step)
        try:
            if not kernels.use(lent):
                log_event("engine.core_exchange_off", why="this process may not run on its neighbours' cores")
                self._exchange = None
                return self.step_graphs.logits(step)
            logits = self.step_graphs.logits(step)
            self.speedup = 1.0 + kernels.ops_lent / (max(1, kernels.ops_run) * kernels.threads)
            return logits
        finally:
            kernels.use_own()
            exchange.give_back(lent)

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
