"""The second turn of a conversation in `bench.kv_tiers`: its arithmetic, and what it asks of workers."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from bench.asking import AskedAnswer
from bench.kv_tiers.second_turn import (
    ANSWER_TOKENS,
    BLOCK,
    TAIL_TOKENS,
    Conversation,
    SecondTurn,
    fill_pools,
    pool_blocks,
    row_of,
)

HISTORY = 320
TOKEN_S = 0.001


class OneWorker:
    """Keeps as many blocks as a pool, of the prompts that came last, and takes 1 ms for each token that it lacks."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._kept: dict[tuple[int, ...], None] = {}

    async def ask(self, prompt: Sequence[int], max_tokens: int) -> AskedAnswer:
        answer = tuple(range(max_tokens))
        names = [tuple(prompt[: end + BLOCK]) for end in range(0, len(prompt) - BLOCK + 1, BLOCK)]
        found = next((number for number, name in enumerate(names) if name not in self._kept), len(names))
        for name in names:
            self._kept.pop(name, None)
            self._kept[name] = None
        while len(self._kept) > self._blocks:
            del self._kept[next(iter(self._kept))]
        ttft_s = (len(prompt) - found * BLOCK) * TOKEN_S
        return AskedAnswer("", (ttft_s,), token_ids=answer, cached_tokens=found * BLOCK)


async def test_a_second_turn_is_the_history_and_a_new_end_beside_a_prompt_as_long() -> None:
    worker, dice = OneWorker(pool_blocks(HISTORY)), random.Random(1)
    conversation = Conversation(worker.ask, dice, HISTORY)
    await conversation.first_turn()
    turn = await conversation.second_turn("pool")
    assert turn.cached_tokens == HISTORY - ANSWER_TOKENS, (
        "what was answered is not among the worker's prompts"
    )
    assert turn.ttft_s == pytest.approx((ANSWER_TOKENS + TAIL_TOKENS) * TOKEN_S)
    assert turn.computed_s == pytest.approx((HISTORY + TAIL_TOKENS) * TOKEN_S)
    row = row_of("pool", HISTORY, [turn])
    assert (row.found, row.of_computed, row.holds) == (0.9, 0.143, True)


async def test_other_prompts_leave_nothing_of_a_conversation_in_the_pool() -> None:
    worker, dice = OneWorker(pool_blocks(HISTORY)), random.Random(1)
    conversation = Conversation(worker.ask, dice, HISTORY)
    await conversation.first_turn()
    await fill_pools(worker.ask, dice, HISTORY)
    turn = await conversation.second_turn("host")
    assert turn.cached_tokens == 0
    assert not row_of("host", HISTORY, [turn]).holds


@pytest.mark.parametrize(
    ("ttft_s", "cached_tokens", "holds"),
    [(0.24, 2000, True), (0.26, 2000, False), (0.1, 1952, True), (0.1, 1951, False)],
)
def test_a_row_holds_within_the_bar_where_all_of_the_history_was_found(
    ttft_s: float, cached_tokens: int, holds: bool
) -> None:
    assert row_of("disk", 2000, [SecondTurn("disk", ttft_s, 1.0, cached_tokens)]).holds is holds


def test_a_row_has_medians_and_the_least_that_was_found() -> None:
    turns = [
        SecondTurn("host", t, c, n) for t, c, n in ((0.1, 1.0, 1990), (0.3, 1.5, 2000), (0.2, 4.0, 1984))
    ]
    row = row_of("host", 2000, turns)
    assert (row.conversations, row.found) == (3, 0.992)
    assert (row.ttft_ms, row.computed_ttft_ms, row.of_computed) == (200.0, 1500.0, 0.1)
