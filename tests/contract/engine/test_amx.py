"""Kernels with tile multipliers (AMX) beside those without: the same but for the order of sums."""

from __future__ import annotations

import pytest
import torch

from engine.backends.cpu import build
from engine.backends.cpu.kernels import CpuKernels
from tests.support.engine.cpu_kernels import kernels_or_skip

pytestmark = pytest.mark.usefixtures("one_thread")
KERNELS = kernels_or_skip()
if not build._processor_features() >= build.AMX or not build._may_use_tiles():
    pytest.skip("no AMX", allow_module_level=True)


@pytest.mark.parametrize(("inputs", "outputs"), [(32, 16), (96, 80), (576, 960), (1536, 576)])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 32, 33, 65, 256, 257, 515])
def test_a_layer_with_tiles_is_that_without(inputs: int, outputs: int, rows: int) -> None:
    dice = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=dice).bfloat16()
    weight = torch.randn(outputs, inputs, generator=dice).bfloat16()
    bias = torch.randn(outputs, generator=dice).bfloat16()
    without = CpuKernels(1, amx=False)
    packed = without.pack(weight)
    expected = without.linear(x, packed, bias)
    for kernels in KERNELS.values():
        given = kernels.linear(x, packed, bias)
        torch.testing.assert_close(given, expected, rtol=2**-7, atol=1e-5 * inputs)
