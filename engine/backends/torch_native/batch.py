"""One step's batch as tensors: flattened tokens, where their KV is written, and what each may attend to.

The tokens of all sequences are concatenated without padding: first the sequences that compute a single token (decode
rows, those with the longest contexts first), then the others (prefill chunks). What
attention needs depends only on a layer's sliding window, so it is planned once per step and window, not per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from engine.backends.interface import FlatStep, Ints, PromptRows, flatten
from engine.core.model_runner import ScheduledSequence
from splitserve.generation.kv_blocks import blocks_for

TILE_TOKENS = 128
"""Query rows of a prefill chunk that are computed together: few enough that their scores stay in a cache and little is
computed that causality masks; enough for fast matrix products."""
SAME_LENGTH_BLOCKS = 8
"""Contexts of up to this many blocks are always padded to a common length."""
MIN_FILL = 0.75
"""A decode row joins a group if its context is at least this share of the group's longest one."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows of similar context length, `rows[0]`..`rows[1]` of the flattened batch.

    `blocks` int64 `[n * width]`: block tables padded with block 0. `mask` `[n, 1, 1, width * block_size]`: 0 or -inf,
    None if every position is visible. `stale` int64: positions among the gathered `[n * width * block_size]` keys that
    are beyond their sequence's end. They are zeroed before use: the mask is added to the scores and would let a NaN of
    another sequence through.
    """

    rows: tuple[int, int]
    blocks: torch.Tensor
    mask: torch.Tensor | None
    stale: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries `query[0]`..`query[1]` - 1 of a chunk against its keys `keys[0]`..`keys[1]` - 1.

    `mask` `[queries, masked keys]`: 0 or -inf for the last keys; every query sees all keys before those.
    """

    query: tuple[int, int]
    keys: tuple[int, int]
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """New tokens of one sequence, rows `rows[0]`..`rows[1]` - 1. `blocks` int64 hold its keys, the new ones included.

    None if the new tokens are the whole sequence so far.
    """

    rows: tuple[int, int]
    blocks: torch.Tensor | None
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What the attention of layers with one window computes in a step."""

    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillChunk, ...]


@dataclass(slots=True)
class StepBatch:
    """The flattened batch. All index tensors are int64 on the model's device.

    `token_ids`, `positions` `[1, tokens]`; `slot_blocks`, `slot_offsets` `[tokens]`: block, and offset in it, that each
    token's KV is written to; `sample_rows` `[samples]`: rows whose logits are sampled, and `sample_order` their
    sequences' indices in the batch as scheduled; `prompts`: see `FlatStep`.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_blocks: torch.Tensor
    slot_offsets: torch.Tensor
    sample_rows: torch.Tensor
    sample_order: list[int]
    prompts: PromptRows | None
    _planner: _Planner
    _plans: dict[int | None, AttentionPlan] = field(default_factory=dict)

    def plan(self, window: int | None) -> AttentionPlan:
        """The plan for layers with this window."""
        if window not in self._plans:
            self._plans[window] = self._planner.plan(window)
        return self._plans[window]


def build_step_batch(
    batch: Sequence[ScheduledSequence],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    group_blocks: int | None = None,
) -> StepBatch:
    """Flattens scheduled sequences. `dtype` is the model's, for the masks.

    A decode group of several rows has at most `group_blocks` blocks, padding included; None: any number.
    """
    flat = flatten(batch, longest_first=True)
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
        token_ids=tensor(flat.token_ids).unsqueeze(0),
        positions=tensor(flat.positions).unsqueeze(0),
        slot_blocks=tensor(np.concatenate(blocks)),
        slot_offsets=tensor(flat.positions % block_size),
        sample_rows=tensor(flat.sample_rows),
        sample_order=flat.sample_order,
        prompts=flat.prompts,
        _planner=_Planner(flat, block_size, dtype, device, group_blocks),
    )


