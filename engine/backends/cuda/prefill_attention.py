"""Attention of prompt chunks: the new tokens of several sequences against all of their keys in the pool.

Each program computes one tile of queries of one KV head, with the loop over keys of `attention_tile.attend_range`
(FlashAttention-2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.backends.cuda.attention_tile import LAUNCH, HeadShape, KvViews, attend_range, product_dtype
from engine.backends.cuda.staging import StepInputs


class _Tile(NamedTuple):
    """Query rows and keys of a tile, and warps of a program."""

    rows: int
    keys: int
    warps: int


def _tile(dtype: torch.dtype, padded_dim: int) -> _Tile:
    """The largest tile for registers and 99 KiB of shared memory, which all GPUs since compute capability 8.0 have.

    How many registers a kernel takes depends on Triton's version too: these hold for those that pyproject.toml allows.
    """
    if dtype is torch.bfloat16:
        if padded_dim <= 128:
            return _Tile(128, 64, 8)
        return _Tile(64, 32, 8) if padded_dim <= 256 else _Tile(32, 16, 4)
    return _Tile(32, 16, 4) if padded_dim <= 128 else _Tile(16, 16, 4)


@triton.jit(do_not_specialize=["first_sequence"])
def _prefill(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    output,
    contexts,
    query_starts,
    table_starts,
    tables,
    scale,
    first_sequence,
    query_head_stride,
    query_token_stride,
    kv_head_stride,
    block_stride,
    output_token_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Grid: tiles of QUERIES tokens of the longest chunk, KV heads, sequences.

    Late tiles, which see the most keys, come first, so that they do not run alone at the end.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    sequence = first_sequence + tl.program_id(2)
    row_begin = tl.load(query_starts + sequence)
    count = (tl.load(query_starts + sequence + 1) - row_begin).to(tl.int32)
    first = tile * QUERIES
    if first < count:
        context = tl.load(contexts + sequence).to(tl.int32)
        rows = tl.arange(0, QUERIES * PADDED_GROUP)
        tokens = first + rows // PADDED_GROUP
        member = rows % PADDED_GROUP
        dims = tl.arange(0, DIM)
        real = (tokens < count) & (member < GROUP)
        mask = real[:, None] & (dims < HEAD_DIM)[None, :]
        heads = head * GROUP + member
        line = row_begin + tokens
        sources = line * query_token_stride + heads * query_head_stride
        rows_in = tl.load(query + sources[:, None] + dims[None, :], mask=mask, other=0.0).to(DTYPE)
        positions = context - count + tokens
        begin = 0
        if WINDOW > 0:
            begin = tl.maximum(context - count + first + 1 - WINDOW, 0)
        end = tl.minimum(context - count + first + QUERIES, context)
        weighted, _, total = attend_range(
            rows_in,
            positions,
            begin,
            end,
            keys + head * kv_head_stride,
            values + head * kv_head_stride,
            tables + tl.load(table_starts + sequence),
            scale,
            block_stride,
            BLOCK_SIZE,
            HEAD_DIM,
            WINDOW,
            SOFTCAP,
            QUERIES * PADDED_GROUP,
            KEYS,
            DIM,
            DTYPE,
        )
        # Padding rows may have seen no key.
        result = weighted / tl.where(total == 0.0, 1.0, total)[:, None]
        targets = line * output_token_stride + heads * HEAD_DIM
        tl.store(output + targets[:, None] + dims[None, :], result.to(output.dtype.element_ty), mask=mask)


def prefill_attention(
    query: torch.Tensor,
    kv: KvViews,
    output: torch.Tensor,
    inputs: StepInputs,
    shape: HeadShape,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """Writes the rows of `output` `[tokens, heads, head_dim]` that belong to prompt chunks.

    `query` `[heads, tokens, head_dim]`; `kv`: one layer of the pool, which already has the new tokens' KV. All have the
    model's dtype and contiguous last dimensions.
    """
    keys, values = kv.keys, kv.values
    tile = _tile(query.dtype, shape.padded_dim)
    queries = max(1, tile.rows // shape.padded_group)
    grid = (triton.cdiv(inputs.flat.longest_chunk, queries), keys.shape[0], inputs.flat.num_prefill)
    _prefill[grid](
        query,
        keys,
        values,
        output,
        inputs.contexts,
        inputs.query_starts,
        inputs.table_starts,
        inputs.tables,
        scale,
        inputs.flat.num_decode,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        output.stride(0),
        BLOCK_SIZE=keys.shape[2],
        HEAD_DIM=shape.head_dim,
        WINDOW=window or 0,
        SOFTCAP=softcap or 0.0,
        GROUP=shape.group,
        PADDED_GROUP=shape.padded_group,
        QUERIES=queries,
        KEYS=tile.keys,
        DIM=shape.padded_dim,
        DTYPE=product_dtype(query.dtype),
        num_warps=tile.warps,
        **LAUNCH,
    )
