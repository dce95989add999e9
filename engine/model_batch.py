"""One step's batch as tensors: flattened tokens, where their KV goes, and what each may attend to.

Tokens of all sequences lie behind one another, without padding: first the sequences that compute a single
token (decode rows, longest context first), then the others (prefill chunks). What attention needs depends
on a layer's sliding window only, so it is worked out once a step and window, not once a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.dense_rows import DenseRows, Shelved
from engine.runner import ScheduledSequence

Ints = npt.NDArray[np.int64]

TILE_TOKENS = 128
"""Query rows of a prefill chunk that are computed together: few enough for their scores to stay in a cache, and for
little to be computed that causality hides; enough for a matrix product to be fast."""
SAME_LENGTH_BLOCKS = 8
"""Contexts up to so many blocks are always padded to a common length."""
MIN_FILL = 0.75
"""A decode row joins a group if its context fills at least this share of the longest one's."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows of similar context length, `rows[0]`..`rows[1]` of the flattened batch.

    `blocks` `[n * width]`: block tables padded with block 0. `mask` `[n, 1, 1, width * block_size]`: 0 or
    -inf, None when every position counts. `stale` are positions of the gathered
    `[n * width * block_size]` keys that are not this sequence's: they are zeroed before use, because a mask
    adds to a score and would let a foreign NaN through.
    """

    rows: tuple[int, int]
    blocks: torch.Tensor
    mask: torch.Tensor | None
    stale: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DenseGroup:
    """Decode rows `rows[0]`..`rows[1]` whose KV lies in the rows of one shelf.

    `memory` `[num_layers, 2, n, num_kv_heads, capacity, head_dim]`; `order` `[n]`: 0, 1, ...; `places` `[n]`: where
    in its row each new token's KV goes; `mask` `[n, 1, 1, capacity]`: 0 or -inf, None when every position counts.
    """

    rows: tuple[int, int]
    memory: torch.Tensor
    order: torch.Tensor
    places: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries `query[0]`..`query[1]` of a chunk against its keys `keys[0]`..`keys[1]`.

    `mask` `[queries, masked keys]` is 0 or -inf, for the last keys; every query sees all keys before them.
    """

    query: tuple[int, int]
    keys: tuple[int, int]
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """New tokens of one sequence. `blocks` hold its keys so far; None: the new tokens are all there is."""

    rows: tuple[int, int]
    blocks: torch.Tensor | None
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Everything that a layer's attention computes in one step."""

    dense: tuple[DenseGroup, ...]
    decode: tuple[DecodeGroup, ...]
    prefill: tuple[PrefillChunk, ...]


