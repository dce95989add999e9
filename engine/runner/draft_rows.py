"""Drafts as rows of a step: each drafted token is a row of one token behind its sequence's own, over the same blocks.

A row attends to those before it, whose KV the same step writes. So its logits are those of a step of its own, provided
that the drafted tokens are the ones sampled; otherwise nobody looks at them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace

from engine.core.types import RowsFailedError, SampledToken, ScheduledSequence

SampleRows = Callable[[list[int]], Sequence[SampledToken]]
"""Samples the tokens of these rows."""


def draft_rows(batch: Sequence[ScheduledSequence]) -> Sequence[ScheduledSequence]:
    """The batch with a row for each drafted token, those of a sequence in order and directly behind it."""
    if not any(sequence.draft for sequence in batch):
        return batch
    rows: list[ScheduledSequence] = []
    for sequence in batch:
        rows.append(sequence._replace(draft=()) if sequence.draft else sequence)
        if not sequence.draft:
            continue
        token_ids = [*sequence.token_ids, *sequence.draft]
        for ahead in range(1, len(sequence.draft) + 1):
            computed = sequence.num_computed + ahead
            rows.append(rows[-1]._replace(token_ids=token_ids, num_computed=computed, ahead=ahead))
    return rows


def sample_in_order(
    rows: Sequence[ScheduledSequence], masks: Container[int], sample: SampleRows
) -> list[SampledToken | None]:
    """Samples the rows of sequences, then those of drafts for as long as the token before was the drafted one.

    Returns one entry for each sequence, None where nothing is sampled. What `sample` raises for sequences propagates. A
    draft's row that fails, or has a grammar and no mask, ends the draft: the sequence's own row fails next time.
    """
    first_rows = [index for index, row in enumerate(rows) if not row.ahead]
    tokens: dict[int, list[SampledToken]] = {}
    going = [(index, index) for index in first_rows if rows[index].sample]
    while going:
        try:
            sampled = sample([row for _, row in going])
        except RowsFailedError as error:
            if not rows[going[0][1]].ahead:
                raise
            going = [each for each in going if each[1] not in error.rows]
            continue
        further = []
        for (first, row), token in zip(going, sampled, strict=True):
            tokens.setdefault(first, []).append(token)
            behind = rows[row + 1] if row + 1 < len(rows) else None
            if behind is None or not behind.ahead or (behind.matcher is not None and row + 1 not in masks):
                continue
            if behind.token_ids[behind.num_computed] == token.token_id:
                further.append((first, row + 1))
        going = further
    return [_joined(tokens[index]) if index in tokens else None for index in first_rows]


def batch_index(rows: Sequence[ScheduledSequence], row: int) -> int:
    """The index, in the batch, of the sequence that a row is of."""
    return sum(1 for each in rows[: row + 1] if not each.ahead) - 1


def _joined(tokens: list[SampledToken]) -> SampledToken:
    return tokens[0] if len(tokens) == 1 else replace(tokens[0], following=tuple(tokens[1:]))
