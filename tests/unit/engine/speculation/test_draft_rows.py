"""Drafts as rows: where they lie, in which order they are sampled, and what ends one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.core.model_runner import batch_index, draft_rows, sample_in_order
from engine.core.types import RowsFailedError, SampledToken, SamplingParams, ScheduledSequence

SAMPLING = SamplingParams(temperature=0.0)


def sequence(
    name: str, tokens: list[int], draft: tuple[int, ...] = (), sample: bool = True
) -> ScheduledSequence:
    return ScheduledSequence(
        name, tokens, 1, len(tokens) - 1, 1, [0, 1], sample, SAMPLING, table_id=7, draft=draft
    )


BATCH = [
    sequence("a", [5, 6], (7, 8, 9)),
    sequence("b", [5]),
    sequence("c", [4], sample=False),
    sequence("d", [3], (1,)),
]
ROWS = draft_rows(BATCH)
TOKENS = {0: 7, 1: 8, 2: 50, 3: 51, 4: 60, 6: 1, 7: 2}
"""What each row gives: the first draft is right twice, the second once."""


def sampled(wanted: list[int], failing: Sequence[int] = ()) -> list[SampledToken]:
    if bad := tuple(row for row in wanted if row in failing):
        raise RowsFailedError("broken", bad)
    return [SampledToken(TOKENS[row]) for row in wanted]


def tokens_of(results: list[SampledToken | None]) -> list[list[int] | None]:
    return [one and [one.token_id, *(each.token_id for each in one.following)] for one in results]


def test_a_batch_without_drafts_is_left_as_it_is() -> None:
    batch = [sequence("a", [1, 2]), sequence("b", [3])]
    assert draft_rows(batch) is batch


def test_rows_follow_their_sequence_over_its_blocks() -> None:
    assert [(row.request_id, row.num_computed, row.ahead) for row in ROWS] == [
        *(
            ("a", 1, 0),
            ("a", 2, 1),
            ("a", 3, 2),
            ("a", 4, 3),
            ("b", 0, 0),
            ("c", 0, 0),
            ("d", 0, 0),
            ("d", 1, 1),
        ),
    ]
    assert [row.token_ids[row.num_computed] for row in ROWS] == [6, 7, 8, 9, 5, 4, 3, 1]
    assert all(row.num_new == 1 and row.block_ids == [0, 1] and row.table_id == 7 for row in ROWS)
    assert ROWS[0].token_ids is BATCH[0].token_ids, "by its identity backends know a sequence"
    assert [batch_index(ROWS, row) for row in range(len(ROWS))] == [0, 0, 0, 0, 1, 2, 3, 3]


def test_rows_are_sampled_up_to_the_first_that_is_not_the_draft_s() -> None:
    asked: list[list[int]] = []

    def sample(wanted: list[int]) -> list[SampledToken]:
        asked.append(wanted)
        return sampled(wanted)

    assert tokens_of(sample_in_order(ROWS, (), sample)) == [[7, 8, 50], [60], None, [1, 2]]
    assert asked == [[0, 4, 6], [1, 7], [2]]


def test_a_row_of_a_draft_that_fails_ends_the_draft() -> None:
    found = sample_in_order(ROWS, (), lambda wanted: sampled(wanted, failing=[1]))
    assert tokens_of(found) == [[7], [60], None, [1, 2]]


def test_a_sequence_s_own_row_that_fails_is_an_error() -> None:
    with pytest.raises(RowsFailedError) as failure:
        sample_in_order(ROWS, (), lambda wanted: sampled(wanted, failing=[4, 1]))
    assert failure.value.rows == (4,)


def test_a_draft_ends_where_its_grammar_has_no_mask() -> None:
    rows = [row._replace(matcher=object()) for row in ROWS]  # type: ignore[arg-type]
    assert tokens_of(sample_in_order(rows, {1, 7}, sampled)) == [[7, 8], [60], None, [1, 2]]
