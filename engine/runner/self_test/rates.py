"""Rates of a device: bytes read from memory and FLOPs per second, and the share of them that linear layers reach."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
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
        found: dict[str, Any] = {"read_gb_per_s": _copied_gb_per_s(device)}
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            left, right = (torch.randn(CUDA_MATRIX, CUDA_MATRIX, device=device).to(dtype) for _ in range(2))
            found[f"{name}_tflops"] = 2 * CUDA_MATRIX**3 / _time(lambda a=left, b=right: a @ b) / 1e12  # type: ignore[misc]
    torch.cuda.empty_cache()
    found["device"] = torch.cuda.get_device_name(device)
    return found


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


HIDDEN, INTERMEDIATE = 4096, 14336
"""A linear layer of an 8B model."""
DECODE_ROWS, PROMPT_ROWS, PROMPT_ROWS_ON_CPU = 8, 2048, 256
FLOPS_PER_CLOCK = {(8, 0): 2048, (9, 0): 4096, (10, 0): 8192}
"""bfloat16 operations of a multiprocessor in a clock, dense, by compute capability. Where products of one capability
differ in it, as with 8.6 and 8.9, there is no entry."""


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """What a device reaches. Shares are of the measured rates: `decode_share` of the memory rate by a linear layer of
    8 rows, `prompt_share` of the rate of products by one of many rows. `nominal_*`: what its clocks allow at most; None
    if unknown. 1 GB is 10^9 bytes."""

    memory_gb_per_s: float
    bf16_tflops: float
    decode_share: float
    prompt_share: float
    nominal_gb_per_s: float | None = None
    nominal_tflops: float | None = None


def device_rates(device: torch.device) -> DeviceRates:
    """Measures the device; on cpu with torch's number of threads. Takes a second on a GPU, longer on a cpu."""
    on_cpu = device.type == "cpu"
    limits = machine_limits(torch.get_num_threads()) if on_cpu else cuda_limits(device)
    duration = _best if on_cpu else _time
    prompt_rows = PROMPT_ROWS_ON_CPU if on_cpu else PROMPT_ROWS
    with torch.inference_mode():
        weights = torch.randn(INTERMEDIATE, HIDDEN, device=device).to(torch.bfloat16)
        few, many = (
            torch.randn(rows, HIDDEN, device=device).to(torch.bfloat16) for rows in (DECODE_ROWS, prompt_rows)
        )
        decode_s = duration(lambda: torch.nn.functional.linear(few, weights))
        prompt_s = duration(lambda: torch.nn.functional.linear(many, weights))
    memory, products = limits["read_gb_per_s"], limits["bf16_tflops"]
    nominal = (None, None) if on_cpu else nominal_rates(torch.cuda.get_device_properties(device))
    return DeviceRates(
        memory_gb_per_s=memory,
        bf16_tflops=products,
        decode_share=2 * INTERMEDIATE * HIDDEN / decode_s / 1e9 / memory,
        prompt_share=2 * prompt_rows * INTERMEDIATE * HIDDEN / prompt_s / 1e12 / products,
        nominal_gb_per_s=nominal[0],
        nominal_tflops=nominal[1],
    )


def nominal_rates(properties: Any) -> tuple[float | None, float | None]:
    """GB/s and bfloat16 TFLOP/s at the highest clocks, from torch's properties of a CUDA device."""
    # Not in all supported versions of torch. Clocks in kHz, width in bits; two transfers a clock.
    clock = getattr(properties, "clock_rate", 0)
    memory_clock, width = (getattr(properties, name, 0) for name in ("memory_clock_rate", "memory_bus_width"))
    memory = 2 * memory_clock * 1e3 * width / 8 / 1e9
    per_clock = FLOPS_PER_CLOCK.get((properties.major, properties.minor), 0)
    products = properties.multi_processor_count * clock * 1e3 * per_clock / 1e12
    return memory or None, products or None
