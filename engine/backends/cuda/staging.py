"""Sends a step, laid out on the host, to the device in one copy.

The tokens of all sequences are concatenated: first the sequences that compute a single token (decode rows), then the
others (prompt chunks). Block tables stay on the device; see `block_table`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

from engine.backends.interface import FlatStep, Ints

ALIGNED = 2
"""Each array begins at a multiple of this many numbers (16 bytes): Triton compiles other kernels for other
alignments."""
NOWHERE = -1
"""The slot of a padded row: its KV is not written, so no block is needed for it."""


@dataclass(frozen=True, slots=True)
class PlacedStep:
    """A step whose sequences have rows in a block table.

    `slots` int64 `[tokens]`: block * block_size + offset; `table_starts` int64 `[sequences]`: index in `tables` of the
    sequence's first block; `tables` int64 `[entries]`, on the device, at one address for its life.
    """

    flat: FlatStep
    slots: Ints
    table_starts: Ints
    tables: torch.Tensor

    def padded(self, rows: int) -> PlacedStep:
        """A step that only decodes, extended to `rows` rows. The new ones read no KV and write none; new entries of
        `sample_rows`, which gets one for every row, name any row."""
        flat = self.flat

        def longer(array: Ints, value: int = 0) -> Ints:
            filled = np.full(rows, value)  # `np.pad` takes ten times as long, and the device waits
            filled[: len(array)] = array
            return filled

        extended = replace(
            flat,
            token_ids=longer(flat.token_ids),
            positions=longer(flat.positions),
            contexts=longer(flat.contexts),
            query_starts=np.arange(rows + 1),
            sample_rows=longer(flat.sample_rows),
            num_decode=rows,
        )
        return PlacedStep(extended, longer(self.slots, NOWHERE), longer(self.table_starts), self.tables)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step on the device: the arrays of `FlatStep` and `PlacedStep` as int64 tensors, `token_ids` and `positions`
    with a batch dimension of 1."""

    flat: FlatStep
    tables: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    contexts: torch.Tensor
    query_starts: torch.Tensor
    table_starts: torch.Tensor
    sample_rows: torch.Tensor


class Upload:
    """Copies int64 arrays to the device through one pinned buffer, so that the host need not wait for the copy."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._device = device
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._allocate(capacity)

    def send(self, arrays: Sequence[Ints]) -> list[torch.Tensor]:
        """Sends the arrays in one copy; the tensors are valid until the next call.

        Arrays of the same sizes have the same addresses on the device, as long as `capacity` stays.
        """
        sizes = [array.size for array in arrays]
        begins = [0, *accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes)]
        if self._copied is not None:
            self._copied.synchronize()  # the previous copy may still read the host buffer
        if begins[-1] > self.capacity:
            self._allocate(2 * begins[-1])
        for array, begin in zip(arrays, begins, strict=False):
            self._numbers[begin : begin + array.size] = array
        self._on_device[: begins[-1]].copy_(self._host[: begins[-1]], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return [self._on_device[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)]

    def _allocate(self, capacity: int) -> None:
        self.capacity = capacity
        """Size of the buffer in numbers. A larger step makes it grow, which changes its address."""
        self._host = torch.empty(capacity, dtype=torch.int64, pin_memory=self._copied is not None)
        self._numbers: Ints = self._host.numpy()
        self._on_device = torch.empty(capacity, dtype=torch.int64, device=self._device)


class Staging:
    """Sends steps to the device. Steps with equal numbers of tokens, sequences and samples have the same addresses
    there, as long as they fit into `capacity` numbers."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._upload = Upload(capacity, device)

    def stage(self, step: PlacedStep) -> StepInputs:
        """Sends a step; the result is valid until the next call."""
        flat = step.flat
        arrays = [
            flat.token_ids,
            flat.positions,
            step.slots,
            flat.contexts,
            flat.query_starts,
            step.table_starts,
            flat.sample_rows,
        ]
        token_ids, positions, *rest = self._upload.send(arrays)
        return StepInputs(flat, step.tables, token_ids.unsqueeze(0), positions.unsqueeze(0), *rest)
