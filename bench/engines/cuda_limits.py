"""What a GPU gives: bytes moved in its memory and multiplications a second."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

COPY_BYTES = 4 * 2**30
MATRIX = 8192
REPEATS = 20


def cuda_limits(device: torch.device) -> dict[str, Any]:
    """`read_gb_per_s`, `bf16_tflops`, `fp32_tflops` (without TF32): the median of some tries each, after a warm-up.

    Memory: a copy from one buffer to another, read and written bytes both counted, for copying is what reaches the most
    of it. Products: square matrices of 8192 with random elements; with zeros a GPU draws less power and runs faster.
    """
    with torch.inference_mode():
        found: dict[str, Any] = {"read_gb_per_s": _copied_gb_per_s(device)}
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            left, right = (torch.randn(MATRIX, MATRIX, device=device).to(dtype) for _ in range(2))
            found[f"{name}_tflops"] = 2 * MATRIX**3 / _time(lambda a=left, b=right: a @ b) / 1e12  # type: ignore[misc]
    torch.cuda.empty_cache()
    found["device"] = torch.cuda.get_device_name(device)
    return found


def _copied_gb_per_s(device: torch.device) -> float:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _time(lambda: target.copy_(source)) / 1e9


def _time(work: Callable[[], object]) -> float:
    """Seconds, by the GPU's own clock."""
    times: list[float] = []
    for _ in range(REPEATS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return median(times[REPEATS // 4 :])
