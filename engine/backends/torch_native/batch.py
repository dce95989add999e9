"""One step's batch as tensors: flattened tokens, where their KV is written, and what each may attend to.

The tokens of all sequences are concatenated without padding. Each sequence attends by itself, so its result does not
depend on the others. What attention needs depends only on a layer's sliding window, so it is planned once per step and
window, not per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.backends.interface import FlatStep, Ints, flatten
from engine.core.model_runner import ScheduledSequence
from splitserve.generation.kv_blocks import blocks_for

TILE_TOKENS = 128
"""Query rows of a chunk that are computed together: few enough that their scores stay in a cache and little is
computed that causality masks; enough for fast matrix products."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries `query[0]`..`query[1]` - 1 of a chunk against its keys `keys[0]`..`keys[1]` - 1.

    `mask` `[queries, masked keys]`: 0 or -inf for the last keys; every query sees all keys before those. None if every
    query sees all keys.
    """

    query: tuple[int, int]
    keys: tuple[int, int]
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """New tokens of one sequence, rows `rows[0]`..`rows[1]` - 1. `blocks` int64 hold its keys, the new ones included.

    None if the new tokens are the whole sequence so far.
    """

    rows: tuple[int, int]
    blocks: torch.Tensor | None
    tiles: tuple[Tile, ...]


@dataclass(slots=True)
class StepBatch:
    """The flattened batch. All index tensors are int64 on the model's device.

    `token_ids`, `positions` `[1, tokens]`; `slot_blocks`, `slot_offsets` `[tokens]`: block, and offset in it, that each
    token's KV is written to; `sample_rows` `[samples]`: rows whose logits are sampled.
    """

    flat: FlatStep
    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_blocks: torch.Tensor
    slot_offsets: torch.Tensor
    sample_rows: torch.Tensor
    block_size: int
    dtype: torch.dtype
    _chunks: dict[int | None, tuple[SequenceChunk, ...]] = field(default_factory=dict)

    def chunks(self, window: int | None) -> tuple[SequenceChunk, ...]:
        """What the attention of layers with this window computes, one chunk for each sequence."""
        if window not in self._chunks:
            rows = range(len(self.flat.sequences))
            self._chunks[window] = tuple(self._chunk(row, window) for row in rows)
        return self._chunks[window]

    def _chunk(self, row: int, window: int | None) -> SequenceChunk:
        sequence, size = self.flat.sequences[row], self.block_size
        begin, count = sequence.num_computed, sequence.num_new
        # The first block that any new token can see.
        first = 0 if window is None else max(0, begin + 1 - window) // size
        origin = first * size if begin else 0
        tiles = []
        for start in range(0, count, TILE_TOKENS):
            stop = min(start + TILE_TOKENS, count)
            low = origin if window is None else max(origin, begin + start + 1 - window)
            # Without a window, all queries see everything before the tile.
            masked = np.arange(begin + start if window is None else low, begin + stop)
            query = np.arange(begin + start, begin + stop)[:, None]
            hidden = masked > query
            if window is not None:
                hidden |= masked <= query - window
            mask = None
            if hidden.any():
                mask = torch.zeros(hidden.shape, dtype=self.dtype)
                mask = mask.masked_fill_(torch.from_numpy(hidden), float("-inf")).to(self.positions.device)
            tiles.append(Tile((start, stop), (low - origin, begin + stop - origin), mask))
        blocks = None
        if begin:
            table = np.asarray(sequence.block_ids[first : blocks_for(begin + count, size)], dtype=np.int64)
            blocks = torch.from_numpy(table).to(self.positions.device)
        begin_row, end_row = self.flat.query_starts[row : row + 2].tolist()
        return SequenceChunk((begin_row, end_row), blocks, tuple(tiles))


def build_step_batch(
    batch: Sequence[ScheduledSequence], block_size: int, dtype: torch.dtype, device: torch.device
) -> StepBatch:
    """Flattens scheduled sequences. `dtype` is the model's, for the masks."""
    flat = flatten(batch)
    blocks = []
    for sequence, positions in zip(
        flat.sequences, np.split(flat.positions, flat.query_starts[1:-1]), strict=True
    ):
        first, last = positions[0] // block_size, positions[-1] // block_size
        table = np.asarray(sequence.block_ids[first : last + 1], dtype=np.int64)
        blocks.append(table[positions // block_size - first])

    def tensor(array: Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return StepBatch(
        flat=flat,
        token_ids=tensor(flat.token_ids).unsqueeze(0),
        positions=tensor(flat.positions).unsqueeze(0),
        slot_blocks=tensor(np.concatenate(blocks)),
        slot_offsets=tensor(flat.positions % block_size),
        sample_rows=tensor(flat.sample_rows),
        block_size=block_size,
        dtype=dtype,
    )
