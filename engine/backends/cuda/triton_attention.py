"""Paged attention with Triton kernels: writes the KV of new tokens into the pool, then attends to it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from typing_extensions import override

from engine.backends.cuda.attention_tile import HeadShape, KvViews
from engine.backends.cuda.decode_attention import decode_attention, split_count
from engine.backends.cuda.prefill_attention import prefill_attention
from engine.backends.cuda.staging import StepInputs
from engine.kv_cache.memory import KvCacheMemory
from engine.model.attention_interface import AttentionBackend, LayerState, NewTokens

INTERPRETED_PROCESSORS = 4
"""Stands in for the number of multiprocessors when kernels are interpreted."""


class TritonAttention(AttentionBackend):
    """Attention over a KV pool. `inputs` is the current step's, set before each forward pass."""

    def __init__(self, pool: KvCacheMemory) -> None:
        self.inputs: StepInputs | None = None
        self._views = [KvViews.of(pool, layer) for layer in range(pool.layout.num_layers)]
        on_gpu = pool.device.type == "cuda"
        self._processors = (
            torch.cuda.get_device_properties(pool.device).multi_processor_count
            if on_gpu
            else INTERPRETED_PROCESSORS
        )

    @override
    def attend(
        self, layer: LayerState, tokens: NewTokens, scale: float, softcap: float | None
    ) -> torch.Tensor:
        inputs = self.inputs
        assert inputs is not None, "a forward pass outside of a step"
        kv = self._views[layer.index]
        query, key, value = tokens.with_contiguous_rows()
        write_kv(key, value, kv, inputs.slots)
        heads, count, head_dim = query.shape
        shape = HeadShape.of(heads, len(kv.keys), head_dim)
        output = torch.empty((count, heads, head_dim), dtype=query.dtype, device=query.device)
        arguments = (query, kv, output, inputs, shape, scale, layer.window, softcap)
        if inputs.flat.num_decode:
            splits = split_count(inputs.flat.num_decode, len(kv.keys), self._processors)
            decode_attention(*arguments, splits)
        if inputs.flat.num_prefill:
            prefill_attention(*arguments)
        return output


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
        new_key = tl.load(key + sources, mask=mask, other=0.0)
        sources = (token * value_token_stride + heads * value_head_stride)[:, None] + dims[None, :]
        new_value = tl.load(value + sources, mask=mask, other=0.0)
        tl.store(keys + targets, new_key, mask=mask)
        tl.store(values + targets, new_value, mask=mask)


def write_kv(key: torch.Tensor, value: torch.Tensor, kv: KvViews, slots: torch.Tensor) -> None:
    """Writes `key`, `value` `[kv_heads, tokens, head_dim]` into one layer of the pool.

    `slots` int64 `[tokens]`: block * block_size + offset; a token with a negative slot is not written. Last dimensions
    are contiguous.
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
        BLOCK_SIZE=keys.shape[2],
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HEADS=triton.next_power_of_2(kv_heads),
        DIM=triton.next_power_of_2(head_dim),
        num_warps=4,
    )
