"""The forward pass of one step, and which implementation of attention it uses."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from engine.cpu.kernel_attention import attends
from engine.kv_pool import DTYPES, KvPool
from engine.model_attention import PagedBackend
from engine.model_batch import build_step_batch
from engine.model_loading import LoadedModel
from engine.runner import ScheduledSequence
from splitserve.config import EngineConfig
from splitserve.errors import ConfigError
from splitserve.logs import log_event

_FIELD = "engine.attention_backend"


class StepLogits(NamedTuple):
    """What a step is sampled from. On a GPU all of it may still be under way; it is good until the next step.

    `values` `[samples, vocabulary]`; `order`: the sampled sequences' indices in the batch, one a row; `likeliest` waits
    for the place of each row's largest logit (see `sampler.sample`); None where nobody has looked for it.
    """

    values: torch.Tensor
    order: list[int]
    likeliest: Callable[[], list[int]] | None = None


class Forward(ABC):
    """Runs the model on scheduled sequences."""

    @abstractmethod
    def logits(self, batch: Sequence[ScheduledSequence]) -> StepLogits:
        """Writes KV of the new positions; returns the logits of those that are sampled."""

    def finish(self) -> None:
        """Waits until everything has been computed: then peers may read what was written, and write what was read."""
        return


class TorchForward(Forward):
    """Attention in plain torch; on any device."""

    def __init__(self, model: LoadedModel, pool: KvPool, dense_bytes: int) -> None:
        self._module, self._device, self._dtype = model.module, model.device, DTYPES[model.dtype]
        self._block_size = pool.layout.block_size_tokens
        self._backend = model.context.backend = PagedBackend(pool, dense_bytes)

    def logits(self, batch: Sequence[ScheduledSequence]) -> StepLogits:
        """See `Forward.logits`."""
        backend = self._backend
        step = build_step_batch(
            batch, self._block_size, self._dtype, self._device, backend.group_blocks, backend.dense_rows
        )
        backend.batch = step
        # Only rows that are sampled go through the output layer. The model's own forward pass does it,
        # because some families scale or cap logits there.
        logits: torch.Tensor = self._module(
            input_ids=step.token_ids,
            position_ids=step.positions,
            use_cache=False,
            logits_to_keep=step.sample_rows,
        ).logits[0]
        backend.batch = None
        return StepLogits(logits, step.sample_order)

    def finish(self) -> None:
        """See `Forward.finish`."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def make_forward(model: LoadedModel, pool: KvPool, config: EngineConfig, context_tokens: int) -> Forward:
    """The forward pass that the settings ask for. Raises ConfigError where it cannot work."""
    chosen = choose_backend(config.attention_backend, model.device, model.dtype)
    kernels = model.kernels if chosen == "torch" and attends(pool.layout) else None
    log_event("engine.attention", backend="kernels" if kernels else chosen, device=str(model.device))
    if chosen == "torch":
        if kernels is not None:
            from engine.cpu.kernel_forward import KernelForward

            return KernelForward(model, pool, kernels, config.max_running_requests, context_tokens)
        dense_bytes = config.dense_rows_bytes
        if dense_bytes is None:
            dense_bytes = pool.num_blocks * pool.layout.block_bytes // 4
        return TorchForward(model, pool, dense_bytes)
    # Imported here: what follows needs triton, which is there with torch's CUDA builds only.
    from engine.cuda.paged_forward import PagedAttention, PagedForward

    backend: PagedAttention
    if chosen == "flashinfer":
        from engine.cuda.flashinfer_backend import FlashInferBackend

        backend = FlashInferBackend(pool)
    else:
        from engine.cuda.triton_backend import TritonBackend

        backend = TritonBackend(pool)
    return PagedForward(model, backend, config, context_tokens)


def choose_backend(setting: str, device: torch.device, dtype: str) -> str:
    """What `engine.attention_backend` means here: "torch", "triton" or "flashinfer". Raises ConfigError."""
    on_gpu = device.type == "cuda"
    has_triton = importlib.util.find_spec("triton") is not None
    if setting == "auto":
        return "triton" if on_gpu and has_triton else "torch"
    if setting == "torch":
        return setting
    if not has_triton:
        raise ConfigError(f"{_FIELD}: {setting} needs triton, which is not installed", field=_FIELD)
    if not on_gpu and not (setting == "triton" and _interpreted()):
        raise ConfigError(f"{_FIELD}: {setting} needs a cuda device, not {device.type}", field=_FIELD)
    if setting == "flashinfer":
        if importlib.util.find_spec("flashinfer") is None:
            message = f"{_FIELD}: flashinfer is not installed; pip install 'splitserve[flashinfer]'"
            raise ConfigError(message, field=_FIELD)
        if dtype == "float32":
            raise ConfigError(f"{_FIELD}: flashinfer does not compute in float32", field=_FIELD)
    return setting


def _interpreted() -> bool:
    """Whether triton runs kernels in its interpreter (TRITON_INTERPRET=1), which needs no GPU."""
    import triton

    return bool(triton.knobs.runtime.interpret)
