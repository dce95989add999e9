"""Attention of decode rows, one new token per sequence, with a sequence's keys split over several programs.

A single sequence has too few heads to fill a GPU. So each program attends to a part of the keys and stores its partial
result; a second kernel combines them (Flash-Decoding: the same rescaling as FlashAttention's between tiles).

The number of programs depends only on the number of rows, never on the contexts, so a captured graph serves any
contexts. A program without keys returns at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.backends.cuda.attention_tile import (
    DOT_ROWS,
    LAUNCH,
    HeadShape,
    KvViews,
    attend_range,
    product_dtype,
)
from engine.backends.cuda.staging import StepInputs

MIN_SPLITS = 8
"""Even with many rows: one of them may have a far longer context than the others."""
MAX_SPLITS = 64
MIN_TOKENS = 256
"""Minimum keys in a part; combining smaller ones costs more than it saves."""
PROGRAMS_PER_PROCESSOR = 2
KEYS = 64
"""Keys in a tile, at most."""


@triton.jit
def _split_size(length, MIN_SIZE: tl.constexpr, SPLITS: tl.constexpr, KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys in each part, a multiple of the tile."""
    share = (length + SPLITS - 1) // SPLITS
    return tl.maximum((share + KEYS - 1) // KEYS * KEYS, MIN_SIZE)


@triton.jit
def _decode(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    parts,
    highests,
    totals,
    contexts,
    table_starts,
    tables,
    scale,
    query_head_stride,
    query_token_stride,
    kv_head_stride,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Attends to one part of a sequence's keys. Grid: sequences, KV heads, parts.

    Writes per query head and part: `parts` float32 `[rows, heads, splits, head_dim]`, the unnormalized weighted sum of
    values; `highests` and `totals` float32 `[rows, heads, splits]`, the highest score (base 2) and the sum of weights.
    """
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(contexts + sequence).to(tl.int32)
    seen_from = 0
    if WINDOW > 0:
        seen_from = tl.maximum(context - WINDOW, 0)
    size = _split_size(context - seen_from, MIN_SIZE, SPLITS, KEYS)
    begin = seen_from + split * size
    if begin < context:
        rows = tl.arange(0, ROWS)
        dims = tl.arange(0, DIM)
        heads = head * GROUP + rows
        mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        sources = sequence * query_token_stride + heads * query_head_stride
        rows_in = tl.load(query + sources[:, None] + dims[None, :], mask=mask, other=0.0).to(DTYPE)
        partial, highest, total = attend_range(
            rows_in,
            tl.full([ROWS], 0, tl.int32) + (context - 1),
            begin,
            tl.minimum(begin + size, context),
            keys + head * kv_head_stride,
            values + head * kv_head_stride,
            tables + tl.load(table_starts + sequence),
            scale,
            block_stride,
            BLOCK_SIZE,
            HEAD_DIM,
            WINDOW,
            SOFTCAP,
            ROWS,
            KEYS,
            DIM,
            DTYPE,
        )
        index = (sequence * (tl.num_programs(1) * GROUP) + heads) * SPLITS + split
        tl.store(parts + index[:, None] * HEAD_DIM + dims[None, :], partial, mask=mask)
        tl.store(highests + index, highest, mask=rows < GROUP)
        tl.store(totals + index, total, mask=rows < GROUP)


@triton.jit
def _join(  # type: ignore[no-untyped-def]
    parts,
    highests,
    totals,
    output,
    contexts,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Combines the parts of a row. Grid: sequences, query heads. Reads only the parts that `_decode` wrote."""
    sequence = tl.program_id(0).to(tl.int64)
    context = tl.load(contexts + sequence).to(tl.int32)
    length = context
    if WINDOW > 0:
        length = tl.minimum(context, WINDOW)
    size = _split_size(length, MIN_SIZE, SPLITS, KEYS)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, DIM)
    used = splits * size < length
    index = (sequence * tl.num_programs(1) + tl.program_id(1)) * SPLITS + splits
    highest = tl.load(highests + index, mask=used, other=float("-inf"))
    total = tl.load(totals + index, mask=used, other=0.0)
    mask = used[:, None] & (dims < HEAD_DIM)[None, :]
    partials = tl.load(parts + index[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    # Each part's weights are relative to its own highest score: rescale them all to the highest of all.
    level = tl.max(highest, 0)
    level = tl.where(level == float("-inf"), 0.0, level)
    weights = tl.exp2(highest - level)
    whole = tl.sum(weights * total, 0)
    # A padded row has no keys: its output is 0.
    whole = tl.where(length > 0, whole, 1.0)
    joined = tl.sum(partials * weights[:, None], 0) / whole
    target = (sequence * tl.num_programs(1) + tl.program_id(1)) * HEAD_DIM
    tl.store(output + target + dims, joined.to(output.dtype.element_ty), mask=dims < HEAD_DIM)


def tile_keys(dtype: torch.dtype, padded_dim: int) -> int:
    """Keys in a tile: fewer for heads of more than 128 elements and for float32, or registers would spill."""
    wide = (padded_dim > 128) + (dtype is not torch.bfloat16)
    return KEYS >> wide


def tile_warps(dtype: torch.dtype, padded_dim: int) -> int:
    """Warps of a program: with four, wide heads in float32 spill registers in some versions of Triton."""
    return 8 if dtype is not torch.bfloat16 and padded_dim == 256 else 4


def split_count(rows: int, kv_heads: int, processors: int) -> int:
    """The number of parts that keys are split into: a power of two that gives every multiprocessor work.

    `processors`: multiprocessors of the device.
    """
    wanted = PROGRAMS_PER_PROCESSOR * processors // (rows * kv_heads)
    return int(min(max(triton.next_power_of_2(max(wanted, 1)), MIN_SPLITS), MAX_SPLITS))


def decode_attention(
    query: torch.Tensor,
    kv: KvViews,
    output: torch.Tensor,
    inputs: StepInputs,
    shape: HeadShape,
    scale: float,
    window: int | None,
    softcap: float | None,
    splits: int,
    min_tokens: int = MIN_TOKENS,
) -> None:
    """Writes the first `inputs.flat.num_decode` rows of `output`; shapes and dtypes as in `prefill_attention`.

    `splits`: see `split_count`. `min_tokens`: minimum keys in a part, a multiple of KEYS.
    """
    keys, values = kv.keys, kv.values
    rows, heads, kv_heads = inputs.flat.num_decode, query.shape[0], keys.shape[0]
    parts = torch.empty((rows, heads, splits, shape.head_dim), dtype=torch.float32, device=query.device)
    highests = torch.empty((rows, heads, splits), dtype=torch.float32, device=query.device)
    totals = torch.empty_like(highests)
    keys_at_once = tile_keys(query.dtype, shape.padded_dim)
    split = {"SPLITS": splits, "MIN_SIZE": min_tokens, "KEYS": keys_at_once}
    common = {**split, "DIM": shape.padded_dim, "HEAD_DIM": shape.head_dim, "WINDOW": window or 0}
    _decode[(rows, kv_heads, splits)](
        query,
        keys,
        values,
        parts,
        highests,
        totals,
        inputs.contexts,
        inputs.table_starts,
        inputs.tables,
        scale,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        BLOCK_SIZE=keys.shape[2],
        SOFTCAP=softcap or 0.0,
        GROUP=shape.group,
        ROWS=max(DOT_ROWS, shape.padded_group),
        DTYPE=product_dtype(query.dtype),
        num_warps=tile_warps(query.dtype, shape.padded_dim),
        **LAUNCH,
        **common,
    )
    _join[(rows, heads)](parts, highests, totals, output, inputs.contexts, num_warps=4, **LAUNCH, **common)
