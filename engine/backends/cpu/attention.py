"""Attention with our cpu kernels, directly over the paged pool: no KV is gathered first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from engine.backends.cpu.kernels import CpuKernels
from engine.backends.cpu.ops import Code, attend_op
from engine.core.model_runner import ScheduledSequence
from engine.kv_cache.memory import KvCacheMemory
from engine.model.attention_interface import AttentionBackend, LayerState, NewTokens
from kv_transfer.layout import KvLayout
from splitserve.generation.kv_blocks import blocks_for

_HEAD_DIM_STEP = 32


class ChunkInputs:
    """The kernels' inputs for one sequence's chunk, at fixed addresses.

    `step` is the `Step` of `src/kv.hpp`: int64 `[3]`, the addresses of lengths and block table, and `columns`.
    """

    def __init__(self, columns: int) -> None:
        """`columns`: maximum number of blocks of the sequence."""
        self._lengths = np.zeros(2, np.int64)
        self._table = np.zeros(columns, np.int32)
        addresses = (self._lengths.ctypes.data, self._table.ctypes.data, columns)
        self.step: npt.NDArray[np.int64] = np.array(addresses, np.int64)

    def fill(self, length: int, tokens: int, blocks: Sequence[int]) -> None:
        """`length` tokens of the sequence, the chunk included, in `blocks`; the last `tokens` of them are the chunk.

        Rows of the chunk beyond `tokens` are padding.
        """
        self._lengths[:] = length, tokens
        self._table[: len(blocks)] = blocks


class DecodeInputs:
    """Inputs of up to `rows` sequences that compute one token each, at fixed addresses.

    `step` is the `Step` of `src/kv.hpp`, as in `ChunkInputs`: each row's number of tokens, the new one included (0: the
    row is padding, reads no KV and writes none), and its block table.
    """

    def __init__(self, rows: int, context_tokens: int, block_size: int) -> None:
        """`context_tokens`: maximum length of a sequence."""
        columns = blocks_for(context_tokens, block_size)
        self.rows, self._block_size = rows, block_size
        self._lengths = np.zeros(rows, np.int64)
        self._tables = np.zeros((rows, columns), np.int32)
        addresses = (self._lengths.ctypes.data, self._tables.ctypes.data, columns)
        self.step: npt.NDArray[np.int64] = np.array(addresses, np.int64)

    def fill(self, batch: Sequence[ScheduledSequence]) -> None:
        """Copies a batch into the first rows, in order; the rows after it become padding."""
        count = len(batch)
        self._lengths[:count] = [sequence.num_computed + 1 for sequence in batch]
        self._lengths[count:] = 0
        for row, sequence in enumerate(batch):
            count = sequence.num_computed // self._block_size + 1
            self._tables[row, :count] = sequence.block_ids[:count]


@dataclass(frozen=True, slots=True)
class Part:
    """Rows `begin`..`end` - 1 of a batch: decoding sequences (ATTEND), or the new tokens of one sequence (PREFILL)."""

    code: Code
    begin: int
    end: int
    inputs: DecodeInputs | ChunkInputs


def chunk_parts(batch: Sequence[ScheduledSequence], first_row: int, block_size: int) -> list[Part]:
    """One part for each sequence's chunk, one after the other from `first_row` on."""
    parts = []
    for sequence in batch:
        last_row = first_row + sequence.num_new
        length = sequence.num_computed + sequence.num_new
        blocks = sequence.block_ids[: blocks_for(length, block_size)]
        inputs = ChunkInputs(len(blocks))
        inputs.fill(length, sequence.num_new, blocks)
        parts.append(Part(Code.PREFILL, first_row, last_row, inputs))
        first_row = last_row
    return parts


def attends(layout: KvLayout) -> bool:
    """Whether the kernels support KV of this layout."""
    return layout.dtype == "bfloat16" and layout.head_dim % _HEAD_DIM_STEP == 0


class CpuAttention(AttentionBackend):
    """Attention by the cpu kernels. `parts` are the current step's, set before each forward pass."""

    def __init__(self, pool: KvCacheMemory, kernels: CpuKernels) -> None:
        self.parts: Sequence[Part] | None = None
        self._kernels = kernels
        self._views = [pool.view(layer) for layer in range(pool.layout.num_layers)]

    @override
    def attend(
        self, layer: LayerState, tokens: NewTokens, scale: float, softcap: float | None
    ) -> torch.Tensor:
        assert self.parts is not None, "a forward pass outside of a step"
        query, key, value = tokens.with_contiguous_rows()
        heads, count, head_dim = query.shape
        output = query.new_empty(count, heads, head_dim)
        for part in self.parts:
            rows = slice(part.begin, part.end)
            op = attend_op(
                part.code,
                query[:, rows],
                key[:, rows],
                value[:, rows],
                output[rows],
                self._views[layer.index],
                part.inputs.step,
                scale=scale,
                softcap=softcap,
                window=layer.window,
            )
            self._kernels.compute(op)
        return output
