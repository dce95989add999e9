"""A second, contiguous copy of decoding sequences' KV, so that a step on cpu need not gather blocks first.

A layer's part of a block is a few KB, far from its part of the next block: gathering them in every step costs more than
the attention itself. So each decoding sequence has a row of memory in which a layer's KV is contiguous. The row is
filled from the pool when the sequence begins to decode; from then on each new token's KV is written to both. The pool
remains authoritative: a row can be dropped at any time.

Batched matrix products need rows of equal length without gaps between them. So rows come in size classes, as in slab
allocators, each class a quarter longer than the one before; a sequence that outgrows its class is copied from the pool
into the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.core.types import ScheduledSequence
from splitserve.generation.kv_blocks import blocks_for

Ints = npt.NDArray[np.int64]

SHORTEST = 64
"""Tokens of a row in the first size class."""
GROWTH = 1.25
ALIGNED = 32
"""Capacities are multiples of this many tokens."""


@dataclass(slots=True)
class _Row:
    """`tokens` is the sequence's own list, whose identity names the sequence; the row has KV of the first `length`."""

    tokens: Sequence[int]
    length: int


@dataclass(frozen=True, slots=True)
class ContiguousRows:
    """A step's sequences of one size class: the sequence with index `members[i]` in the batch has row i.

    `memory` `[num_layers, 2, rows, num_kv_heads, capacity, head_dim]`.
    """

    members: list[int]
    memory: torch.Tensor


class _SizeClass:
    """Rows of one length, the used ones first. `pool` as in `ContiguousKv`; `capacity` is in tokens."""

    def __init__(self, pool: torch.Tensor, capacity: int) -> None:
        self._pool = pool
        self.capacity = capacity
        self.rows: list[_Row] = []
        self._memory = self._new_memory(0)
        self._written: list[int] = []
        """Tokens that were ever written in each row; the rest of the row is zeros."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, all layers."""
        _, layers, both, heads, _, head_dim = self._pool.shape
        return int(layers * both * heads * head_dim * self.capacity * self._pool.itemsize)

    @property
    def allocated_rows(self) -> int:
        """Rows that have memory, used or not."""
        return int(self._memory.shape[2])

    def used(self) -> torch.Tensor:
        """`[num_layers, 2, used rows, num_kv_heads, capacity, head_dim]`."""
        return self._memory[:, :, : len(self.rows)]

    def resize(self, rows: int) -> None:
        """Moves to memory for `rows` rows, which must be at least the used ones."""
        memory = self._new_memory(rows)
        used = len(self.rows)
        memory[:, :, :used] = self._memory[:, :, :used]
        self._memory = memory
        self._written = self._written[:used] + [0] * (rows - used)

    def add(self, sequence: ScheduledSequence) -> None:
        """Copies a sequence's computed KV from the pool into the next row, which must have memory."""
        index, length = len(self.rows), sequence.num_computed
        row = self._memory[:, :, index]
        self._copy(index, sequence, 0)
        # The mask is added to scores, so it would not hide a NaN that an earlier sequence left here.
        row[:, :, :, length : self._written[index]] = 0
        self._written[index] = max(length, self._written[index])
        self.rows.append(_Row(sequence.token_ids, length))

    def catch_up(self, index: int, sequence: ScheduledSequence) -> None:
        """Copies what was computed since into a row: the accepted tokens of a draft."""
        self._copy(index, sequence, self.rows[index].length)
        self.rows[index].length = sequence.num_computed
        self._written[index] = max(sequence.num_computed, self._written[index])

    def _copy(self, index: int, sequence: ScheduledSequence, begin: int) -> None:
        """Copies KV of positions from `begin` to the last computed one from the pool into a row."""
        end = sequence.num_computed
        if begin == end:
            return
        _, layers, both, heads, block_size, head_dim = self._pool.shape
        first = begin // block_size
        blocks = torch.as_tensor(sequence.block_ids[first : blocks_for(end, block_size)])
        # [blocks, layers, 2, heads, block_size, head_dim] to [layers, 2, heads, blocks, block_size, head_dim]
        gathered = self._pool.index_select(0, blocks).permute(1, 2, 3, 0, 4, 5)
        gathered = gathered.reshape(layers, both, heads, -1, head_dim)
        origin = first * block_size
        self._memory[:, :, index, :, begin:end] = gathered[:, :, :, begin - origin : end - origin]

    def drop(self, index: int) -> None:
        """Frees a row and moves the last one into it."""
        last = len(self.rows) - 1
        if index != last:
            length = self.rows[last].length
            self._memory[:, :, index, :, :length] = self._memory[:, :, last, :, :length]
            self._memory[:, :, index, :, length : self._written[index]] = 0
            self._written[index] = max(length, self._written[index])
            self.rows[index] = self.rows[last]
        self.rows.pop()

    def append_token(self) -> None:
        """Counts the token that this step writes into every used row."""
        for index, row in enumerate(self.rows):
            row.length += 1
            self._written[index] = max(row.length, self._written[index])

    def _new_memory(self, rows: int) -> torch.Tensor:
        _, layers, both, heads, _, head_dim = self._pool.shape
        return self._pool.new_zeros((layers, both, rows, heads, self.capacity, head_dim))


