"""The block tables of sequences, kept on the device from step to step.

A sequence has a row while it runs. A step sends only entries that are new since the last step: none for most decode
rows, one where a token begins a new block, all of a new sequence. The engine does not report the end of a sequence; the
least recently used row goes to the next sequence that needs one. A block table that was freed and allocated again has
another `table_id`, so the old content of its row is never read.
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


class DeviceBlockTable:
    """The row of each sequence, its content on the host, and the copy on the device: `tables`.

    `tables` int64 `[rows * columns]`, row after row, never moves, so captured graphs may read it. The device updates it
    in the order of its queue: after the earlier steps, before the step itself. Entries of a row beyond its sequence's
    table are arbitrary.
    """

    def __init__(self, rows: int, columns: int, block_size: int, device: torch.device) -> None:
        """For steps of up to `rows` sequences of up to `columns` blocks of `block_size` tokens."""
        self._rows, self._columns, self._block_size = rows, columns, block_size
        self._entries: Ints = np.zeros(rows * columns, np.int64)
        self._row_of: dict[int, int] = {}
        self._table_in = [0] * rows
        self._widths: Ints = np.zeros(rows, np.int64)
        """Number of leading entries of each row that belong to its sequence."""
        self._last_used: Ints = np.zeros(rows, np.int64)
        self._step = 0
        self._upload = Upload(_FIRST_CAPACITY, device)
        self.tables = torch.zeros(rows * columns, dtype=torch.int64, device=device)

    def place(self, flat: FlatStep) -> PlacedStep:
        """Gives the sequences their rows; queues one copy and one scatter if entries are new. Waits for nothing.

        Raises ValueError for too many sequences, or too long ones.
        """
        try:
            starts, changed = self._updated(flat)
            if changed.size:
                places, blocks = self._upload.send([changed, self._entries[changed]])
                self.tables.index_copy_(0, places, blocks)
        except BaseException:
            # Host and device may differ now: a sequence would read blocks of others. All get new rows.
            self._row_of.clear()
            self._table_in = [0] * self._rows
            raise
        owners = np.repeat(starts, np.diff(flat.query_starts))
        size = self._block_size
        slots = self._entries[owners + flat.positions // size] * size + flat.positions % size
        return PlacedStep(flat, slots, starts, self.tables)

    def nothing(self) -> PlacedStep:
        """A step without sequences, to be padded: its rows touch no KV."""
        empty = np.empty(0, np.int64)
        flat = FlatStep([], empty, empty, empty, np.zeros(1, np.int64), empty, [], 0, 0, 0)
        return PlacedStep(flat, empty, empty, self.tables)

    def _updated(self, flat: FlatStep) -> tuple[Ints, Ints]:
        """Brings the rows of a step's sequences up to date on the host.

        Returns the index of each sequence's table, int64 `[sequences]`, and the indices of new entries, int64
        `[changed]`, each once.
        """
        widths = blocks_for(flat.contexts, self._block_size)
        if len(flat.sequences) > self._rows or widths.max(initial=0) > self._columns:
            what = f"{len(flat.sequences)} sequences of up to {widths.max(initial=0)} blocks"
            raise ValueError(f"a step of {what}; there is room for {self._rows} of {self._columns}")
        rows = self._rows_of(flat)
        starts = rows * self._columns
        changed: list[Ints] = []
        for index in np.flatnonzero(widths > self._widths[rows]).tolist():
            first, last = int(self._widths[rows[index]]), int(widths[index])
            self._widths[rows[index]] = last
            place = np.arange(starts[index] + first, starts[index] + last)
            self._entries[place[0] : place[-1] + 1] = flat.sequences[index].block_ids[first:last]
            changed.append(place)
        return starts, np.concatenate(changed) if changed else np.empty(0, np.int64)

    def _rows_of(self, flat: FlatStep) -> Ints:
        self._step += 1
        row_of = self._row_of
        rows = np.array([row_of.get(entry.table_id, _NO_ROW) for entry in flat.sequences], np.int64)
        without = np.flatnonzero(rows == _NO_ROW)
        # Rows of this step are marked as used first, so that no other sequence of the step gets them.
        self._last_used[rows[rows != _NO_ROW]] = self._step
        for index in without.tolist():
            rows[index] = self._take_row(flat.sequences[index].table_id)
        return rows

    def _take_row(self, table_id: int) -> int:
        """Assigns the least recently used row to a table; a table with id 0 keeps it for one step only."""
        row = int(self._last_used.argmin())
        self._row_of.pop(self._table_in[row], None)
        if table_id:
            self._row_of[table_id] = row
        self._table_in[row] = table_id
        self._widths[row], self._last_used[row] = 0, self._step
        return row
