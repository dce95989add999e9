"""The dtype that an engine computes in."""

from __future__ import annotations

import logging

import torch

from kv_transfer.layout import SAME
from splitserve.config.engine import EngineConfig
from splitserve.logs import log_event

SLOW = "this processor has no instructions for bfloat16, which takes several times as long as float32"


def multiplies_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this processor (AVX-512, AMX, AVX-NE-CONVERT, SVE). Without it torch does
    so element by element."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _lacks_bfloat16(device: torch.device, native: bool | None) -> bool:
    return device.type == "cpu" and not (multiplies_bfloat16() if native is None else native)


def choose_dtype(
    config: EngineConfig, device: torch.device, wire_dtype: str = SAME, native: bool | None = None
) -> str:
    """`engine.dtype` as "float32" or "bfloat16". Pure but for what oneDNN says.

    "auto" is bfloat16, but float32 on a processor that does not multiply it, unless another setting is for bfloat16
    alone. `native`: whether the processor does; default: what oneDNN says.
    """
    if config.dtype != "auto":
        return config.dtype
    for_bfloat16 = config.quantization != "none" or config.kv_cache_dtype != "auto" or wire_dtype != SAME
    return "bfloat16" if for_bfloat16 or not _lacks_bfloat16(device, native) else "float32"


def log_dtype(config: EngineConfig, device: torch.device, dtype: str, native: bool | None = None) -> None:
    """Logs what a processor without bfloat16 costs: `engine.dtype` where float32 was chosen for it, a warning
    `engine.slow_dtype` where bfloat16 is computed all the same."""
    if not _lacks_bfloat16(device, native):
        return
    if dtype == "bfloat16":
        log_event("engine.slow_dtype", level=logging.WARNING, dtype=dtype, why=SLOW)
    elif config.dtype == "auto":
        log_event("engine.dtype", dtype=dtype, why=SLOW)
