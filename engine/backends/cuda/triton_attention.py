"""Paged attention with Triton kernels: an `engine.model.attention_interface.AttentionBackend`."""

from __future__ import annotations

import torch

from engine.backends.cuda.attention_tile import HeadShape, KvViews
from engine.backends.cuda.decode_attention import decode_attention, split_count
from engine.backends.cuda.kv_write import contiguous_rows, write_kv
from engine.backends.cuda.prefill_attention import prefill_attention
from engine.backends.cuda.staging import StepInputs
from engine.kv_cache.memory import KvCacheMemory
from engine.model.attention_interface import LayerState

INTERPRETED_PROCESSORS = 4
"""Stands in for the number of multiprocessors when kernels are interpreted."""


class TritonAttention:
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
        kv = self._views[layer.index]
        query, key, value = (contiguous_rows(tensor) for tensor in (query, key, value))
        write_kv(key, value, kv, inputs.slots)
        heads, tokens, head_dim = query.shape
        shape = HeadShape.of(heads, len(kv.keys), head_dim)
        output = torch.empty((tokens, heads, head_dim), dtype=query.dtype, device=query.device)
        arguments = (query, kv, output, inputs, shape, scale, layer.window, softcap)
        if inputs.num_decode:
            splits = split_count(inputs.num_decode, len(kv.keys), self._processors)
            decode_attention(*arguments, splits)
        if inputs.num_prefill:
            prefill_attention(*arguments)
        return output
