"""What drafts may cost: never a due time, never the room that a prompt waits for, and little of an unpaced stream."""

from __future__ import annotations

import pytest

from engine.pacing.step_time_fit import PromptFit
from engine.pacing.token_clock import StreamPace, TokenClock
from engine.speculation.draft_lengths import NOTHING_OWED
from engine.speculation.draft_room import LEAST_SHARE, MAX_CREDIT, STEP_TIMES, DraftRoom, StreamAccount

STEP_S, TPOT_S = 0.01, 0.05
FIT = PromptFit(base_s=5e-3, token_s=1e-3, pair_s=0.0)


def pace(tokens: int, tpot_s: float = TPOT_S) -> StreamPace:
    return StreamPace(tpot_s, first_s=10.0, last_s=10.0, tokens=tokens)


def test_a_step_ends_before_the_first_due_time_also_where_it_takes_longer_than_predicted() -> None:
    clock, early, late = TokenClock(), pace(3), pace(1)
    room = DraftRoom(10.05, [early, late, None], clock, STEP_S)
    assert room.longest * STEP_S * STEP_TIMES == pytest.approx(clock.due_s(late) - 10.05)


def test_without_targets_a_step_may_take_any_time_and_before_it_is_measured_with_them_none() -> None:
    assert DraftRoom(10.0, [None, None], TokenClock(), 0.0).longest == float("inf")
    assert DraftRoom(10.0, [pace(50)], TokenClock(), 0.0).longest == 0


def test_a_target_that_decoding_alone_misses_bounds_nothing() -> None:
    room = DraftRoom(10.0, [pace(5, tpot_s=STEP_S / 2)], TokenClock(), STEP_S)
    assert room.longest == float("inf")
    (share,) = room.shares([StreamAccount(0.5)])
    assert share.least(1.2) == pytest.approx(1.2 * LEAST_SHARE - 0.5)


def test_over_its_life_a_stream_without_a_target_loses_no_more_than_its_share() -> None:
    account, tokens, plain_steps = StreamAccount(), 0, 0.0
    for turn in range(500):
        (share,) = DraftRoom(0.0, [None], TokenClock(), STEP_S).shares([account])
        ratio = 1.4 if share.least(1.4) <= 1 else 1.0
        got = 3 if turn % 50 == 49 else 1
        account.stepped(got, ratio)
        tokens, plain_steps = tokens + got, plain_steps + ratio
    assert LEAST_SHARE * plain_steps - 1e-6 <= tokens <= plain_steps + 50
    assert account.credit <= MAX_CREDIT


def test_with_a_target_nothing_is_owed_but_due_times() -> None:
    shares = DraftRoom(10.0, [pace(5), None], TokenClock(), STEP_S).shares([StreamAccount(), StreamAccount()])
    assert shares[0] == NOTHING_OWED
    assert shares[1].least(1.0) == LEAST_SHARE


def test_a_prompt_that_waits_is_left_the_room_that_it_would_have() -> None:
    clock, first, ahead = TokenClock(), pace(3), pace(5)
    assert not clock.grant(10.15, [first, ahead], STEP_S, FIT, remaining=500, context_tokens=0)
    assert clock.holds
    room = DraftRoom(10.15, [first, ahead], clock, STEP_S)
    bound, loose = room.shares([StreamAccount(), StreamAccount()])
    token_s = 0.95 * TPOT_S
    ratio = 1.5
    longer_s = (ratio - 1) * STEP_S
    assert bound.least(ratio) == pytest.approx(1 + longer_s / token_s), "what it takes longer, it must gain"
    assert loose.least(ratio) == pytest.approx(1 + longer_s / token_s - 2), "two tokens ahead"
    assert bound.least(1.0) <= 1
    clock.nothing_waits()
    assert DraftRoom(10.15, [first], clock, STEP_S).shares([StreamAccount()]) == [NOTHING_OWED]
