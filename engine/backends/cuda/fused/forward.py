"""What the fused forward passes of modules have in common."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn

from engine.model.sibling_linears import relative_difference

DTYPES = (torch.float32, torch.bfloat16)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
MAX_GRID = 65535
"""Programs along any axis of a grid but the first."""
MOST_BY_ROUNDING = 2.0**-7
"""Relative norm: of bfloat16 numbers that are all one place off."""
NEGLIGIBLE = 2.0**-10
"""A quarter of a place of a bfloat16 number. Small results of gelu are differences of large ones, and never exact."""


class FusedForward:
    """Stands for the `forward` of one module, as an attribute of the instance; its class and its weights stay.

    `own`: the module's own. It computes what the kernel is not made for, such as another dtype.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.own = module, module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own `forward`."""
        raise NotImplementedError


class FusedUnary(FusedForward):
    """The forward pass of a module of one tensor."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `FusedForward`."""
        if len(args) == 1 and not kwargs and self.fits(args[0]):
            return self.compute(args[0])
        return self.own(*args, **kwargs)

    def fits(self, x: torch.Tensor) -> bool:
        """Whether the kernel computes this tensor."""
        raise NotImplementedError

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """By the kernel."""
        raise NotImplementedError

    def difference(self, x: torch.Tensor) -> float:
        """The `deviation` of the kernel's result from the module's own; infinite for what does not fit."""
        if not self.fits(x):
            return float("inf")
        return deviation(self.compute(x), self.own(x))


def deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    """How far a result is from the one that it stands for; infinite where their shapes or dtypes differ, or one has
    a NaN.

    In float32, where the order of sums shows, the relative norm of the difference. In bfloat16, where it now and then
    rounds to the other neighbour, the share of elements that are off by more than a NEGLIGIBLE part of their root mean
    square, two of them apart; infinite where the norm shows more than such roundings.
    """
    if found.shape != expected.shape or found.dtype is not expected.dtype:
        return float("inf")
    if torch.equal(found, expected):
        return 0.0
    norm = relative_difference(found.float(), expected.float())
    if norm != norm:
        return float("inf")
    if found.dtype is torch.float32:
        return norm
    if not norm <= MOST_BY_ROUNDING:
        return float("inf")
    gap, mean_square = (found.float() - expected.float()).abs(), expected.float().square().mean()
    off = int((gap > NEGLIGIBLE * mean_square.sqrt()).sum())
    size: int = expected.numel()
    return max(off - 2, 0) / size


def has_own_forward(module: nn.Module) -> bool:
    """Whether the class's `forward` is in force: nobody has put another one in its place."""
    return "forward" not in vars(module)


def is_one_row_of_tokens(x: torch.Tensor, stands_for: torch.Tensor | None = None) -> bool:
    """Whether the shape is `[1, tokens, width]` or `[tokens, width]`, not empty, with contiguous vectors; and that of
    `stands_for`, if given."""
    if stands_for is not None and (x.shape != stands_for.shape or x.dtype is not stands_for.dtype):
        return False
    return x.dim() in (2, 3) and x.numel() > 0 and x.stride(-1) == 1 and (x.dim() == 2 or x.shape[0] == 1)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 numbers to the nearest of DTYPE, ties to even, as torch rounds; in the interpreter, whose own conversion
    to bfloat16 cuts off, by their bits."""
    if INTERPRETED and DTYPE is tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)
