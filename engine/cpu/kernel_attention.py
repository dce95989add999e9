"""Attention by the kernels, over the paged pool as it is: nothing is gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.attention import LayerState
from engine.cpu.decode_inputs import DecodeInputs
from engine.cpu.kernels import CpuKernels
from engine.cpu.program import Code, attend_op
from engine.kv_pool import KvPool
from engine.runner import ScheduledSequence
from kv_transfer.layout import KvLayout

_HEAD_DIM_STEP = 32


@dataclass(frozen=True, slots=True)
class Part:
    """Rows `begin`..`end` of a batch: of sequences that decode (ATTEND), or new tokens of one sequence (PREFILL)."""

    code: Code
    begin: int
    end: int
    inputs: DecodeInputs | ChunkInputs


class ChunkInputs:
    """What the kernels are told of one sequence's chunk, in memory that stays."""

    def __init__(self, columns: int) -> None:
        """`columns`: blocks of the sequence at most."""
        self._lengths = np.zeros(2, np.int64)
        self._table = np.zeros(columns, np.int32)
        places = (self._lengths.ctypes.data, self._table.ctypes.data, columns)
        self.address: npt.NDArray[np.int64] = np.array(places, np.int64)

    def fill(self, length: int, tokens: int, blocks: Sequence[int]) -> None:
        """How long the sequence is, its chunk included, tokens of the chunk, and the blocks of all of it.

        Rows beyond the tokens are nobody's.
        """
        self._lengths[:] = length, tokens
        self._table[: len(blocks)] = blocks


def chunk_parts(batch: Sequence[ScheduledSequence], first_row: int, block_size: int) -> list[Part]:
    """These sequences' chunks, one behind the other from `first_row` on."""
    parts = []
    for sequence in batch:
        last_row = first_row + sequence.num_new
        length = sequence.num_computed + sequence.num_new
        blocks = sequence.block_ids[: -(-length // block_size)]
        inputs = ChunkInputs(len(blocks))
        inputs.fill(length, sequence.num_new, blocks)
        parts.append(Part(Code.PREFILL, first_row, last_row, inputs))
        first_row = last_row
    return parts


def attends(layout: KvLayout) -> bool:
    """Whether these kernels know KV of this layout."""
    return layout.dtype == "bfloat16" and layout.head_dim % _HEAD_DIM_STEP == 0


class KernelBackend:
    """See the module. `step` is the current one; whoever runs the model sets it before each pass."""

    def __init__(self, pool: KvPool, kernels: CpuKernels) -> None:
        self.step: Sequence[Part] | None = None
        self._kernels = kernels
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
        step = self.step
        assert step is not None, "a forward pass outside of a step"
        heads, tokens, head_dim = query.shape
        query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
        output = query.new_empty(tokens, heads, head_dim)
        for part in step:
            rows = slice(part.begin, part.end)
            op = attend_op(
                part.code,
                query[:, rows],
                key[:, rows],
                value[:, rows],
                output[rows],
                self._views[layer.index],
                part.inputs.address,
                scale=scale,
                softcap=softcap,
                window=layer.window,
            )
            self._kernels.compute(op)
        return output