class ContiguousKv:
    """All size classes, for one pool `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`.

    Together their rows take at most `max_bytes`.
    """

    def __init__(self, pool: torch.Tensor, max_bytes: int) -> None:
        self._pool = pool
        self._max_bytes = max_bytes
        self._size_classes: dict[int, _SizeClass] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows, used or not."""
        return sum(
            size_class.allocated_rows * size_class.row_bytes for size_class in self._size_classes.values()
        )

    def clear(self) -> None:
        """Drops all rows, and gives their memory back."""
        self._size_classes.clear()

    def assign_rows(
        self, batch: Sequence[ScheduledSequence], decoding: Sequence[int]
    ) -> list[ContiguousRows]:
        """Gives rows to the sequences at these indices of the batch, each of which computes one token in this step.

        Sequences for which there is no memory are left out. Rows of sequences that are not in the batch are freed.
        """
        indices = {id(batch[index].token_ids): index for index in decoding}
        wanted = indices.copy()
        self._drop_all_but(wanted, batch)
        for index in wanted.values():
            self._add(batch[index])
        assigned = []
        for capacity, size_class in list(self._size_classes.items()):
            if not size_class.rows:
                del self._size_classes[capacity]
                continue
            size_class.append_token()
            members = [indices[id(row.tokens)] for row in size_class.rows]
            assigned.append(ContiguousRows(members, size_class.used()))
        return assigned

    def _drop_all_but(self, wanted: dict[int, int], batch: Sequence[ScheduledSequence]) -> None:
        """Frees rows that cannot be continued; removes the sequences of the others from `wanted`.

        `wanted` maps the identity of a sequence's tokens to its index in the batch.
        """
        for size_class in self._size_classes.values():
            for row_index in reversed(range(len(size_class.rows))):
                row = size_class.rows[row_index]
                index = wanted.get(id(row.tokens))
                computed = -1 if index is None else batch[index].num_computed
                if 0 <= computed < size_class.capacity:
                    # A row is ahead of its sequence when a step is run again, and behind after an accepted draft.
                    if computed > row.length:
                        size_class.catch_up(row_index, batch[wanted[id(row.tokens)]])
                    row.length = computed
                    del wanted[id(row.tokens)]
                else:
                    size_class.drop(row_index)

    def _shrink(self) -> None:
        for size_class in self._size_classes.values():
            if size_class.allocated_rows > len(size_class.rows):
                size_class.resize(len(size_class.rows))

    def _add(self, sequence: ScheduledSequence) -> None:
        capacity = _capacity(sequence.num_computed + 1)
        size_class = self._size_classes.get(capacity)
        if size_class is None:
            size_class = _SizeClass(self._pool, capacity)
        if size_class.allocated_rows == len(size_class.rows):
            if size_class.row_bytes > self._max_bytes - self.num_bytes:
                self._shrink()
            more = min(
                max(1, size_class.allocated_rows), (self._max_bytes - self.num_bytes) // size_class.row_bytes
            )
            if more < 1:
                return
            size_class.resize(size_class.allocated_rows + more)
        self._size_classes[capacity] = size_class
        size_class.add(sequence)


def _capacity(length: int) -> int:
    """Tokens of a row in the smallest size class that holds `length` tokens."""
    capacity = SHORTEST
    while capacity < length:
        capacity = -(-int(capacity * GROWTH) // ALIGNED) * ALIGNED
    return capacity
