"""Chooses the backend that computes a step: torch, our cpu kernels, or Triton's on CUDA."""

from __future__ import annotations

import importlib.util

import torch

from engine.backends.cpu.attention import attends
from engine.backends.cpu.forward import CpuForward
from engine.backends.cpu.kernels import CpuKernels
from engine.backends.cuda.forward import CudaForward, PagedAttention
from engine.backends.interface import Forward
from engine.backends.torch_native.attention import TorchForward
from engine.kv_cache.memory import KvCacheMemory
from engine.model.loaded_model import LoadedModel
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError
from splitserve.logs import log_event

_FIELD = "engine.attention_backend"


def make_forward(
    model: LoadedModel,
    pool: KvCacheMemory,
    config: EngineConfig,
    context_tokens: int,
    kernels: CpuKernels | None = None,
) -> Forward:
    """The forward pass that the settings choose; `kernels`: the ones that the model was loaded with.

    `context_tokens` bounds the length of a sequence. Raises ConfigError if the chosen backend cannot work here.
    """
    chosen = choose_backend(config.attention_backend, model.device)
    if chosen != "torch" or not attends(pool.layout):
        kernels = None
    log_event("engine.attention", backend="kernels" if kernels else chosen, device=str(model.device))
    if chosen == "torch":
        if kernels is not None:
            return CpuForward(model, pool, kernels, config.max_running_requests, context_tokens)
        return TorchForward(model, pool)
    return CudaForward(model, paged_attention(pool), config, context_tokens)


def paged_attention(pool: KvCacheMemory) -> PagedAttention:
    """Attention by the Triton kernels over a pool."""
    # Imported here: they need triton, which only comes with torch's CUDA builds.
    from engine.backends.cuda.triton_attention import TritonAttention

    return TritonAttention(pool)


def choose_backend(setting: str, device: torch.device) -> str:
    """Resolves `engine.attention_backend` to "torch" or "triton".

    Raises ConfigError if the chosen one lacks a package or the device.
    """
    on_gpu = device.type == "cuda"
    has_triton = importlib.util.find_spec("triton") is not None
    if setting == "auto":
        return "triton" if on_gpu and has_triton else "torch"
    if setting == "torch":
        return setting
    if not has_triton:
        raise ConfigError(f"{_FIELD}: {setting} needs triton, which is not installed", field=_FIELD)
    if not on_gpu and not _interpreted():
        raise ConfigError(f"{_FIELD}: {setting} needs a cuda device, not {device.type}", field=_FIELD)
    return setting


def _interpreted() -> bool:
    """Whether triton runs kernels in its interpreter (TRITON_INTERPRET=1), which needs no GPU."""
    import triton

    return bool(triton.knobs.runtime.interpret)
