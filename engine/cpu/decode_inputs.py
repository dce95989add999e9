"""What a step of decoding rows tells the kernels, in memory that stays where it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.runner import ScheduledSequence


class DecodeInputs:
    """Inputs of up to so many rows, one new token each.

    `token_ids`, `positions` `[1, rows]` int64; `address`: where the kernels find each row's number of tokens (the new
    one included; 0: the row is padding, reads no KV and writes none) and its block table.
    """

    def __init__(self, rows: int, context_tokens: int, block_size: int) -> None:
        """`context_tokens`: of one sequence at most."""
        columns = -(-context_tokens // block_size)
        self._block_size = block_size
        self.token_ids = torch.zeros(1, rows, dtype=torch.int64)
        self.positions = torch.zeros(1, rows, dtype=torch.int64)
        self._lengths = np.zeros(rows, np.int64)
        self._tables = np.zeros((rows, columns), np.int32)
        places = (self._lengths.ctypes.data, self._tables.ctypes.data, columns)
        self.address: npt.NDArray[np.int64] = np.array(places, np.int64)

    def fill(self, batch: Sequence[ScheduledSequence]) -> None:
        """Takes a batch in its order; the rows behind it are padding."""
        count = len(batch)
        computed = [sequence.num_computed for sequence in batch]
        self.token_ids[0, :count] = torch.tensor(
            [sequence.token_ids[at] for sequence, at in zip(batch, computed, strict=True)]
        )
        self.positions[0, :count] = torch.tensor(computed)
        self.token_ids[0, count:] = 0
        self.positions[0, count:] = 0
        self._lengths[:count] = computed
        self._lengths[:count] += 1
        self._lengths[count:] = 0
        for row, sequence in enumerate(batch):
            count = sequence.num_computed // self._block_size + 1
            self._tables[row, :count] = sequence.block_ids[:count]

    def clear(self) -> None:
        """Padding only."""
        self.fill(())
