"""KV in int8: a code for each element, a bfloat16 scale for each key and each value vector.

Symmetric: an element is its code, -127 to 127, times the scale, which is the vector's largest magnitude over 127. A
vector that is not finite has the scale NaN, so all of it is NaN when it is read. See decision 52.

The cpu kernels (`src/int8_kv.hpp`) and the Triton kernels compute the same codes and scales.
"""

from __future__ import annotations

import math

import torch

LARGEST_CODE = 127
SMALLEST_SCALE = 2.0**-126
"""Its reciprocal is finite in float32."""


def quantize(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bfloat16 `[..., head_dim]` to codes, int8 `[..., head_dim]`, and scales, bfloat16 `[...]`."""
    wide = vectors.float()
    largest = wide.abs().amax(-1)
    scales = (largest / LARGEST_CODE).to(torch.bfloat16).clamp_(min=SMALLEST_SCALE)
    scales.masked_fill_(~largest.isfinite(), math.nan)
    codes = (wide * scales.float().reciprocal().unsqueeze(-1)).round_().clamp_(-LARGEST_CODE, LARGEST_CODE)
    return codes.nan_to_num_(0.0).to(torch.int8), scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The inverse of `quantize`, in bfloat16."""
    return codes.to(torch.bfloat16).mul_(scales.unsqueeze(-1))
