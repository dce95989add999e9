"""Attention of decode rows, one new token a sequence, with the keys of a sequence split over several programs.

One sequence alone has too few heads to fill a GPU, so each program reads a part of its keys and leaves what it found;
a second kernel puts the parts together (Flash-Decoding; the same sum as FlashAttention's over tiles).

How many programs there are depends on the number of rows only, never on the contexts: a captured graph serves
whatever contexts come. A program that finds nothing to do ends at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.cuda.attention_tile import DOT_ROWS, LAUNCH, HeadShape, attend_range, product_dtype
from engine.cuda.step_inputs import StepInputs

LEAST_SPLITS = 8
"""Also with many rows: of those, one may have a far longer context than the others."""
MOST_SPLITS = 64
LEAST_TOKENS = 256
"""Keys of a part; for fewer the second kernel's work is not worth it."""
PROGRAMS_PER_PROCESSOR = 2
KEYS = 64
WIDE_KEYS = 32
"""The same for heads of more than 128 elements and for float32."""


@triton.jit
def _split_size(length, LEAST: tl.constexpr, SPLITS: tl.constexpr, KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys of each part, whole tiles of them."""
    share = (length + SPLITS - 1) // SPLITS
    return tl.maximum((share + KEYS - 1) // KEYS * KEYS, LEAST)


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
    LEAST: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Programs: sequences, KV heads, parts."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    context = tl.load(contexts + sequence).to(tl.int32)
    seen_from = 0
    if WINDOW > 0:
        seen_from = tl.maximum(context - WINDOW, 0)
    size = _split_size(context - seen_from, LEAST, SPLITS, KEYS)
    begin = seen_from + split * size
    if begin < context:
        rows = tl.arange(0, ROWS)
        dims = tl.arange(0, DIM)
        heads = head * GROUP + rows
        mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        sources = sequence * query_token_stride + heads * query_head_stride
        rows_in = tl.load(query + sources[:, None] + dims[None, :], mask=mask, other=0.0).to(DTYPE)
        found, highest, total = attend_range(
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
        place = (sequence * (tl.num_programs(1) * GROUP) + heads) * SPLITS + split
        tl.store(parts + place[:, None] * HEAD_DIM + dims[None, :], found, mask=mask)
        tl.store(highests + place, highest, mask=rows < GROUP)
        tl.store(totals + place, total, mask=rows < GROUP)


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
    LEAST: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Programs: sequences, query heads. Parts that were never written are never read."""
    sequence = tl.program_id(0).to(tl.int64)
    context = tl.load(contexts + sequence).to(tl.int32)
    length = context
    if WINDOW > 0:
        length = tl.minimum(context, WINDOW)
    size = _split_size(length, LEAST, SPLITS, KEYS)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, DIM)
    used = splits * size < length
    place = (sequence * tl.num_programs(1) + tl.program_id(1)) * SPLITS + splits
    highest = tl.load(highests + place, mask=used, other=float("-inf"))
    total = tl.load(totals + place, mask=used, other=0.0)
    mask = used[:, None] & (dims < HEAD_DIM)[None, :]
    found = tl.load(parts + place[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    level = tl.max(highest, 0)
    level = tl.where(level == float("-inf"), 0.0, level)
    weights = tl.exp2(highest - level)
    whole = tl.sum(weights * total, 0)
    # A padded row has no keys: its output is 0.
    whole = tl.where(length > 0, whole, 1.0)
    joined = tl.sum(found * weights[:, None], 0) / whole
    target = (sequence * tl.num_programs(1) + tl.program_id(1)) * HEAD_DIM
    tl.store(output + target + dims, joined.to(output.dtype.element_ty), mask=dims < HEAD_DIM)


def split_count(rows: int, kv_heads: int, processors: int) -> int:
    """Into how many parts keys are split: a power of two that gives every multiprocessor something to do."""
    wanted = PROGRAMS_PER_PROCESSOR * processors // (rows * kv_heads)
    return int(min(max(triton.next_power_of_2(max(wanted, 1)), LEAST_SPLITS), MOST_SPLITS))


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    inputs: StepInputs,
    shape: HeadShape,
    scale: float,
    window: int | None,
    softcap: float | None,
    splits: int,
    least_tokens: int = LEAST_TOKENS,
) -> None:
    """Writes the first `inputs.num_decode` rows of `output`; shapes as in `prefill_attention`.

    `splits`: see `split_count`. `least_tokens`: a multiple of KEYS.
    """
    rows, heads, kv_heads = inputs.num_decode, query.shape[0], keys.shape[0]
    parts = torch.empty((rows, heads, splits, shape.head_dim), dtype=torch.float32, device=query.device)
    highests = torch.empty((rows, heads, splits), dtype=torch.float32, device=query.device)
    totals = torch.empty_like(highests)
    tile_keys = KEYS if query.dtype is torch.bfloat16 and shape.padded_dim <= 128 else WIDE_KEYS
    split = {"SPLITS": splits, "LEAST": least_tokens, "KEYS": tile_keys, "DIM": shape.padded_dim}
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
        HEAD_DIM=shape.head_dim,
        WINDOW=window or 0,
        SOFTCAP=softcap or 0.0,
        GROUP=shape.group,
        ROWS=max(DOT_ROWS, shape.padded_group),
        DTYPE=product_dtype(query.dtype),
        num_warps=4,
        **LAUNCH,
        **split,
    )
    _join[(rows, heads)](
        parts,
        highests,
        totals,
        output,
        inputs.contexts,
        HEAD_DIM=shape.head_dim,
        WINDOW=window or 0,
        num_warps=4,
        **LAUNCH,
        **split,
    )
