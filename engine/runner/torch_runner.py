"""Runs a `transformers` model over paged KV, one step at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from typing_extensions import override

from engine.backends.cpu.kernels import CpuKernels
from engine.backends.interface import StepLogits
from engine.backends.select import make_forward
from engine.core.model_runner import (
    DEFAULT_STEP_TOKENS,
    ModelFacts,
    ModelRunner,
    PendingStep,
    RowsFailedError,
    SampledToken,
    ScheduledSequence,
)
from engine.kv_cache.memory import KvCacheMemory, choose_num_blocks
from engine.model.loaded_model import LoadedModel
from engine.runner.memory_profile import CudaMemory, with_kv_memory
from engine.runner.model_loader import load_weights
from engine.runner.prompt_logprobs import put_prompt_logprobs
from engine.runner.sampler import NanLogitsError, sample
from engine.runner.sampling_row import SamplingRow
from engine.runner.structured_output import Mask, masks_of
from kv_transfer.layout import KvLayout
from kv_transfer.transports.regions import VRAM
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError
from splitserve.logs import log_event
from splitserve.models.sources import ModelSource

EXPERIMENTAL = "the CUDA path of this engine is experimental; see docs/internals/engine.md"


class TorchRunner(ModelRunner):
    """A model with its KV blocks: computes scheduled sequences and samples tokens."""

    def __init__(self, model: LoadedModel, config: EngineConfig, kernels: CpuKernels | None = None) -> None:
        """`kernels`: the ones that the model was loaded with, if any."""
        self.facts = _facts(model.facts, config)
        self.layout = kv_layout(model, config)
        self._device = model.device
        self._module = model.module
        self._context = model.context
        self.overlaps = model.device.type == "cuda"
        self.num_blocks = choose_num_blocks(config, self.layout)
        self._pool = KvCacheMemory(self.layout, self.num_blocks, model.device)
        self.pool_memory = self._pool.memory()
        self._forward = make_forward(model, self._pool, config, self.facts.context_tokens, kernels)

    @override
    def read_blocks(self, block_ids: Sequence[int]) -> list[memoryview]:
        return self._pool.read_blocks(block_ids)

    @override
    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        """Raises NanLogitsError and GrammarFailedError, whose `rows` index `batch`.

        A step may be run again, whole or without some of its sequences.
        """
        return self.begin(batch)()

    @override
    def begin(self, batch: Sequence[ScheduledSequence]) -> PendingStep:
        """When it returns, the model has run (cpu) or is queued (GPU)."""
        if not batch:
            return list
        with torch.inference_mode():
            return partial(self._finish, batch, self._forward.logits(batch))

    def _finish(self, batch: Sequence[ScheduledSequence], logits: StepLogits) -> list[SampledToken | None]:
        with torch.inference_mode():
            try:
                tokens = _sampled(batch, logits, masks_of(batch))
                if logits.prompts is not None:
                    put_prompt_logprobs(logits.prompts, self._device)
                return tokens
            finally:
                self._forward.finish()

    @override
    def poll_while_computing(self, poll: Callable[[], None]) -> None:
        self._forward.poll_while_computing(poll)

    @property
    @override
    def prepared(self) -> bool:
        return self._forward.prepared

    @override
    def close(self) -> None:
        del self._forward, self._pool, self._module
        if self._device.type == "cuda":
            del self._context.backend  # it has views of the pool
            torch.cuda.empty_cache()


def _sampled(
    batch: Sequence[ScheduledSequence], logits: StepLogits, masks: Mapping[int, Mask]
) -> list[SampledToken | None]:
    """Samples the sequences that have logits. The `rows` of an error are indices in the batch."""
    tokens: list[SampledToken | None] = [None] * len(batch)
    if not logits.order:
        return tokens
    sampling = [SamplingRow.of(batch[index], masks.get(index)) for index in logits.order]
    try:
        sampled = sample(logits.values, sampling, logits.argmax)
    except RowsFailedError as error:
        failed = tuple(sorted(logits.order[row] for row in error.rows))
        message = error.message
        if isinstance(error, NanLogitsError):
            message = f"logits are not finite: {', '.join(batch[index].request_id for index in failed)}"
        raise type(error)(message, failed, reason=error.reason) from None
    for index, token in zip(logits.order, sampled, strict=True):
        tokens[index] = token
    return tokens


def kv_layout(model: LoadedModel, config: EngineConfig) -> KvLayout:
    """The layout of a model's KV blocks."""
    return KvLayout(
        model_fingerprint=model.fingerprint,
        dtype=model.dtype,
        block_size_tokens=config.block_size_tokens,
        num_layers=model.attention.num_layers,
        num_kv_heads=model.attention.num_kv_heads,
        head_dim=model.attention.head_dim,
    )


def _facts(facts: ModelFacts, config: EngineConfig) -> ModelFacts:
    limit = config.context_tokens
    if limit is None:
        return facts
    if limit > facts.context_tokens:
        message = f"engine.context_tokens: {limit} is more than the model's own {facts.context_tokens}"
        raise ConfigError(message, field="engine.context_tokens")
    return replace(facts, context_tokens=limit)


def build_torch_runner(
    config: EngineConfig,
    source: ModelSource,
    loaded: Callable[[], None] = lambda: None,
) -> TorchRunner:
    """Loads a model, calls `loaded`, and allocates its KV blocks; sets the number of compute threads of the process.

    `source` comes from `checked_model`, which has checked its files. Raises UnavailableError, UnsupportedModelError and
    ConfigError as `load_weights` and `choose_num_blocks`.
    """
    model, kernels = load_weights(config, source)
    loaded()
    if model.device.type == "cuda":
        log_event("engine.experimental", level=logging.WARNING, device=str(model.device), why=EXPERIMENTAL)
    return make_torch_runner(model, config, kernels)


def make_torch_runner(
    model: LoadedModel, config: EngineConfig, kernels: CpuKernels | None = None
) -> TorchRunner:
    """The runner of a loaded model; on cuda with as much KV as `device_memory_share` leaves, unless the settings give
    its size."""
    if model.device.type == "cuda":
        step_tokens = config.max_step_tokens or DEFAULT_STEP_TOKENS[VRAM]
        trial = partial(TorchRunner, model)
        config = with_kv_memory(config, step_tokens, trial, CudaMemory(model.device))
    return TorchRunner(model, config, kernels)
