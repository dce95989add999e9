"""Captured operations that compute any number of rows, up to that of their capture.

The same step is captured twice, with many rows and with few. The operations differ only in numbers of rows, which
`RowCounts` finds; with other numbers the same operations compute fewer rows. Strides and addresses stay those of the
larger capture: fewer rows are written to the beginning of each result, and the rest of it does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.backends.cpu.graphs.capture import GraphCaptureError
from engine.backends.cpu.ops import Code, Ops

Ints = npt.NDArray[np.int64]
_ITEM_BYTES = 2
"""Bytes of a bfloat16 number, the type of queries, keys, values and results of attention."""
_FIXED_FIELDS = ("code", "real")


class StepRows(NamedTuple):
    """Numbers of rows of a step: of sequences that compute one token, which come first; in all; with logits."""

    decodes: int
    total: int
    sampled: int


class Chunk(NamedTuple):
    """Rows `begin`..`begin + tokens` - 1 of a step are new tokens of one sequence; `step`: the address of its inputs,
    see `ChunkInputs`."""

    begin: int
    tokens: int
    step: int


@dataclass(frozen=True, slots=True)
class RowCounts:
    """The fields of operations `[n]` that are numbers of rows: their `size` and their first `number`.

    `fixed`, `of_total`, `of_sampled` `[n, 5]`: each is fixed + of_total * total + of_sampled * sampled rows.
    """

    fixed: Ints
    of_total: Ints
    of_sampled: Ints

    @classmethod
    def between(cls, large: Ops, small: Ops, many: StepRows, few: StepRows) -> RowCounts:
        """From captures of the same step with `many` and with `few` rows. Raises GraphCaptureError if they differ in
        anything but rows."""
        same = len(large) == len(small) and all(
            np.array_equal(large[field], small[field]) for field in _FIXED_FIELDS
        )
        if not same or not np.array_equal(large["number"][:, 1:], small["number"][:, 1:]):
            raise GraphCaptureError("the model computes otherwise with fewer rows")
        counts, fewer = _counts(large), _counts(small)
        attends = np.isin(large["code"], (Code.ATTEND, Code.PREFILL))[:, None]
        differs = (counts != fewer) & ~attends
        factors = []
        for more_rows, fewer_rows in ((many.total, few.total), (many.sampled, few.sampled)):
            factor = np.where(differs & (counts % more_rows == 0), counts // more_rows, 0)
            factors.append(np.where(factor * fewer_rows == fewer, factor, 0))
        if np.any(differs & (factors[0] == 0) & (factors[1] == 0)):
            raise GraphCaptureError("a number in the model's operations depends on rows in another way")
        return cls(np.where(differs, 0, counts), *factors)


def _counts(ops: Ops) -> Ints:
    return np.concatenate([ops["size"], ops["number"][:, :1]], axis=1)


class ResizableOps:
    """Consecutive operations of a graph."""

    def __init__(self, ops: Ops, counts: RowCounts, captured: StepRows) -> None:
        """`captured`: the rows of `ops`, whose prompt is the chunk behind the decoding ones."""
        self._ops, self._counts, self._captured = ops, counts, captured
        self._attends, self._prefills = ops["code"] == Code.ATTEND, ops["code"] == Code.PREFILL
        self._samples = np.any(counts.of_sampled > 0, axis=1)

    def of(self, rows: StepRows, chunks: Sequence[Chunk]) -> Ops:
        """The operations for so many rows, at most those captured, and for these chunks of prompts."""
        ops = self._ops.copy()
        counts = (
            self._counts.fixed + self._counts.of_total * rows.total + self._counts.of_sampled * rows.sampled
        )
        ops["size"], ops["number"][:, 0] = counts[:, :4], counts[:, 4]
        ops["number"][self._attends, 0] = rows.decodes
        times = np.ones(len(ops), np.int64)
        times[self._attends] = rows.decodes > 0
        times[self._prefills] = len(chunks)
        times[self._samples] = rows.sampled > 0
        ops = ops.repeat(times)
        if chunks:
            self._place(ops, chunks)
        return ops

    def _place(self, ops: Ops, chunks: Sequence[Chunk]) -> None:
        """Gives the copies of each attention of prompts a chunk each."""
        places = np.flatnonzero(ops["code"] == Code.PREFILL)
        if not len(places):
            return
        placed = np.tile(np.array(chunks, np.int64), (len(places) // len(chunks), 1))
        moved = (placed[:, 0] - self._captured.decodes)[:, None] * _ITEM_BYTES
        pointers, number = ops["pointer"][places], ops["number"][places]
        pointers[:, :3] += moved * ops["stride"][places][:, :, 1]
        pointers[:, 3:4] += moved * number[:, 1:4].prod(axis=1)[:, None]
        pointers[:, 5] = placed[:, 2]
        number[:, 0] = placed[:, 1]
        ops["pointer"][places], ops["number"][places] = pointers, number
