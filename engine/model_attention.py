"""Paged attention in plain torch, for cpu and cuda: new KV into the pool, then attention over it."""

from __future__ import annotations

import torch
from torch.nn import functional

from engine.attention import LayerState
from engine.kv_pool import KvPool
from engine.model_batch import DecodeGroup, PrefillChunk, StepBatch


class PagedBackend:
    """Attention over a KV pool. `batch` is the current step's; the runner sets it before each pass."""

    def __init__(self, pool: KvPool) -> None:
        self.batch: StepBatch | None = None
        self._views = [pool.view(layer) for layer in range(pool.layout.num_layers)]

    def attend(
        self,
        layer: LayerState,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        batch = self.batch
        assert batch is not None, "a forward pass outside of a step"
        pool = self._views[layer.index]
        pool[0].transpose(0, 1)[batch.slot_blocks, :, batch.slot_offsets] = key.transpose(0, 1)
        pool[1].transpose(0, 1)[batch.slot_blocks, :, batch.slot_offsets] = value.transpose(0, 1)
        plan = batch.plan(layer.window, tiled=softcap is not None)
        parts = [_decode(group, query, pool, scale, softcap) for group in plan.decode]
        parts += [_prefill(chunk, query, key, value, pool, scale, softcap) for chunk in plan.prefill]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decode(
    group: DecodeGroup, query: torch.Tensor, pool: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    """One new token a sequence: all rows of the group at once. Returns `[rows, heads, head_dim]`."""
    begin, end = group.rows
    heads, _, head_dim = query.shape
    count, kv_heads = end - begin, pool.shape[1]
    gathered = pool.index_select(2, group.blocks).view(2, kv_heads, -1, head_dim)
    if group.stale is not None:
        gathered.index_fill_(2, group.stale, 0.0)
    keys, values = gathered.view(2, kv_heads, count, -1, head_dim).transpose(1, 2)
    # The query heads that share a KV head become rows of one product, instead of the KV being repeated.
    rows = query[:, begin:end].transpose(0, 1).reshape(count, kv_heads, heads // kv_heads, head_dim)
    output = _attention(rows, keys, values, group.mask, causal=False, scale=scale, softcap=softcap)
    return output.reshape(count, heads, head_dim)


def _prefill(
    chunk: PrefillChunk,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pool: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """A chunk of one sequence. Returns `[tokens, heads, head_dim]`."""
    begin, end = chunk.rows
    heads, _, head_dim = query.shape
    kv_heads = key.shape[0]
    if chunk.blocks is None:
        keys, values = key[:, begin:end], value[:, begin:end]
    else:
        keys, values = pool.index_select(2, chunk.blocks).view(2, kv_heads, -1, head_dim)
    # KV heads are the batch, the query heads that share one see it through a stride of zero.
    shared = (kv_heads, heads // kv_heads, -1, head_dim)
    rows = query[:, begin:end].reshape(shared)
    parts = []
    for tile in chunk.tiles:
        tile_keys = keys[:, None, tile.keys[0] : tile.keys[1]].expand(shared)
        tile_values = values[:, None, tile.keys[0] : tile.keys[1]].expand(shared)
        tile_rows = rows[:, :, tile.query[0] : tile.query[1]]
        causal = tile.mask is None
        parts.append(
            _attention(
                tile_rows, tile_keys, tile_values, tile.mask, causal=causal, scale=scale, softcap=softcap
            )
        )
    output = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return output.permute(2, 0, 1, 3).reshape(end - begin, heads, head_dim)


def _attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """`[batch, heads, queries, head_dim]` against `[batch, heads, keys, head_dim]`; `mask` is additive.

    Soft-capped scores are `softcap * tanh(score / softcap)` (Gemma 2, arXiv:2408.00118, section 2).
    """
    if softcap is None:
        return functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=causal, scale=scale
        )
    scores = torch.matmul(query, keys.transpose(-1, -2)) * scale
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, values)
