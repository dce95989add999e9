"""Runs a `transformers` model over the paged KV pool, one step at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from engine.cpu.kernels import CpuKernels
from engine.cuda.device import prepare_device
from engine.forward import StepLogits, choose_backend, make_forward
from engine.fp8_wire import Fp8Wire
from engine.grammar import GrammarFailedError, Mask, MaskFiller
from engine.int8_linears import check_quantization
from engine.kv_pool import KvPool, choose_num_blocks
from engine.model_loading import LoadedModel, load_model, resolve_dtype
from engine.runner import ModelFacts, ModelRunner, PendingStep, ScheduledSequence
from engine.sampler import NanLogitsError, SamplingRow, sample
from engine.types import SampledToken
from kv_transfer.layout import FP8_E4M3, SAME, KvLayout
from kv_transfer.transport import PoolMemory
from kv_transfer.wire import KvWire, check_wire_dtype
from splitserve.config import EngineConfig
from splitserve.errors import ConfigError, UnavailableError
from splitserve.logs import log_event
from splitserve.models import ModelSource


class TorchRunner(ModelRunner):
    """A model, its KV pool and the way from scheduled sequences to sampled tokens."""

    def __init__(self, model: LoadedModel, config: EngineConfig, wire_dtype: str = SAME) -> None:
        self.facts = _facts(model.facts, config)
        self.layout = KvLayout(
            model_fingerprint=model.fingerprint,
            dtype=model.dtype,
            block_size_tokens=config.block_size_tokens,
            num_layers=model.attention.num_layers,
            num_kv_heads=model.attention.num_kv_heads,
            head_dim=model.attention.head_dim,
            quantization=config.quantization,
        )
        self._device = model.device
        self.overlaps = model.device.type == "cuda"
        narrow = wire_dtype == FP8_E4M3
        wire_bytes = replace(self.layout, wire_dtype=wire_dtype).block_bytes if narrow else 0
        num_blocks = choose_num_blocks(config, self.layout, model.device, wire_bytes)
        self._pool = KvPool(self.layout, num_blocks, model.device)
        self._wire: KvWire = Fp8Wire(self._pool) if narrow else super().wire
        self._forward = make_forward(model, self._pool, config, self.facts.context_tokens)
        self._mask_filler = MaskFiller(self.facts.vocabulary_size)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._pool.num_blocks

    @property
    def pool_memory(self) -> PoolMemory:
        """The pool's memory, for registration with a transport; stays put for the runner's life."""
        return self._pool.memory()

    def read_blocks(self, block_ids: Sequence[int]) -> list[memoryview]:
        """See `ModelRunner.read_blocks`."""
        return self._pool.read_blocks(block_ids)

    @property
    def wire(self) -> KvWire:
        """See `ModelRunner.wire`."""
        return self._wire

    def execute(self, batch: Sequence[ScheduledSequence]) -> list[SampledToken | None]:
        """See `ModelRunner.execute`. Raises NanLogitsError and GrammarFailedError; their `rows` index `batch`.

        Running a step again, whole or without some of its sequences, is harmless.
        """
        return self.begin(batch)()

    def begin(self, batch: Sequence[ScheduledSequence]) -> PendingStep:
        """See `ModelRunner.begin`. On cpu the model has been computed when it returns, on a GPU it has been queued."""
        if not batch:
            return list
        with torch.inference_mode():
            return partial(self._finish, batch, self._forward.logits(batch))

    def _finish(self, batch: Sequence[ScheduledSequence], logits: StepLogits) -> list[SampledToken | None]:
        tokens: list[SampledToken | None] = [None] * len(batch)
        with torch.inference_mode():
            try:
                # On a GPU the masks are computed while it is at work.
                masks = self._mask_filler.masks(batch)
                rows = [_sampling_row(batch[index], masks.get(index)) for index in logits.order]
                sampled = _sample(logits, rows, batch) if rows else []
            finally:
                self._forward.finish()
        for index, token in zip(logits.order, sampled, strict=True):
            tokens[index] = token
        return tokens

    def close(self) -> None:
        """Releases the pool and the weights."""
        del self._forward, self._wire, self._pool
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _sample(
    logits: StepLogits, rows: list[SamplingRow], batch: Sequence[ScheduledSequence]
) -> list[SampledToken]:
    """Tokens of the sampled sequences; errors name rows of the batch."""
    try:
        return sample(logits.values, rows, logits.likeliest)
    except NanLogitsError as error:
        failed = tuple(sorted(logits.order[row] for row in error.rows))
        names = ", ".join(batch[index].request_id for index in failed)
        raise NanLogitsError(f"logits are not finite: {names}", failed) from None
    except GrammarFailedError as error:
        failed = tuple(sorted(logits.order[row] for row in error.rows))
        raise GrammarFailedError(error.message, failed) from None


def _sampling_row(sequence: ScheduledSequence, mask: Mask | None) -> SamplingRow:
    return SamplingRow(
        sampling=sequence.sampling,
        token_ids=sequence.token_ids,
        prompt_tokens=sequence.prompt_tokens,
        end=sequence.num_computed + sequence.num_new,
        banned_token_ids=sequence.banned_token_ids,
        mask=mask,
    )


def _facts(facts: ModelFacts, config: EngineConfig) -> ModelFacts:
    limit = config.context_tokens
    if limit is None:
        return facts
    if limit > facts.context_tokens:
        message = f"engine.context_tokens: {limit} is more than the model's own {facts.context_tokens}"
        raise ConfigError(message, field="engine.context_tokens")
    return ModelFacts(limit, facts.vocabulary_size, facts.eos_token_ids)


def choose_device(name: str) -> torch.device:
    """The device that a setting means. Raises ConfigError for a cuda device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    device = torch.device(name if ":" in name else f"{name}:0")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        message = f"engine.device: {name} is not available ({count} cuda devices)"
        raise ConfigError(message, field="engine.device")
    return device


def build_torch_runner(
    config: EngineConfig, source: ModelSource, progress: Callable[[float], None], wire_dtype: str = SAME
) -> TorchRunner:
    """Loads a model and its pool; sets the number of compute threads of the process.

    Raises NotFoundError, UnavailableError, UnsupportedModelError and ConfigError as `load_model`,
    `choose_num_blocks`, `check_wire_dtype`, `choose_backend` and `check_quantization`, the last three before anything
    is loaded.
    """
    dtype = resolve_dtype(config.dtype)
    check_wire_dtype(wire_dtype, dtype)
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    device = choose_device(config.device)
    choose_backend(config.attention_backend, device, dtype)
    if device.type == "cuda":
        prepare_device(device)
    check_quantization(config, dtype, device)
    kernels = cpu_kernels(config, dtype, device)
    model = load_model(source, dtype, device, progress, config.quantization, kernels)
    return TorchRunner(model, config, wire_dtype)


def cpu_kernels(config: EngineConfig, dtype: str, device: torch.device) -> CpuKernels | None:
    """The kernels, where they are for this engine and can be had here; that they cannot is logged."""
    if config.cpu_kernels == "off" or device.type != "cpu" or dtype != "bfloat16":
        return None
    try:
        return CpuKernels(torch.get_num_threads())
    except UnavailableError as error:
        log_event("engine.cpu_kernels_off", why=error.message)
        return None