@dataclass(slots=True)
class StepBatch:
    """The flattened batch. All index tensors are int64 on the model's device.

    `token_ids`, `positions` `[1, tokens]`; `slot_blocks`, `slot_offsets` `[tokens]`: where each token's KV
    goes; `sample_rows` `[samples]`: rows whose logits are wanted, and `sample_order` their sequences'
    indices in the batch as scheduled.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_blocks: torch.Tensor
    slot_offsets: torch.Tensor
    sample_rows: torch.Tensor
    sample_order: list[int]
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
    dense_rows: DenseRows | None = None,
) -> StepBatch:
    """Flattens scheduled sequences. `dtype` is the model's, for the masks.

    A decode group of several rows has at most `group_blocks` blocks, padding included; None: any number. What
    `dense_rows` has room for is in no decode group.
    """
    decode = [index for index, sequence in enumerate(batch) if sequence.num_new == 1]
    shelved = dense_rows.place(batch, decode) if dense_rows is not None else []
    dense = [index for shelf in shelved for index in shelf.members]
    rest = sorted(set(decode).difference(dense), key=lambda index: -batch[index].num_computed)
    order = [*dense, *rest, *(index for index, sequence in enumerate(batch) if sequence.num_new != 1)]
    sequences = [batch[index] for index in order]
    starts = np.cumsum([0, *(sequence.num_new for sequence in sequences)])
    tokens, positions, blocks = [], [], []
    for sequence in sequences:
        begin, end = sequence.num_computed, sequence.num_computed + sequence.num_new
        span = np.arange(begin, end)
        tokens.append(np.asarray(sequence.token_ids[begin:end], dtype=np.int64))
        positions.append(span)
        first = begin // block_size
        table = np.asarray(sequence.block_ids[first : (end - 1) // block_size + 1], dtype=np.int64)
        blocks.append(table[span // block_size - first])
    flat = np.concatenate(positions)
    sampled = [row for row, sequence in enumerate(sequences) if sequence.sample]

    def tensor(array: Any) -> torch.Tensor:
        return torch.as_tensor(np.asarray(array, dtype=np.int64), device=device)

    return StepBatch(
        token_ids=tensor(np.concatenate(tokens)).unsqueeze(0),
        positions=tensor(flat).unsqueeze(0),
        slot_blocks=tensor(np.concatenate(blocks)),
        slot_offsets=tensor(flat % block_size),
        sample_rows=tensor([starts[row + 1] - 1 for row in sampled]),
        sample_order=[order[row] for row in sampled],
        _planner=_Planner(
            sequences, starts, len(dense), len(decode), block_size, dtype, device, group_blocks, shelved
        ),
    )


@dataclass(frozen=True, slots=True)
class _Planner:
    sequences: list[ScheduledSequence]
    starts: Ints
    num_dense: int
    num_decode: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    group_blocks: int | None
    shelved: list[Shelved]

    def plan(self, window: int | None) -> AttentionPlan:
        groups = tuple(self._decode_group(first, last, window) for first, last in self._groups(window))
        chunks = range(self.num_decode, len(self.sequences))
        prefill = tuple(self._prefill(index, window) for index in chunks)
        return AttentionPlan(tuple(self._dense_groups(window)), groups, prefill)

    def _dense_groups(self, window: int | None) -> Iterator[DenseGroup]:
        end = 0
        for shelf in self.shelved:
            begin, end = end, end + len(shelf.members)
            places = np.array([sequence.num_computed for sequence in self.sequences[begin:end]])
            local, last = np.arange(shelf.memory.shape[4]), places[:, None]
            hidden = local > last
            if window is not None:
                hidden |= local <= last - window
            mask = self._mask(hidden)[:, None, None] if hidden.any() else None
            yield DenseGroup(
                (begin, end), shelf.memory, torch.arange(end - begin), torch.from_numpy(places), mask
            )

    def _groups(self, window: int | None) -> list[tuple[int, int]]:
        """Cuts the decode rows, sorted by length, where padding would waste too much."""
        groups: list[tuple[int, int]] = []
        begin, widest = self.num_dense, 0
        for row in range(begin, self.num_decode):
            width = self._blocks(row, window)[1]
            uneven = widest > SAME_LENGTH_BLOCKS and width < MIN_FILL * widest
            full = (
                self.group_blocks is not None and (row + 1 - begin) * max(width, widest) > self.group_blocks
            )
            if row > begin and (uneven or full):
                groups.append((begin, row))
                begin, widest = row, 0
            widest = max(widest, width)
        return [*groups, (begin, self.num_decode)] if self.num_decode > self.num_dense else []

    def _blocks(self, row: int, window: int | None) -> tuple[int, int]:
        """First block that any new token of a sequence may see, and how many from there to its end."""
        sequence = self.sequences[row]
        seen_from = 0 if window is None else max(0, sequence.num_computed + 1 - window)
        first = seen_from // self.block_size
        end = sequence.num_computed + sequence.num_new
        return first, -(-end // self.block_size) - first

    def _decode_group(self, begin: int, end: int, window: int | None) -> DecodeGroup:
        spans = [self._blocks(row, window) for row in range(begin, end)]
        width = max(count for _, count in spans)
        tables = np.zeros((end - begin, width), dtype=np.int64)
        low = np.zeros((end - begin, 1), dtype=np.int64)
        high = np.zeros((end - begin, 1), dtype=np.int64)
        for row, (first, count) in enumerate(spans):
            sequence = self.sequences[begin + row]
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
        sequence = self.sequences[row]
        begin, count = sequence.num_computed, sequence.num_new
        first, width = (0, 0) if begin == 0 else self._blocks(row, window)
        origin = first * self.block_size
        tiles = []
        for start in range(0, count, TILE_TOKENS):
            stop = min(start + TILE_TOKENS, count)
            query = np.arange(begin + start, begin + stop)[:, None]
            low = origin if window is None else max(origin, begin + start + 1 - window)
            # Without a window, all queries see what is before the tile.
            masked = np.arange(begin + start if window is None else low, begin + stop)
            hidden = masked > query
            if window is not None:
                hidden |= masked <= query - window
            tiles.append(Tile((start, stop), (low - origin, begin + stop - origin), self._mask(hidden)))
        blocks = None
        if begin:
            table = np.asarray(sequence.block_ids[first : first + width], dtype=np.int64)
            blocks = torch.from_numpy(table).to(self.device)
        return PrefillChunk((int(self.starts[row]), int(self.starts[row + 1])), blocks, tuple(tiles))

    def _mask(self, hidden: npt.NDArray[np.bool_]) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self.dtype)
        return mask.masked_fill_(torch.from_numpy(hidden), float("-inf")).to(self.device)
