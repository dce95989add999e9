"""Attention by the kernels, over the paged pool as it is: nothing is gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.attention import LayerState
from engine.cpu.decode_inputs import DecodeInputs
from engine.cpu.kernels import CpuKernels
from engine.cpu.program import attend_op, packed_kv_elements, prefill_op
from engine.kv_pool import KvPool
from engine.runner import ScheduledSequence
from kv_transfer.layout import KvLayout

_HEAD_DIM_STEP = 32


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one sequence, rows `begin`..`end` of the batch, after `before` others; `table` `[blocks]` int32."""

    begin: int
    end: int
    before: int
    table: torch.Tensor


@dataclass(frozen=True, slots=True)
class KernelStep:
    """A flattened batch: `num_decode` rows that `decoding` tells about, then chunks.

    `slot_blocks`, `slot_offsets` `[tokens of the chunks]` int64: where each one's KV goes.
    """

    num_decode: int
    decoding: DecodeInputs
    chunks: tuple[Chunk, ...] = ()
    slot_blocks: torch.Tensor | None = None
    slot_offsets: torch.Tensor | None = None


def attends(layout: KvLayout) -> bool:
    """Whether these kernels know KV of this layout."""
    return layout.dtype == "bfloat16" and layout.head_dim % _HEAD_DIM_STEP == 0


def make_chunks(batch: Sequence[ScheduledSequence], first_row: int, block_size: int) -> tuple[Chunk, ...]:
    """Chunks of these sequences, one behind the other from `first_row` on."""
    chunks = []
    for sequence in batch:
        last_row = first_row + sequence.num_new
        blocks = -(-(sequence.num_computed + sequence.num_new) // block_size)
        table = torch.tensor(sequence.block_ids[:blocks], dtype=torch.int32)
        chunks.append(Chunk(first_row, last_row, sequence.num_computed, table))
        first_row = last_row
    return tuple(chunks)


class KernelBackend:
    """See the module. `step` is the current one; whoever runs the model sets it before each pass."""

    def __init__(self, pool: KvPool, kernels: CpuKernels) -> None:
        self.step: KernelStep | None = None
        self._kernels = kernels
        self._views = [pool.view(layer) for layer in range(pool.layout.num_layers)]
        self._room = self._views[0].new_empty(0)

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
        step = self.step
        assert step is not None, "a forward pass outside of a step"
        heads, rows, head_dim = query.shape
        query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
        output = query.new_empty(rows, heads, head_dim)
        pool, window, count = self._views[layer.index], layer.window, step.num_decode
        if count:
            op = attend_op(
                query[:, :count],
                key[:, :count],
                value[:, :count],
                output[:count],
                pool,
                step.decoding.address,
                scale=scale,
                softcap=softcap,
                window=window,
            )
            self._kernels.compute(op)
        if step.chunks:
            new = torch.stack((key[:, count:], value[:, count:]))
            pool[:, :, step.slot_blocks, step.slot_offsets] = new
        for chunk in step.chunks:
            span = slice(chunk.begin, chunk.end)
            self._kernels.compute(
                prefill_op(
                    query[:, span],
                    output[span],
                    pool,
                    chunk.table,
                    self._packed(chunk.before + chunk.end - chunk.begin, head_dim),
                    before=chunk.before,
                    scale=scale,
                    softcap=softcap,
                    window=window,
                )
            )
        return output

    def _packed(self, positions: int, head_dim: int) -> torch.Tensor:
        size = packed_kv_elements(positions, head_dim)
        if size > len(self._room):
            self._room = self._room.new_empty(size)
        return self._room
