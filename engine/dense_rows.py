"""KV of decoding sequences once more, row by row, so that a step on cpu reads it without gathering blocks first.

A layer has a few KB of each block, far from those of the next one: copying them together in every step costs more than
the attention itself. So each decoding sequence gets a row of memory in which the KV of a layer lies in one piece. It is
filled from the pool once, when the sequence begins to decode, and gets each new token's KV as the pool does. The pool
stays what counts: a row can be dropped at any time.

Matrix products want rows of one length without gaps between them. So there are shelves, each with rows of one length,
in steps of a quarter; a sequence that outgrows its shelf is filled anew into the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.runner import ScheduledSequence

Ints = npt.NDArray[np.int64]

SHORTEST = 64
GROWTH = 1.25
ALIGNED = 32


@dataclass(slots=True)
class _Row:
    """`tokens` is the sequence's own list, by which it is known again; KV of its first `length` tokens is there."""

    tokens: Sequence[int]
    length: int


@dataclass(frozen=True, slots=True)
class Shelved:
    """Sequences of a step that have rows 0.. of one shelf; `members` are their indices, in the order of the rows.

    `memory` `[num_layers, 2, rows, num_kv_heads, capacity, head_dim]`.
    """

    members: list[int]
    memory: torch.Tensor


class _Shelf:
    """Rows of one length, the used ones first."""

    def __init__(self, pool: torch.Tensor, capacity: int) -> None:
        self._pool = pool
        self.capacity = capacity
        self.rows: list[_Row] = []
        self._memory = self._made(0)
        self._touched: list[int] = []
        """Up to where each row was ever written; behind it lie zeros."""

    @property
    def row_bytes(self) -> int:
        """Of one row, all layers."""
        _, layers, both, heads, _, head_dim = self._pool.shape
        return int(layers * both * heads * head_dim * self.capacity * self._pool.itemsize)

    @property
    def room(self) -> int:
        """Rows that there is memory for."""
        return int(self._memory.shape[2])

    def used(self) -> torch.Tensor:
        """`[num_layers, 2, used rows, num_kv_heads, capacity, head_dim]`."""
        return self._memory[:, :, : len(self.rows)]

    def resize(self, rows: int) -> None:
        """Memory for so many rows, at least the used ones."""
        made = self._made(rows)
        used = len(self.rows)
        made[:, :, :used] = self._memory[:, :, :used]
        self._memory = made
        self._touched = self._touched[:used] + [0] * (rows - used)

    def add(self, sequence: ScheduledSequence) -> None:
        """Fills the next row with what is computed of a sequence. There must be room."""
        place, length = len(self.rows), sequence.num_computed
        row = self._memory[:, :, place]
        if length:
            _, layers, both, heads, block_size, head_dim = self._pool.shape
            blocks = torch.as_tensor(sequence.block_ids[: -(-length // block_size)])
            found = self._pool.index_select(0, blocks).permute(1, 2, 3, 0, 4, 5)
            row[:, :, :, :length] = found.reshape(layers, both, heads, -1, head_dim)[:, :, :, :length]
        # What a former sequence left there might not be finite, and a mask adds to a score.
        row[:, :, :, length : self._touched[place]] = 0
        self._touched[place] = max(length, self._touched[place])
        self.rows.append(_Row(sequence.token_ids, length))

    def drop(self, place: int) -> None:
        """Frees a row; the last one takes its place."""
        last = len(self.rows) - 1
        if place != last:
            length = self.rows[last].length
            self._memory[:, :, place, :, :length] = self._memory[:, :, last, :, :length]
            self._memory[:, :, place, :, length : self._touched[place]] = 0
            self._touched[place] = max(length, self._touched[place])
            self.rows[place] = self.rows[last]
        self.rows.pop()

    def written(self) -> None:
        """Every used row gets one token in this step."""
        for place, row in enumerate(self.rows):
            row.length += 1
            self._touched[place] = max(row.length, self._touched[place])

    def _made(self, rows: int) -> torch.Tensor:
        _, layers, both, heads, _, head_dim = self._pool.shape
        return self._pool.new_zeros((layers, both, rows, heads, self.capacity, head_dim))


class DenseRows:
    """All shelves over one pool `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`."""

    def __init__(self, pool: torch.Tensor, max_bytes: int) -> None:
        self._pool = pool
        self._max_bytes = max_bytes
        self._shelves: dict[int, _Shelf] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of all rows."""
        return sum(shelf.room * shelf.row_bytes for shelf in self._shelves.values())

    def place(self, batch: Sequence[ScheduledSequence], decoding: Sequence[int]) -> list[Shelved]:
        """Rows for the sequences at these indices of the batch, each of which computes one token in this step.

        Those that no row can be made for are in none of the results. Rows of all others are given up.
        """
        indices = {id(batch[index].token_ids): index for index in decoding}
        wanted = indices.copy()
        self._drop_all_but(wanted, batch)
        for index in wanted.values():
            self._add(batch[index])
        places = []
        for capacity, shelf in list(self._shelves.items()):
            if not shelf.rows:
                del self._shelves[capacity]
                continue
            shelf.written()
            places.append(Shelved([indices[id(row.tokens)] for row in shelf.rows], shelf.used()))
        return places

    def _drop_all_but(self, wanted: dict[int, int], batch: Sequence[ScheduledSequence]) -> None:
        """Takes those from `wanted` whose row goes on."""
        for shelf in self._shelves.values():
            for place in reversed(range(len(shelf.rows))):
                row = shelf.rows[place]
                index = wanted.get(id(row.tokens))
                computed = -1 if index is None else batch[index].num_computed
                # A row may be ahead, where a step is run again.
                if 0 <= computed <= row.length and computed < shelf.capacity:
                    row.length = computed
                    del wanted[id(row.tokens)]
                else:
                    shelf.drop(place)

    def _shrink(self) -> None:
        for shelf in self._shelves.values():
            if shelf.room > len(shelf.rows):
                shelf.resize(len(shelf.rows))

    def _add(self, sequence: ScheduledSequence) -> None:
        capacity = _capacity(sequence.num_computed + 1)
        shelf = self._shelves.get(capacity)
        if shelf is None:
            shelf = _Shelf(self._pool, capacity)
        if shelf.room == len(shelf.rows):
            if shelf.row_bytes > self._max_bytes - self.num_bytes:
                self._shrink()
            more = min(max(1, shelf.room), (self._max_bytes - self.num_bytes) // shelf.row_bytes)
            if more < 1:
                return
            shelf.resize(shelf.room + more)
        self._shelves[capacity] = shelf
        shelf.add(sequence)


def _capacity(length: int) -> int:
    """The length of the rows for so many tokens."""
    capacity = SHORTEST
    while capacity < length:
        capacity = -(-int(capacity * GROWTH) // ALIGNED) * ALIGNED
    return capacity
