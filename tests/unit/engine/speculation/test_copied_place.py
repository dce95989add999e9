"""A place outlives what the answer changes of its source."""

from __future__ import annotations

import random

import pytest

from engine.speculation.copied_place import NOWHERE, CopiedPlace

SOURCE = list(range(100, 140))
COPIED = 10
"""Tokens of the source that the answer has when it begins to change some."""


def after(*answer: int) -> tuple[CopiedPlace, list[int]]:
    """The place after an answer that goes on like this where it has copied `COPIED` tokens."""
    tokens = [*SOURCE, 1, *SOURCE[:COPIED]]
    place = CopiedPlace()
    place.move(COPIED, COPIED, len(tokens))
    tokens += answer
    place.follow(tokens)
    return place, tokens


def expected(place: CopiedPlace, tokens: list[int]) -> int:
    return tokens[place.follows]


def test_it_goes_on_with_what_is_copied() -> None:
    place, tokens = after(110, 111, 112)
    assert expected(place, tokens) == 113
    assert (place.matched, place.strays) == (13, 0)


def test_a_token_that_is_not_found_counts_as_a_replacement() -> None:
    place, tokens = after(7)
    assert expected(place, tokens) == 111
    assert place.strays == 1


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param((7, 111), id="one-replaced"),
        pytest.param((7, 8, 112), id="two-replaced"),
        pytest.param((7, 112), id="two-replaced-by-one"),
        pytest.param((7, 8, 111), id="one-replaced-by-two"),
        pytest.param((7, 110), id="one-put-in"),
        pytest.param((7, 8, 9, 110), id="three-put-in"),
        pytest.param((111,), id="one-left-out"),
        pytest.param((115,), id="five-left-out"),
    ],
)
def test_it_comes_back_after_a_change(answer: tuple[int, ...]) -> None:
    place, tokens = after(*answer)
    assert expected(place, tokens) == answer[-1] + 1
    assert (place.matched, place.strays) == (1, 0)


def test_it_is_given_up_where_nothing_comes_back() -> None:
    place, _ = after(*range(40))
    assert place.follows == NOWHERE


def test_single_tokens_that_are_found_by_chance_do_not_keep_it_for_ever() -> None:
    place, _ = after(*(token for number in range(0, 30, 3) for token in (number, 112 + number)))
    assert place.follows == NOWHERE


def test_a_place_of_few_tokens_ends_at_the_first_other_one() -> None:
    tokens = [*SOURCE, 1, *SOURCE[:2]]
    place = CopiedPlace()
    place.move(2, 2, len(tokens))
    place.follow([*tokens, 104])
    assert place.follows == NOWHERE


@pytest.mark.parametrize("seed", range(20))
def test_it_always_lies_within_the_sequence(seed: int) -> None:
    pick = random.Random(seed)
    tokens = [pick.randrange(4) for _ in range(12)]
    place = CopiedPlace()
    place.move(pick.randrange(1, 12), pick.choice([2, 8]), len(tokens))
    for _ in range(60):
        tokens += [pick.randrange(4) for _ in range(pick.randrange(4))]
        place.follow(tokens)
        assert place.follows == NOWHERE or 0 <= place.follows < len(tokens)