@dataclass(frozen=True, slots=True)
class _Planner:
    flat: FlatStep
    block_size: int
    dtype: torch.dtype
    device: torch.device
    group_blocks: int | None

    def plan(self, window: int | None) -> AttentionPlan:
        groups = tuple(self._decode_group(first, last, window) for first, last in self._groups(window))
        chunks = range(self.flat.num_decode, len(self.flat.sequences))
        prefill = tuple(self._prefill(index, window) for index in chunks)
        return AttentionPlan(groups, prefill)

    def _groups(self, window: int | None) -> list[tuple[int, int]]:
        """Splits the decode rows, sorted by length, where padding would waste too much."""
        groups: list[tuple[int, int]] = []
        begin, widest = 0, 0
        for row in range(self.flat.num_decode):
            width = self._blocks(row, window)[1]
            uneven = widest > SAME_LENGTH_BLOCKS and width < MIN_FILL * widest
            full = (
                self.group_blocks is not None and (row + 1 - begin) * max(width, widest) > self.group_blocks
            )
            if row > begin and (uneven or full):
                groups.append((begin, row))
                begin, widest = row, 0
            widest = max(widest, width)
        return [*groups, (begin, self.flat.num_decode)] if self.flat.num_decode else []

    def _blocks(self, row: int, window: int | None) -> tuple[int, int]:
        """The first block that any new token of a sequence can see, and the number of blocks from there to its end."""
        sequence = self.flat.sequences[row]
        seen_from = 0 if window is None else max(0, sequence.num_computed + 1 - window)
        first = seen_from // self.block_size
        end = sequence.num_computed + sequence.num_new
        return first, blocks_for(end, self.block_size) - first

    def _decode_group(self, begin: int, end: int, window: int | None) -> DecodeGroup:
        spans = [self._blocks(row, window) for row in range(begin, end)]
        width = max(count for _, count in spans)
        tables = np.zeros((end - begin, width), dtype=np.int64)
        low = np.zeros((end - begin, 1), dtype=np.int64)
        high = np.zeros((end - begin, 1), dtype=np.int64)
        for row, (first, count) in enumerate(spans):
            sequence = self.flat.sequences[begin + row]
            tables[row, :count] = sequence.block_ids[first : first + count]
            high[row] = sequence.num_computed + 1 - first * self.block_size
            low[row] = 0 if window is None else max(0, high[row, 0] - window)
        local = np.arange(width * self.block_size)
        after = local >= high
        hidden = after | (local < low)
        stale = np.flatnonzero(after)
        return DecodeGroup(
            rows=(begin, end),
            blocks=torch.from_numpy(tables.ravel()).to(self.device),
            mask=self._mask(hidden)[:, None, None] if hidden.any() else None,
            stale=torch.from_numpy(stale).to(self.device) if stale.size else None,
        )

    def _prefill(self, row: int, window: int | None) -> PrefillChunk:
        sequence = self.flat.sequences[row]
        begin, count = sequence.num_computed, sequence.num_new
        first, width = (0, 0) if begin == 0 else self._blocks(row, window)
        origin = first * self.block_size
        tiles = []
        for start in range(0, count, TILE_TOKENS):
            stop = min(start + TILE_TOKENS, count)
            query = np.arange(begin + start, begin + stop)[:, None]
            low = origin if window is None else max(origin, begin + start + 1 - window)
            # Without a window, all queries see everything before the tile.
            masked = np.arange(begin + start if window is None else low, begin + stop)
            hidden = masked > query
            if window is not None:
                hidden |= masked <= query - window
            tiles.append(Tile((start, stop), (low - origin, begin + stop - origin), self._mask(hidden)))
        blocks = None
        if begin:
            table = np.asarray(sequence.block_ids[first : first + width], dtype=np.int64)
            blocks = torch.from_numpy(table).to(self.device)
        begin_row, end_row = self.flat.query_starts[row : row + 2].tolist()
        return PrefillChunk((begin_row, end_row), blocks, tuple(tiles))

    def _mask(self, hidden: npt.NDArray[np.bool_]) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self.dtype)
        return mask.masked_fill_(torch.from_numpy(hidden), float("-inf")).to(self.device)
