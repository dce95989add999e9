"""The cpu's kernels on one thread and on two; where they cannot be had, the module that asks is skipped."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from engine.backends.cpu.graphs.capture import CpuGraph
from engine.backends.cpu.kernels import CpuKernels
from splitserve.errors import UnavailableError

THREADS = (1, 2)


def kernels_or_skip() -> dict[int, CpuKernels]:
    """By number of threads. Call it where a test module is imported."""
    made = _kernels()
    if isinstance(made, str):
        pytest.skip(f"no kernels: {made}", allow_module_level=True)
    return made


def have_kernels() -> bool:
    """Whether this machine has what the kernels need: a compiler and AVX-512 BF16."""
    return not isinstance(_kernels(), str)


@cache
def _kernels() -> dict[int, CpuKernels] | str:
    try:
        return {threads: CpuKernels(threads) for threads in THREADS}
    except UnavailableError as error:
        return error.message


def count_ops(graph: CpuGraph) -> tuple[int, int]:
    """A graph's kernel operations, and its calls of other operations."""
    ops = [len(part) for part in graph.parts if isinstance(part, np.ndarray)]
    return sum(ops), len(graph.parts) - len(ops)
