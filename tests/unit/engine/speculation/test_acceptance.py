"""How often drafts are right is learned and unlearned, of their first tokens and of what follows."""

from __future__ import annotations

from itertools import pairwise

import pytest

from engine.speculation.acceptance import Acceptance, SequenceAcceptance


def test_acceptance_is_learned_and_unlearned() -> None:
    rates = SequenceAcceptance(Acceptance())
    for _ in range(30):
        rates.record(3, 4, 0)
    assert rates.chances(3, 1)[0] < 0.1
    assert SequenceAcceptance(rates.everywhere).chances(3, 1)[0] < 0.3, (
        "a new sequence begins where others are"
    )
    for _ in range(30):
        rates.record(3, 4, 4)
    assert rates.chances(3, 4)[3] > 0.8


def test_a_first_token_that_is_often_wrong_says_nothing_of_those_behind_it() -> None:
    rates = SequenceAcceptance(Acceptance())
    for turn in range(60):
        rates.record(4, 7, 7 if turn % 2 else 0)
    chances = rates.chances(4, 7)
    assert chances[0] == pytest.approx(0.5, abs=0.15)
    assert chances[6] / chances[0] > 0.7


def test_a_draft_of_one_token_is_no_trial_of_further_ones() -> None:
    tried, fresh = SequenceAcceptance(Acceptance()), SequenceAcceptance(Acceptance())
    tried.record(2, 1, 1)
    assert tried.chances(2, 2)[1] / tried.chances(2, 2)[0] == pytest.approx(
        fresh.chances(2, 2)[1] / fresh.chances(2, 2)[0]
    )


def test_chances_fall_along_a_draft() -> None:
    chances = SequenceAcceptance(Acceptance()).chances(1, 7)
    assert len(chances) == 7
    assert all(0 < later <= before <= 1 for before, later in pairwise(chances))
