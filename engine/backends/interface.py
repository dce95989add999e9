"""The interface of backends: `Forward`, from scheduled sequences to `StepLogits`; and a step flattened on the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.core.types import ScheduledSequence
from splitserve.generation.kv_blocks import blocks_for

Ints = npt.NDArray[np.int64]
ALIGNED = 2
"""Each array begins at a multiple of this many numbers (16 bytes): Triton compiles kernels anew for any other."""
NOWHERE = -1
"""The slot of a padded row: its KV is not written, so no block is needed for it."""


class StepLogits(NamedTuple):
    """The logits that a step samples from. On a GPU they may still be being computed; valid until the next step.

    `values` `[samples, vocabulary]`; `order`: the sampled sequences' indices in the batch, one per row; `argmax` waits
    for the token of each row's largest logit, -1 where that is not finite (see `sampler.sample`). None if the backend
    does not compute it.
    """

    values: torch.Tensor
    order: list[int]
    argmax: Callable[[], list[int]] | None = None


class Forward(ABC):
    """Runs the model on scheduled sequences."""

    speedup: float = 1.0
    """How many times as much compute as this worker's own the last step had: neighbours may have lent cores."""

    @abstractmethod
    def logits(self, batch: Sequence[ScheduledSequence]) -> StepLogits:
        """Writes the new positions' KV; returns the logits of the sampled ones. May return before both are done."""

    def finish(self) -> None:
        """Waits until the step is computed. After that peers may read the KV written and overwrite the KV read."""
        return

    def rest(self) -> None:
        """There is nothing to do until the next `logits`."""
        return

    def close(self) -> None:
        """Gives back what is not memory."""
        return

    def poll_while_computing(self, poll: Callable[[], None]) -> None:
        """`poll` is to be called again and again while a device is waited for; ignored where nothing waits for one."""
        return


@dataclass(frozen=True, slots=True)
class FlatStep:
    """A step on the host, sequences that compute one token first. All arrays are int64.

    `token_ids`, `positions`, `slots` `[tokens]`: a slot is block * block_size + offset; `contexts` `[sequences]`: each
    sequence's keys after this step, 0 for a padded row; `query_starts` `[sequences + 1]`: index of its first token;
    `table_starts` `[sequences]`: index of its block table in `tables`; `sample_rows` `[samples]`: tokens whose logits
    are sampled, and `sample_order` their sequences' indices in the batch as scheduled.
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
        """A decode-only step extended to `rows` rows; the new ones read no KV and write none."""
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
    """Flattens a batch. `block_size` is in tokens."""
    order = [index for index, sequence in enumerate(batch) if sequence.num_new == 1]
    num_decode = len(order)
    order += [index for index, sequence in enumerate(batch) if sequence.num_new != 1]
    sequences = [batch[index] for index in order]
    computed = np.fromiter((s.num_computed for s in sequences), np.int64, len(order))
    counts = np.fromiter((s.num_new for s in sequences), np.int64, len(order))
    contexts = computed + counts
    query_starts = _starts(counts)
    widths = blocks_for(contexts, block_size)
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
    """A step without sequences, to be padded: its rows touch no KV. `tables` has an entry, and so an address."""
    empty, one = np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
    return FlatStep(empty, empty, empty, empty, one, empty, one, empty, [], 0, 0, 0)


def _starts(sizes: Ints) -> Ints:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
