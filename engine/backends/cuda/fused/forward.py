"""What the fused forward passes of modules have in common."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn

DTYPES = (torch.float32, torch.bfloat16)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
MAX_GRID = 65535
"""Programs along any axis of a grid but the first."""


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
        """Of the module's own result and the kernel's, relative norm; infinite where the kernel is not made for it."""
        if not self.fits(x):
            return float("inf")
        return relative_difference(self.compute(x), self.own(x))


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over that of `expected`; infinite if their shapes or dtypes differ or one has a NaN."""
    if found.shape != expected.shape or found.dtype is not expected.dtype:
        return float("inf")
    gap = torch.linalg.vector_norm(found.float() - expected.float())
    share = float(gap / torch.linalg.vector_norm(expected.float()).clamp_min(1e-30))
    return share if share == share else float("inf")


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
    if INTERPRETED:
        if DTYPE == tl.bfloat16:
            bits = x.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
            x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE)


