"""How much memory of a device is left for KV: a trial run, CUDA graphs included, measures what else a worker takes."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from engine.core.model_runner import ModelRunner, warm_up
from splitserve.config.engine import EngineConfig
from splitserve.errors import ConfigError
from splitserve.generation.kv_blocks import blocks_for
from splitserve.logs import log_event

OUTSIDE_BYTES = 3 * 2**29
"""What the trial does not see: CUDA's context and libraries, and drawing tokens in float64."""
SPARE_BYTES = 2**28
"""Left free on a device that others use as well."""


class CudaMemory:
    """The memory of a CUDA device in bytes, as torch's allocator takes it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reset_peak(self) -> None:
        """Gives unused memory back, and begins a new peak."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """The most that this process has taken since `reset_peak`."""
        return int(torch.cuda.max_memory_reserved(self._device))

    def free(self) -> int:
        """Memory that is free now, whichever process took the rest."""
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def total(self) -> int:
        """Memory of the whole device."""
        return int(torch.cuda.mem_get_info(self._device)[1])


def kv_budget(total: int, free: int, own: int, share: float) -> int:
    """Bytes for KV of a worker that may take `share` of a device and needs `own` bytes for everything else; at most
    what is free. Not positive where nothing is left. Pure."""
    return min(int(total * share) - own - OUTSIDE_BYTES, free - SPARE_BYTES)


def with_kv_memory(
    config: EngineConfig,
    step_tokens: int,
    make_runner: Callable[[EngineConfig], ModelRunner],
    memory: CudaMemory,
) -> EngineConfig:
    """The settings with `kv_memory_bytes` set, by a trial run, to what `device_memory_share` leaves.

    Unchanged where memory or blocks are set. `step_tokens`: the largest step, which the trial computes. Raises
    ConfigError if nothing is left.
    """
    if config.kv_memory_bytes is not None or config.num_blocks is not None:
        return config
    memory.reset_peak()
    blocks = blocks_for(step_tokens + 1, config.block_size_tokens) + 1
    trial = make_runner(config.model_copy(update={"num_blocks": blocks}))
    try:
        warm_up(trial, step_tokens + 1, step_tokens)
        pool = trial.pool_memory.num_blocks * trial.layout.block_bytes
        own = memory.peak() - pool
    finally:
        trial.close()
        del trial
        gc.collect()  # captured graphs and their forward pass refer to each other
    total = memory.total()
    budget = kv_budget(total, memory.free(), own, config.device_memory_share)
    log_event("engine.memory_profile", total_bytes=total, own_bytes=own, kv_bytes=budget)
    if budget <= 0:
        needed = (own + OUTSIDE_BYTES) / total
        message = (
            f"engine.device_memory_share: {config.device_memory_share:g} of the device leaves nothing for KV;"
            f" model and working memory take {needed:.2f} of it, and {memory.free() / 2**30:.1f} GiB are free"
        )
        raise ConfigError(message, field="engine.device_memory_share")
    return config.model_copy(update={"kv_memory_bytes": budget})
