"""The block tables of sequences, kept on the device from step to step.

A sequence has a row while it runs. A step sends only what its sequences' tables got since they were last sent: nothing
for most decode rows, an entry where a token begins a new block, the whole table of a new sequence. The engine does not
say when a sequence ends; the row that was unused for longest goes to the next one that needs a row. A table that was
freed and given out again has another `table_id`, so what its row held does not matter.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.backends.cuda.staging import PlacedStep, Upload
from engine.backends.interface import FlatStep, Ints
from splitserve.generation.kv_blocks import blocks_for

_FIRST_CAPACITY = 1 << 12
"""Initial capacity of the buffer for changed entries, in int64 numbers."""
_NO_ROW = -1


class HostBlockTable:
    """Which row each sequence has, and what is in it: `entries` int64 `[rows * columns]`, row after row.

    Entries of a row behind those of its sequence hold anything.
    """

    def __init__(self, rows: int, columns: int, block_size: int) -> None:
        """For steps of up to `rows` sequences of up to `columns` blocks of `block_size` tokens."""
        self.rows, self.columns, self._block_size = rows, columns, block_size
        self.entries: Ints = np.zeros(rows * columns, np.int64)
        self._row_of: dict[int, int] = {}
        self._table_in = [0] * rows
        self._widths: Ints = np.zeros(rows, np.int64)
        """Leading entries of each row that are its sequence's."""
        self._last_used: Ints = np.zeros(rows, np.int64)
        self._step = 0

    def place(self, flat: FlatStep) -> tuple[Ints, Ints]:
        """Brings the rows of a step's sequences up to date.

        Returns where in `entries` each sequence's table begins, int64 `[sequences]`, and which entries are new, int64
        `[changed]`, each once. Raises ValueError for more sequences or longer ones than there is room for.
        """
        widths = blocks_for(flat.contexts, self._block_size)
        if len(flat.sequences) > self.rows or widths.max(initial=0) > self.columns:
            what = f"{len(flat.sequences)} sequences of up to {widths.max(initial=0)} blocks"
            raise ValueError(f"a step of {what}; there is room for {self.rows} of {self.columns}")
        rows = self._rows_of(flat)
        starts = rows * self.columns
        changed: list[Ints] = []
        for index in np.flatnonzero(widths > self._widths[rows]).tolist():
            first, last = int(self._widths[rows[index]]), int(widths[index])
            self._widths[rows[index]] = last
            place = np.arange(starts[index] + first, starts[index] + last)
            self.entries[place[0] : place[-1] + 1] = flat.sequences[index].block_ids[first:last]
            changed.append(place)
        return starts, np.concatenate(changed) if changed else np.empty(0, np.int64)

    def forget(self) -> None:
        """Takes all rows from their sequences; those that go on get theirs anew."""
        self._row_of.clear()
        self._table_in = [0] * self.rows

    def _rows_of(self, flat: FlatStep) -> Ints:
        self._step += 1
        row_of = self._row_of
        rows = np.array([row_of.get(s.table_id, _NO_ROW) for s in flat.sequences], np.int64)
        without = np.flatnonzero(rows == _NO_ROW)
        # First of all the others are marked as used, so that nobody gets the row of a sequence in the same step.
        self._last_used[rows[rows != _NO_ROW]] = self._step
        for index in without.tolist():
            rows[index] = self._take_row(flat.sequences[index].table_id)
        return rows

    def _take_row(self, table_id: int) -> int:
        """The row that was unused for longest. A table without a name has it for one step."""
        row = int(self._last_used.argmin())
        self._row_of.pop(self._table_in[row], None)
        if table_id:
            self._row_of[table_id] = row
        self._table_in[row] = table_id
        self._widths[row], self._last_used[row] = 0, self._step
        return row


class DeviceBlockTable:
    """A `HostBlockTable` and its copy on the device.

    `tables` int64 `[rows * columns]` never moves, so captured graphs may read it. A step writes it behind all work that
    was queued before and ahead of its own.
    """

    def __init__(self, rows: int, columns: int, block_size: int, device: torch.device) -> None:
        """`rows` sequences of up to `columns` blocks of `block_size` tokens, as `HostBlockTable`."""
        self._block_size = block_size
        self._host = HostBlockTable(rows, columns, block_size)
        self._upload = Upload(_FIRST_CAPACITY, device)
        self.tables = torch.zeros(rows * columns, dtype=torch.int64, device=device)

    def place(self, flat: FlatStep) -> PlacedStep:
        """Gives the sequences their rows; queues one copy and one scatter if entries are new. Waits for nothing.

        Raises ValueError as `HostBlockTable.place`.
        """
        try:
            starts, changed = self._host.place(flat)
            if changed.size:
                places, blocks = self._upload.send([changed, self._host.entries[changed]])
                self.tables.index_copy_(0, places, blocks)
        except BaseException:
            # The device may not have what the host believes it has: another sequence would read foreign blocks.
            self._host.forget()
            raise
        owners = np.repeat(starts, np.diff(flat.query_starts))
        size = self._block_size
        slots = self._host.entries[owners + flat.positions // size] * size + flat.positions % size
        return PlacedStep(flat, slots, starts, self.tables)

    def nothing(self) -> PlacedStep:
        """A step without sequences, to be padded: its rows touch no KV."""
        empty = np.empty(0, np.int64)
        flat = FlatStep([], empty, empty, empty, np.zeros(1, np.int64), empty, [], 0, 0, 0)
        return PlacedStep(flat, empty, empty, self.tables)
