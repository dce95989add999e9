"""GPUs by name, with the figures of their makers' datasheets."""

from __future__ import annotations

from dataclasses import dataclass

from splitserve.errors import InvalidArgumentError

_NVIDIA = "https://www.nvidia.com/en-us/data-center"


@dataclass(frozen=True, slots=True)
class GpuClass:
    """One GPU. Rates are peaks without sparsity: 10^12 operations, 10^9 bytes a second; memory in 10^9 bytes.

    `link_gb_per_s` is to the other GPUs of its host, both ways together, as datasheets have it: NVLink, else PCIe.
    `fp8_tflops` is 0 without such units.
    """

    name: str
    memory_gb: float
    memory_gb_per_s: float
    bf16_tflops: float
    fp8_tflops: float
    link_gb_per_s: float
    source: str
    """Where the figures are published."""


_CLASSES = (
    GpuClass("H100", 80, 3350, 989, 1979, 900, f"{_NVIDIA}/h100/"),
    GpuClass("H100-NVL", 94, 3900, 835, 1671, 600, f"{_NVIDIA}/h100/"),
    GpuClass("H200", 141, 4800, 989, 1979, 900, f"{_NVIDIA}/h200/"),
    GpuClass("B200", 180, 8000, 2250, 4500, 1800, f"{_NVIDIA}/dgx-b200/"),
    GpuClass("A100-80GB", 80, 2039, 312, 0, 600, f"{_NVIDIA}/a100/"),
    GpuClass("A100-40GB", 40, 1555, 312, 0, 600, f"{_NVIDIA}/a100/"),
    GpuClass("L40S", 48, 864, 362, 733, 64, f"{_NVIDIA}/l40s/"),
    GpuClass("L4", 24, 300, 121, 242, 64, f"{_NVIDIA}/l4/"),
    GpuClass("A10", 24, 600, 125, 0, 64, f"{_NVIDIA}/products/a10-gpu/"),
)
CATALOG = {one.name: one for one in _CLASSES}
"""SXM modules where the name does not say otherwise."""


def gpu_class(name: str) -> GpuClass:
    """A GPU by name, in any case. Raises InvalidArgumentError with the names there are."""
    for known, one in CATALOG.items():
        if known.lower() == name.lower():
            return one
    raise InvalidArgumentError(f"gpu: not known: {name!r} ({', '.join(CATALOG)})", field="gpu")
