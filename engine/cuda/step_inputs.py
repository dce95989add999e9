"""One step's batch as the kernels take it: flattened on the host, sent to the device in one copy.

Tokens of all sequences lie behind one another: first the sequences that compute a single token (decode rows), then the
others (prompt chunks). Block tables lie behind one another too, each from its first block on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt
import torch

from engine.runner import ScheduledSequence

Ints = npt.NDArray[np.int64]
ALIGNED = 2
"""Each array begins at a multiple of so many numbers (16 bytes), because kernels are compiled once more for others."""
NOWHERE = -1
"""The slot of a padded row: its KV is written nowhere, so no block has to be kept free for it."""


@dataclass(frozen=True, slots=True)
class FlatStep:
    """A step on the host. All arrays are int64.

    `token_ids`, `positions`, `slots` `[tokens]`: a slot is block * block_size + offset; `contexts` `[sequences]`: keys
    of each after this step, 0 for a padded row; `query_starts` `[sequences + 1]`: where its tokens begin;
    `table_starts` `[sequences]`: where its block table begins in `tables`; `sample_rows` `[samples]`: tokens whose
    logits are wanted, and `sample_order` their sequences' indices in the batch as scheduled.
    """

    token_ids: Ints
    positions: Ints
    slots: Ints
    contexts: Ints
    query_starts: Ints
    table_starts: Ints
    tables: Ints
    sample_rows: Ints
    sample_order: list[int]
    num_decode: int
    num_prefill: int
    longest_chunk: int

    @property
    def decode_only(self) -> bool:
        """Whether every sequence computes one token."""
        return not self.num_prefill

    def padded(self, rows: int) -> FlatStep:
        """A decode-only step with so many rows: the new ones see nothing and write nowhere."""
        more = rows - self.num_decode

        def pad(array: Ints, value: int = 0) -> Ints:
            return np.pad(array, (0, more), constant_values=value)

        return replace(
            self,
            token_ids=pad(self.token_ids),
            positions=pad(self.positions),
            slots=pad(self.slots, NOWHERE),
            contexts=pad(self.contexts),
            query_starts=np.arange(rows + 1),
            table_starts=pad(self.table_starts),
            num_decode=rows,
        )


def flatten(batch: Sequence[ScheduledSequence], block_size: int) -> FlatStep:
    """Lays out a batch."""
    order = [index for index, sequence in enumerate(batch) if sequence.num_new == 1]
    num_decode = len(order)
    order += [index for index, sequence in enumerate(batch) if sequence.num_new != 1]
    sequences = [batch[index] for index in order]
    computed = np.fromiter((s.num_computed for s in sequences), np.int64, len(order))
    counts = np.fromiter((s.num_new for s in sequences), np.int64, len(order))
    contexts = computed + counts
    query_starts = _starts(counts)
    widths = -(-contexts // block_size)
    table_starts = _starts(widths)
    tables = np.fromiter(
        chain.from_iterable(s.block_ids[:width] for s, width in zip(sequences, widths.tolist(), strict=True)),
        np.int64,
        int(table_starts[-1]),
    )
    tokens = int(query_starts[-1])
    spans = zip(sequences, computed.tolist(), contexts.tolist(), strict=True)
    token_ids = np.fromiter(chain.from_iterable(s.token_ids[a:b] for s, a, b in spans), np.int64, tokens)
    owners = np.repeat(np.arange(len(order)), counts)
    positions = np.arange(tokens) + (computed - query_starts[:-1])[owners]
    slots = tables[table_starts[:-1][owners] + positions // block_size] * block_size + positions % block_size
    sampled = [row for row, sequence in enumerate(sequences) if sequence.sample]
    return FlatStep(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        contexts=contexts,
        query_starts=query_starts,
        table_starts=table_starts[:-1],
        tables=tables,
        sample_rows=query_starts[1:][sampled] - 1,
        sample_order=[order[row] for row in sampled],
        num_decode=num_decode,
        num_prefill=len(order) - num_decode,
        longest_chunk=int(counts[num_decode:].max(initial=0)),
    )


def no_sequences() -> FlatStep:
    """A step of nobody; padded, it computes rows that touch no KV. Its table has an entry, and so an address."""
    empty, one = np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
    return FlatStep(empty, empty, empty, empty, one, empty, one, empty, [], 0, 0, 0)


def _starts(sizes: Ints) -> Ints:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step on the device: the arrays of `FlatStep` as tensors of the same names, `token_ids` and `positions` with a
    batch dimension of 1. `flat` is what they were made from."""

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
        """Sequences that compute one token; theirs are the first rows."""
        return self.flat.num_decode

    @property
    def num_prefill(self) -> int:
        """Sequences that compute more."""
        return self.flat.num_prefill

    @property
    def longest_chunk(self) -> int:
        """Most new tokens of a sequence among these."""
        return self.flat.longest_chunk


class Staging:
    """Brings steps to the device through one pinned buffer, so that the copy does not hold up the host.

    Steps whose arrays have the same sizes, `tables` excepted, lie at the same addresses on the device.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._device = device
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._allocate(capacity)

    def stage(self, flat: FlatStep) -> StepInputs:
        """Sends a step. It stays as it is until the next call."""
        # What changes in size from step to step comes last, so that the rest stays in its place.
        arrays = [flat.token_ids, flat.positions, flat.slots, flat.contexts, flat.query_starts]
        arrays += [flat.table_starts, flat.tables, flat.sample_rows]
        sizes = [array.size for array in arrays]
        begins = [0, *accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes)]
        if self._copied is not None:
            self._copied.synchronize()  # the former step's copy still reads the host's buffer
        if begins[-1] > self.capacity:
            self._allocate(2 * begins[-1])
        for array, begin in zip(arrays, begins, strict=False):
            self._numbers[begin : begin + array.size] = array
        self._there[: begins[-1]].copy_(self._host[: begins[-1]], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        there = [self._there[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)]
        token_ids, positions, *rest = there
        return StepInputs(flat, token_ids.unsqueeze(0), positions.unsqueeze(0), *rest)

    def _allocate(self, capacity: int) -> None:
        self.capacity = capacity
        """Numbers that fit; more make it grow, which moves it."""
        self._host = torch.empty(capacity, dtype=torch.int64, pin_memory=self._copied is not None)
        self._numbers: Ints = self._host.numpy()
        self._there = torch.empty(capacity, dtype=torch.int64, device=self._device)
