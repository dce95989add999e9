"""Sends a step, flattened on the host, to the device in one copy.

The tokens of all sequences are concatenated: first the sequences that compute a single token (decode rows), then the
others (prompt chunks). So are the block tables, each from its first block on.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from engine.backends.interface import ALIGNED, FlatStep, Ints


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step on the device: the arrays of `flat` as int64 tensors, `token_ids` and `positions` with a batch dimension
    of 1."""

    flat: FlatStep
    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    contexts: torch.Tensor
    query_starts: torch.Tensor
    table_starts: torch.Tensor
    tables: torch.Tensor
    sample_rows: torch.Tensor

    @property
    def num_decode(self) -> int:
        """Sequences that compute one token; they are the first rows."""
        return self.flat.num_decode

    @property
    def num_prefill(self) -> int:
        """Sequences that compute more than one token."""
        return self.flat.num_prefill

    @property
    def longest_chunk(self) -> int:
        """The largest number of new tokens of a prefill sequence."""
        return self.flat.longest_chunk


class Staging:
    """Copies steps to the device through one pinned buffer, so that the host need not wait for the copy.

    Steps whose arrays, `tables` and `sample_rows` excepted, have the same sizes have the same addresses on the device.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._device = device
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._allocate(capacity)

    def stage(self, flat: FlatStep) -> StepInputs:
        """Sends a step; the result is valid until the next call."""
        # Arrays whose size changes from step to step come last, so that the others keep their addresses.
        arrays = [flat.token_ids, flat.positions, flat.slots, flat.contexts, flat.query_starts]
        arrays += [flat.table_starts, flat.tables, flat.sample_rows]
        sizes = [array.size for array in arrays]
        begins = [0, *accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes)]
        if self._copied is not None:
            self._copied.synchronize()  # the previous step's copy may still read the host buffer
        if begins[-1] > self.capacity:
            self._allocate(2 * begins[-1])
        for array, begin in zip(arrays, begins, strict=False):
            self._numbers[begin : begin + array.size] = array
        self._on_device[: begins[-1]].copy_(self._host[: begins[-1]], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        tensors = [self._on_device[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)]
        token_ids, positions, *rest = tensors
        return StepInputs(flat, token_ids.unsqueeze(0), positions.unsqueeze(0), *rest)

    def _allocate(self, capacity: int) -> None:
        self.capacity = capacity
        """Numbers that fit. A larger step makes the buffer grow, which changes its address."""
        self._host = torch.empty(capacity, dtype=torch.int64, pin_memory=self._copied is not None)
        self._numbers: Ints = self._host.numpy()
        self._on_device = torch.empty(capacity, dtype=torch.int64, device=self._device)
