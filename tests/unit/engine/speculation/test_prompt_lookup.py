"""Lookup finds what a search through the whole sequence finds."""

from __future__ import annotations

import random

import pytest

from engine.speculation.drafter import NO_DRAFT, Draft, DraftRequest
from engine.speculation.prompt_lookup import MAX_LOOKS, MAX_MATCH, MIN_MATCH, PromptLookup, SuffixIndex


def lookup(tokens: list[int], most: int = 4) -> Draft:
    return PromptLookup().drafts([DraftRequest("a", tokens, most)])[0]


def match_length(tokens: list[int], end: int) -> int:
    length = 0
    while length <= min(end, MAX_MATCH - 1) and tokens[end - length] == tokens[-1 - length]:
        length += 1
    return length


@pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 2], [1, 2, 3, 4], [5, 1, 6, 1]])
def test_no_guess_without_a_pair_that_was_there_before(tokens: list[int]) -> None:
    assert lookup(tokens) == NO_DRAFT


def test_what_followed_the_last_tokens_before() -> None:
    assert lookup([1, 2, 3, 4, 5, 9, 1, 2]) == Draft([3, 4, 5, 9], 0)


def test_the_longest_match_goes_before_a_later_one() -> None:
    draft = lookup([7, 1, 2, 3, 50, 8, 2, 3, 60, 7, 1, 2, 3], most=1)
    assert draft.token_ids == [50]


def test_of_equal_matches_the_latest_counts() -> None:
    assert lookup([1, 2, 50, 1, 2, 60, 1, 2], most=1).token_ids == [60]


def test_a_text_in_a_loop_goes_on_in_it() -> None:
    assert lookup([9, 1, 2, 3, 1, 2, 3, 1, 2], most=7).token_ids == [3, 1, 2, 3, 1, 2, 3]


def test_longer_matches_have_more_support() -> None:
    supports = []
    for length in (2, 3, 4, 8, 16):
        part = list(range(length))
        supports.append(lookup([*part, 99, *part]).support)
    assert supports == sorted(supports)
    assert supports[0] == 0
    assert supports[-1] == 3


@pytest.mark.parametrize("seed", range(30))
def test_it_finds_what_a_search_finds(seed: int) -> None:
    pick = random.Random(seed)
    tokens = [pick.randrange(2 + seed // 3) for _ in range(300)]
    index = SuffixIndex(8)
    for end in range(1, 300):
        part = tokens[:end]
        index.extend(part)
        follows, length = index.find(part)
        ends = [place for place in range(end - 1) if match_length(part, place) >= MIN_MATCH]
        if not ends:
            assert (follows, length) == (0, 0)
        elif len(ends) <= MAX_LOOKS // 2:  # hashes may share a chain
            longest = max(match_length(part, place) for place in ends)
            assert length == longest
            assert follows - 1 == max(place for place in ends if match_length(part, place) == longest)
        else:
            assert match_length(part, follows - 1) == length >= MIN_MATCH


def test_an_ended_sequence_leaves_nothing() -> None:
    drafter = PromptLookup()
    drafter.drafts([DraftRequest("a", [1, 2, 3], 2)])
    drafter.forget("a")
    drafter.forget("a")
    assert not drafter._sources
