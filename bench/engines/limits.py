"""What the machine gives: bytes read from memory and multiplications a second, with so many threads."""

from __future__ import annotations

import time
from collections.abc import Callable
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
        found = {"read_gb_per_s": READ_BYTES / read_s / 1e9}
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            left, right = (torch.randn(MATRIX, MATRIX).to(dtype) for _ in range(2))
            found[f"{name}_tflops"] = 2 * MATRIX**3 / _best(lambda a=left, b=right: a @ b) / 1e12  # type: ignore[misc]
    return found


def _best(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best
