"""Writes the KV of new tokens into their slots of the pool."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


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
        tl.store(keys + targets, tl.load(key + sources, mask=mask), mask=mask)
        sources = (token * value_token_stride + heads * value_head_stride)[:, None] + dims[None, :]
        tl.store(values + targets, tl.load(value + sources, mask=mask), mask=mask)


def write_kv(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """Writes `key`, `value` `[kv_heads, tokens, head_dim]` into one layer's `keys`, `values`.

    These are `[kv_heads, blocks, block_size, head_dim]`. `slots` int64 `[tokens]`: block * block_size + offset; a token
    with a negative slot is not written. Last dimensions are contiguous.
    """
    kv_heads, tokens, head_dim = key.shape
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
        BLOCK_SIZE=keys.shape[2],
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HEADS=triton.next_power_of_2(kv_heads),
        DIM=triton.next_power_of_2(head_dim),
        num_warps=4,
    )


def contiguous_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its last dimension is contiguous, as in all known model families; else a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
