"""Rotary position embedding of query and key in one kernel."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn

from engine.backends.cuda.fused.forward import (
    DTYPES,
    FusedForward,
    deviation,
    has_own_forward,
    rounded,
)

FUNCTION = "apply_rotary_pos_emb"
"""What `transformers` calls it in the module of each model."""
HEADS = 8
"""Of a program."""
WARPS = 4

Rotated = tuple[torch.Tensor, torch.Tensor]
Rotate = Callable[..., Rotated]


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    query,
    key,
    cosines,
    sines,
    y,
    query_head_stride,
    query_token_stride,
    key_head_stride,
    key_token_stride,
    QUERY_HEADS: tl.constexpr,
    ALL_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Some heads of one token, those of the query first. Grid: tokens, groups of heads."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    of_query = (heads < QUERY_HEADS)[:, None]
    of_key = ((heads >= QUERY_HEADS) & (heads < ALL_HEADS))[:, None]
    from_query = query + token * query_token_stride + (heads * query_head_stride)[:, None]
    from_key = key + token * key_token_stride + ((heads - QUERY_HEADS) * key_head_stride)[:, None]
    into = y + token * (ALL_HEADS * HEAD_DIM) + (heads * HEAD_DIM)[:, None]

    dims = tl.arange(0, HALF)
    there = dims < ROTATED // 2
    low_place, high_place = dims[None, :], dims[None, :] + ROTATED // 2
    query_mask, key_mask = of_query & there[None, :], of_key & there[None, :]
    low = tl.load(from_query + low_place, mask=query_mask, other=0.0)
    high = tl.load(from_query + high_place, mask=query_mask, other=0.0)
    low = tl.where(of_query, low, tl.load(from_key + low_place, mask=key_mask, other=0.0))
    high = tl.where(of_query, high, tl.load(from_key + high_place, mask=key_mask, other=0.0))
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    # The products are rounded to what torch gives them: the dtype of cosines and sines, which is at least the model's.
    angles = token * ROTATED + dims
    cosine = tl.load(cosines + angles, mask=there, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sines + angles, mask=there, other=0.0).to(tl.float32)[None, :]
    first = rounded(wide_low * cosine, cosines.dtype.element_ty).to(tl.float32)
    second = rounded(-wide_high * sine, cosines.dtype.element_ty).to(tl.float32)
    new_low = rounded(rounded(first + second, cosines.dtype.element_ty).to(tl.float32), y.dtype.element_ty)
    cosine = tl.load(cosines + angles + ROTATED // 2, mask=there, other=0.0).to(tl.float32)[None, :]
    sine = tl.load(sines + angles + ROTATED // 2, mask=there, other=0.0).to(tl.float32)[None, :]
    first = rounded(wide_high * cosine, cosines.dtype.element_ty).to(tl.float32)
    second = rounded(wide_low * sine, cosines.dtype.element_ty).to(tl.float32)
    new_high = rounded(rounded(first + second, cosines.dtype.element_ty).to(tl.float32), y.dtype.element_ty)
    tl.store(into + low_place, new_low, mask=query_mask | key_mask)
    tl.store(into + high_place, new_high, mask=query_mask | key_mask)

    if HEAD_DIM > ROTATED:  # the rest of a head is not rotated
        rest = ROTATED + tl.arange(0, REST)
        inside = (rest < HEAD_DIM)[None, :]
        passed = tl.load(from_query + rest[None, :], mask=of_query & inside, other=0.0)
        other = tl.load(from_key + rest[None, :], mask=of_key & inside, other=0.0)
        passed = tl.where(of_query, passed, other)
        tl.store(into + rest[None, :], passed, mask=(of_query | of_key) & inside)


def rotate(query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> Rotated:
    """Rotates query `[1, heads, tokens, head_dim]` and key `[1, kv_heads, tokens, head_dim]` by cosines and sines `[1,
    tokens, rotated]`; both results are views of one new tensor. For what `fits`."""
    heads, tokens, head_dim = query.shape[1:]
    all_heads, rotated = heads + key.shape[1], cosines.shape[-1]
    y = torch.empty((1, tokens, all_heads, head_dim), dtype=query.dtype, device=query.device)
    _rotate[(tokens, triton.cdiv(all_heads, HEADS))](
        query,
        key,
        cosines,
        sines,
        y,
        query.stride(1),
        query.stride(2),
        key.stride(1),
        key.stride(2),
        QUERY_HEADS=heads,
        ALL_HEADS=all_heads,
        HEAD_DIM=head_dim,
        ROTATED=rotated,
        HALF=triton.next_power_of_2(rotated // 2),
        REST=triton.next_power_of_2(max(head_dim - rotated, 1)),
        HEADS=HEADS,
        num_warps=WARPS,
        enable_fp_fusion=False,  # as torch's own operations round
    )
    by_head = y.transpose(1, 2)
    return by_head[:, :heads], by_head[:, heads:]


def fits(query: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> bool:
    """Whether the kernel computes these."""
    if query.dim() != 4 or key.dim() != 4 or cosines.dim() != 3 or not query.numel() or not key.numel():
        return False
    tokens, head_dim, rotated = query.shape[2], query.shape[3], cosines.shape[2]
    shapes = (
        query.shape[0] == key.shape[0] == 1
        and key.shape[2:] == query.shape[2:]
        and cosines.shape == sines.shape == (1, tokens, rotated)
        and 0 < rotated <= head_dim
        and rotated % 2 == 0
    )
    dtypes = (
        query.dtype in DTYPES
        and key.dtype is query.dtype
        and cosines.dtype is sines.dtype
        and cosines.dtype in (query.dtype, torch.float32)
    )
    contiguous = cosines.is_contiguous() and sines.is_contiguous()
    return shapes and dtypes and contiguous and query.stride(3) == key.stride(3) == 1


class FusedRotary(FusedForward):
    """The forward pass of an attention module, with another function in place of FUNCTION.

    It is the module's own code over a copy of its globals, so that no other module sees the function.
    """

    def __init__(self, module: nn.Module, other: Callable[[Rotate], Rotate]) -> None:
        """`other` gives the function that is to be called, from the module's own."""
        super().__init__(module)
        forward: Any = type(module).forward
        self.own_rotate: Rotate = forward.__globals__[FUNCTION]
        content = {**forward.__globals__, FUNCTION: other(self.own_rotate)}
        copied = FunctionType(
            forward.__code__, content, forward.__name__, forward.__defaults__, forward.__closure__
        )
        copied.__kwdefaults__ = forward.__kwdefaults__
        self._forward = MethodType(copied, module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `FusedForward`."""
        return self._forward(*args, **kwargs)


def by_kernel(own: Rotate) -> Rotate:
    """The function by the kernel, and by `own` where that is not made for its arguments."""

    def rotated(*args: Any, **kwargs: Any) -> Rotated:
        if len(args) == 4 and not kwargs and fits(*args):
            return rotate(*args)
        return own(*args, **kwargs)

    return rotated


def difference(own: Rotate, *given: torch.Tensor) -> float:
    """The `deviation` of the kernel's results from those of `own`; infinite where the kernel is not made for it."""
    if not fits(*given):
        return float("inf")
    pairs = zip(rotate(*given), own(*given), strict=True)
    return max(deviation(found, expected) for found, expected in pairs)


def calls_rotary(module: nn.Module) -> bool:
    """Whether the module's class calls FUNCTION in its `forward`."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or not has_own_forward(module):
        return False
    return FUNCTION in forward.__code__.co_names and callable(forward.__globals__.get(FUNCTION))
