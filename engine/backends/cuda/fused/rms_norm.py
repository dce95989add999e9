"""Root mean square norms in one kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import nn

from engine.backends.cuda.fused.forward import DTYPES, MAX_GRID, FusedUnary, has_own_forward, rounded

EPSILONS = ("variance_epsilon", "eps")
"""Names of the attribute in the model families."""
KINDS = {"rounded": 0, "scaled": 1, "one_plus": 2}
"""What models do with the weight: it multiplies the norm that was rounded to the model's dtype (llama), the norm in
float32 (olmo2), or one is added to it before that (gemma)."""
ONE_PLUS, ROUNDED = tl.constexpr(KINDS["one_plus"]), tl.constexpr(KINDS["rounded"])
MAX_WIDTH = 1 << 15
ELEMENTS_A_WARP = 512
MAX_WARPS = 16


@triton.jit
def _rms_norm(  # type: ignore[no-untyped-def]
    x,
    weight,
    y,
    outer_stride,
    inner_stride,
    y_outer_stride,
    y_inner_stride,
    epsilon,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):
    """One row. Grid: outer rows, inner rows."""
    outer = tl.program_id(0).to(tl.int64)
    inner = tl.program_id(1).to(tl.int64)
    places = tl.arange(0, PADDED)
    mask = places < WIDTH
    row = tl.load(x + outer * outer_stride + inner * inner_stride + places, mask=mask, other=0.0)
    scale = tl.load(weight + places, mask=mask, other=0.0).to(tl.float32)
    wide = row.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + epsilon)
    if KIND == ROUNDED:
        wide = rounded(wide, row.dtype).to(tl.float32)
    if KIND == ONE_PLUS:
        scale = 1.0 + scale
    result = rounded(wide * scale, row.dtype)
    tl.store(y + outer * y_outer_stride + inner * y_inner_stride + places, result, mask=mask)


class Rows(NamedTuple):
    """The rows of a tensor as two nested loops: how many, and the dimensions that they go along (None: once)."""

    outer: int
    inner: int
    outer_dim: int | None
    inner_dim: int | None

    def strides(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Of both loops, in elements."""
        outer = 0 if self.outer_dim is None else tensor.stride(self.outer_dim)
        return outer, 0 if self.inner_dim is None else tensor.stride(self.inner_dim)


def rows_of(x: torch.Tensor) -> Rows | None:
    """The rows of `[..., width]`; None where two loops do not do, or a vector is not contiguous."""
    dims = [dim for dim in range(x.dim() - 1) if x.shape[dim] != 1]
    if len(dims) > 2 or x.stride(-1) != 1 or not x.numel():
        return None
    if not dims:
        return Rows(1, 1, None, None)
    if len(dims) == 1:
        return Rows(x.shape[dims[0]], 1, dims[0], None)
    outer, inner = dims if x.stride(dims[0]) >= x.stride(dims[1]) else dims[::-1]
    return Rows(x.shape[outer], x.shape[inner], outer, inner) if x.shape[inner] <= MAX_GRID else None


def rms_norm(x: torch.Tensor, rows: Rows, weight: torch.Tensor, epsilon: float, kind: str) -> torch.Tensor:
    """The norm of each of the `rows` of x `[..., width]`, in its dtype and in the order of its dimensions in memory;
    sums in float32."""
    y = torch.empty_like(x)
    width = len(weight)
    padded = triton.next_power_of_2(width)
    _rms_norm[(rows.outer, rows.inner)](
        x,
        weight,
        y,
        *rows.strides(x),
        *rows.strides(y),
        epsilon,
        KIND=KINDS[kind],
        WIDTH=width,
        PADDED=padded,
        num_warps=warps_of(padded),
        # A fused product and sum would round otherwise than the model's own operations do.
        enable_fp_fusion=False,
    )
    return y


def warps_of(padded_width: int) -> int:
    """Of a program that computes a row."""
    return min(max(padded_width // ELEMENTS_A_WARP, 1), MAX_WARPS)


class FusedNorm(FusedUnary):
    """The forward pass of a norm of one kind."""

    def __init__(self, module: nn.Module, weight: torch.Tensor, epsilon: float, kind: str) -> None:
        super().__init__(module)
        self._weight, self._epsilon, self._kind = weight, epsilon, kind

    def fits(self, x: torch.Tensor) -> bool:
        """See `FusedUnary`."""
        same = x.dtype is self._weight.dtype and x.device == self._weight.device
        return same and x.shape[-1] == len(self._weight) and rows_of(x) is not None

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """See `FusedUnary`."""
        rows = rows_of(x)
        assert rows is not None
        return rms_norm(x, rows, self._weight, self._epsilon, self._kind)


def fused_norms(module: nn.Module) -> list[FusedUnary]:
    """For a module that may be such a norm, its forward pass by each kind; else none."""
    parameters = dict(module.named_parameters())
    epsilon = next((vars(module)[name] for name in EPSILONS if name in vars(module)), None)
    if set(parameters) != {"weight"} or not isinstance(epsilon, float) or list(module.children()):
        return []
    weight = parameters["weight"].detach()
    fits = weight.dim() == 1 and weight.is_contiguous() and len(weight) <= MAX_WIDTH
    if not fits or weight.dtype not in DTYPES or not has_own_forward(module):
        return []
    return [FusedNorm(module, weight, epsilon, kind) for kind in KINDS]
