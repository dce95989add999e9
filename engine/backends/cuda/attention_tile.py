"""Attention of one tile of query rows over a range of keys, shared by the prefill and the decode kernel.

Online softmax as in FlashAttention-2 (arXiv:2307.08691, algorithm 1), over keys addressed through a block table. Query
heads that share a KV head are rows of one tile, so its KV is read once for all of them.

Slots of a block beyond a sequence's end may hold anything, NaN included, and are never loaded. A NaN in the sequence's
own KV reaches its output: its logits are not finite, and the request fails instead of continuing with wrong tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kv_cache.memory import KvCacheMemory

LOG2_E = tl.constexpr(1.4426950408889634)
LAUNCH = {"num_stages": 2, "enable_fp_fusion": True}
"""Keys are loaded one tile ahead; fused multiply-add does not depend on the default of Triton's release."""
DOT_ROWS = 16
"""Minimum rows, keys and elements of a matrix product on tensor cores."""


@triton.jit
def attend_range(  # type: ignore[no-untyped-def]
    query,
    positions,
    begin,
    end,
    keys,
    values,
    table,
    scale,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Rows `query` `[ROWS, DIM]` at `positions` `[ROWS]` against the keys at positions `begin`..`end` - 1.

    `keys`, `values`: pointers to the KV head in block 0; `table`: pointer to the sequence's block table. Returns, in
    float32, the weighted sum of values `[ROWS, DIM]`, not divided by the sum of weights; the highest score `[ROWS]`, in
    base 2; the sum of weights `[ROWS]`.
    """
    dims = tl.arange(0, DIM)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    output = tl.full([ROWS, DIM], 0.0, tl.float32)
    for start in range(begin, end, KEYS):
        slots = start + tl.arange(0, KEYS)
        inside = slots < end
        blocks = tl.load(table + slots // BLOCK_SIZE, mask=inside, other=0)
        offsets = blocks * block_stride + (slots % BLOCK_SIZE) * HEAD_DIM
        addresses = offsets[:, None] + dims[None, :]
        readable = inside[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(keys + addresses, mask=readable, other=0.0).to(DTYPE)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if SOFTCAP > 0:
            # softcap * tanh(score / softcap), in base 2
            scores = SOFTCAP * LOG2_E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / SOFTCAP)) + 1.0))
        else:
            scores = scores * LOG2_E
        visible = inside[None, :] & (slots[None, :] <= positions[:, None])
        if WINDOW > 0:
            visible = visible & (slots[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen no key yet has no highest score; its weights must be 0, and not exp2(-inf + inf) = NaN.
        level = tl.where(raised == float("-inf"), 0.0, raised)
        weights = tl.exp2(scores - level[:, None])
        # Rescales what earlier tiles summed up to the new highest score.
        rescale = tl.exp2(highest - level)
        total = total * rescale + tl.sum(weights, 1)
        value = tl.load(values + addresses, mask=readable, other=0.0).to(DTYPE)
        output = tl.dot(weights.to(DTYPE), value, output * rescale[:, None], input_precision="ieee")
        highest = raised
    return output, highest, total


class KvViews(NamedTuple):
    """One layer of the pool: `keys`, `values` `[kv_heads, blocks, block_size, head_dim]`."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, pool: KvCacheMemory, layer: int) -> KvViews:
        """Views of one layer, no copies."""
        return cls(*pool.view(layer).unbind(0))


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Tile sizes that follow from the model. The padded ones are powers of two; `group` is query heads per KV head."""

    group: int
    head_dim: int
    padded_group: int
    padded_dim: int

    @classmethod
    def of(cls, heads: int, kv_heads: int, head_dim: int) -> HeadShape:
        """The shape for a model with these numbers of query and KV heads."""
        group = heads // kv_heads
        padded_dim = max(DOT_ROWS, triton.next_power_of_2(head_dim))
        return cls(group, head_dim, triton.next_power_of_2(group), padded_dim)


def product_dtype(dtype: torch.dtype) -> tl.dtype:
    """The dtype of products: the model's own; float32 without TF32 (`input_precision="ieee"` above).

    Triton's interpreter cannot multiply bfloat16, so it gets the same numbers in float32.
    """
    if dtype is torch.bfloat16 and not triton.knobs.runtime.interpret:
        return tl.bfloat16
    return tl.float32
