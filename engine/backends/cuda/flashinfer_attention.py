"""Paged attention with FlashInfer (`pip install 'splitserve[flashinfer]'`), in place of `triton_attention`.

FlashInfer plans on the host, once per step and kind of layer, so its forward passes cannot be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.backends.cuda.kv_write import contiguous_rows, write_kv
from engine.backends.cuda.staging import StepInputs
from engine.backends.interface import FlatStep
from engine.kv_cache.memory import KvCacheMemory
from engine.model.attention_interface import LayerState

WORKSPACE_BYTES = 256 * 2**20
_Kind = tuple[int | None, float, float | None]
"""A layer's window, scale and softcap."""


class FlashInferAttention:
    """Attention over a KV pool. `inputs` is the current step's, set before each forward pass."""

    capturable = False

    def __init__(self, pool: KvCacheMemory) -> None:
        # Imported here: an extra that few installations have.
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self.inputs: StepInputs | None = None
        self._make: Any = BatchPrefillWithPagedKVCacheWrapper
        self._views = [pool.view(layer).unbind(0) for layer in range(pool.layout.num_layers)]
        self._block_size = pool.layout.block_size_tokens
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        self._planned: dict[_Kind, tuple[FlatStep | None, Any]] = {}

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
        inputs = self.inputs
        assert inputs is not None, "a forward pass outside of a step"
        keys, values = self._views[layer.index]
        write_kv(contiguous_rows(key), contiguous_rows(value), keys, values, inputs.slots)
        wrapper = self._wrapper(inputs.flat, (layer.window, scale, softcap), query, keys.shape[0])
        # FlashInfer's "HND" layout: [blocks, kv_heads, block_size, head_dim], the pool's own order in memory.
        pages = (keys.transpose(0, 1), values.transpose(0, 1))
        output: torch.Tensor = wrapper.run(query.transpose(0, 1).contiguous(), pages)
        return output

    def _wrapper(self, flat: FlatStep, kind: _Kind, query: torch.Tensor, kv_heads: int) -> Any:
        """The wrapper for this kind of layer, planned for this step."""
        planned, wrapper = self._planned.get(kind, (None, None))
        if wrapper is None:
            wrapper = self._make(self._workspace, "HND")
        if planned is not flat:
            self._plan(wrapper, flat, kind, query, kv_heads)
            self._planned[kind] = flat, wrapper
        return wrapper

    def _plan(self, wrapper: Any, flat: FlatStep, kind: _Kind, query: torch.Tensor, kv_heads: int) -> None:
        window, scale, softcap = kind

        def numbers(array: Any) -> torch.Tensor:
            return torch.from_numpy(array).to(torch.int32)

        starts = torch.cat([numbers(flat.table_starts), torch.tensor([flat.tables.size], dtype=torch.int32)])
        wrapper.plan(
            numbers(flat.query_starts),
            starts,
            numbers(flat.tables).to(query.device),
            numbers((flat.contexts - 1) % self._block_size + 1),
            num_qo_heads=query.shape[0],
            num_kv_heads=kv_heads,
            head_dim_qk=query.shape[2],
            page_size=self._block_size,
            causal=True,
            sm_scale=scale,
            window_left=-1 if window is None else window - 1,  # FlashInfer does not count the token itself
            logits_soft_cap=softcap,
            q_data_type=query.dtype,
            kv_data_type=query.dtype,
        )
