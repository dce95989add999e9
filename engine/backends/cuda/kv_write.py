"""Writes the KV of new tokens into their slots of the pool."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.backends.cuda.attention_tile import KvViews
from engine.kv_cache import int8_kv

SMALLEST_SCALE = tl.constexpr(int8_kv.SMALLEST_SCALE)
LARGEST_CODE = tl.constexpr(float(int8_kv.LARGEST_CODE))
TO_WHOLE = tl.constexpr(1.5 * 2.0**23)
"""float32 numbers of this size have no fraction: adding and subtracting it rounds to the nearest, ties to even."""


@triton.jit
def _narrowed(vectors):  # type: ignore[no-untyped-def]
    """Codes int8 `[HEADS, DIM]` and scales bfloat16 `[HEADS]` of vectors, as `int8_kv.quantize` has them."""
    wide = vectors.to(tl.float32)
    broken = tl.max(tl.where(wide - wide == 0.0, 0, 1), 1) > 0
    scales = tl.div_rn(tl.max(tl.abs(wide), 1), tl.full([vectors.shape[0]], LARGEST_CODE, tl.float32))
    # To the nearest bfloat16, ties to even: the interpreter's own conversion cuts off.
    bits = scales.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    scales = tl.maximum(bits.to(tl.float32, bitcast=True), SMALLEST_SCALE)
    factors = tl.div_rn(tl.full([vectors.shape[0]], 1.0, tl.float32), scales)
    codes = wide * factors[:, None] + TO_WHOLE - TO_WHOLE
    codes = tl.minimum(tl.maximum(codes, -LARGEST_CODE), LARGEST_CODE)
    codes = tl.where(broken[:, None], 0.0, codes)
    return codes.to(tl.int8), tl.where(broken, float("nan"), scales).to(tl.bfloat16)


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    key,
    value,
    keys,
    values,
    slots,
    key_head_stride,
    key_token_stride,
    value_head_stride,
    value_token_stride,
    kv_head_stride,
    block_stride,
    key_scales,
    value_scales,
    scale_head_stride,
    scale_block_stride,
    BLOCK_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Writes one token's KV, all heads. Grid: tokens."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        heads = tl.arange(0, HEADS)
        dims = tl.arange(0, DIM)
        mask = (heads < KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
        offset = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * HEAD_DIM
        targets = (offset + heads * kv_head_stride)[:, None] + dims[None, :]
        sources = (token * key_token_stride + heads * key_head_stride)[:, None] + dims[None, :]
        new_key = tl.load(key + sources, mask=mask, other=0.0)
        sources = (token * value_token_stride + heads * value_head_stride)[:, None] + dims[None, :]
        new_value = tl.load(value + sources, mask=mask, other=0.0)
        if keys.dtype.element_ty == tl.int8:
            scale_offset = slot // BLOCK_SIZE * scale_block_stride + slot % BLOCK_SIZE
            scale_targets = scale_offset + heads * scale_head_stride
            new_key, new_scales = _narrowed(new_key)
            tl.store(key_scales + scale_targets, new_scales, mask=heads < KV_HEADS)
            new_value, new_scales = _narrowed(new_value)
            tl.store(value_scales + scale_targets, new_scales, mask=heads < KV_HEADS)
        tl.store(keys + targets, new_key, mask=mask)
        tl.store(values + targets, new_value, mask=mask)


def write_kv(key: torch.Tensor, value: torch.Tensor, kv: KvViews, slots: torch.Tensor) -> None:
    """Writes `key`, `value` `[kv_heads, tokens, head_dim]` into one layer of the pool, which may be int8.

    `slots` int64 `[tokens]`: block * block_size + offset; a token
    with a negative slot is not written. Last dimensions are contiguous.
    """
    kv_heads, tokens, head_dim = key.shape
    keys, values = kv.keys, kv.values
    _write[(tokens,)](
        key,
        value,
        keys,
        values,
        slots,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        keys.stride(0),
        keys.stride(1),
        kv.key_scales,
        kv.value_scales,
        kv.key_scales.stride(0),
        kv.key_scales.stride(1),
        BLOCK_SIZE=keys.shape[2],
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HEADS=triton.next_power_of_2(kv_heads),
        DIM=triton.next_power_of_2(head_dim),
        num_warps=4,
        # A fused product and sum would round other codes than torch and the cpu kernels.
        enable_fp_fusion=False,
    )


def contiguous_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its last dimension is contiguous, as in all known model families; else a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
