"""The limits of a machine or GPU that engines are compared with: bytes read from memory, and FLOPs per second."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

READ_BYTES = 512 * 2**20
MATRIX = 2048
REPEATS = 4


def machine_limits(threads: int) -> dict[str, Any]:
    """`read_gb_per_s`, `bf16_tflops`, `fp32_tflops`: the best of a few tries each, as torch reaches them.

    Memory: a sum over a buffer far larger than the caches. Products: square matrices of 2048.
    """
    torch.set_num_threads(threads)
    with torch.inference_mode():
        buffer = torch.ones(READ_BYTES // 4, dtype=torch.float32)
        read_s = _best(buffer.sum)
        limits = {"read_gb_per_s": READ_BYTES / read_s / 1e9}
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            left, right = (torch.randn(MATRIX, MATRIX).to(dtype) for _ in range(2))
            limits[f"{name}_tflops"] = 2 * MATRIX**3 / _best(lambda a=left, b=right: a @ b) / 1e12  # type: ignore[misc]
    return limits


def _best(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


COPY_BYTES = 4 * 2**30
"""Less where this would take more than an eighth of the free memory."""
CUDA_MATRIX = 8192
CUDA_REPEATS = 20


def cuda_limits(device: torch.device) -> dict[str, Any]:
    """`read_gb_per_s`, `bf16_tflops`, `fp32_tflops` (without TF32): the median of some tries each, after a warm-up.

    Memory: a copy from one buffer to another, read and written bytes both counted, for copying is what reaches the most
    of it. Products: square matrices of 8192 with random elements; with zeros a GPU draws less power and runs faster.
    """
    with torch.inference_mode():
        limits: dict[str, Any] = {"read_gb_per_s": _copied_gb_per_s(device)}
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            left, right = (torch.randn(CUDA_MATRIX, CUDA_MATRIX, device=device).to(dtype) for _ in range(2))
            limits[f"{name}_tflops"] = 2 * CUDA_MATRIX**3 / _time(lambda a=left, b=right: a @ b) / 1e12  # type: ignore[misc]
    torch.cuda.empty_cache()
    limits["device"] = torch.cuda.get_device_name(device)
    return limits


def _copied_gb_per_s(device: torch.device) -> float:
    free, _ = torch.cuda.mem_get_info(device)
    size: int = min(COPY_BYTES, free // 8)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _time(lambda: target.copy_(source)) / 1e9


def _time(work: Callable[[], object]) -> float:
    """Duration in seconds by CUDA events."""
    times: list[float] = []
    for _ in range(CUDA_REPEATS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return float(median(times[CUDA_REPEATS // 4 :]))
