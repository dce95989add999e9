"""The place that an answer copies from, kept through what the answer changes on the way."""

from __future__ import annotations

from collections.abc import Sequence

NOWHERE = -1
SURE_TOKENS = 4
"""A place is sure once so many tokens in a row came from it. Only then it outlives a change, and a shorter match
somewhere else."""
_WINDOW = 8
"""Tokens before and after the expected one among which one that came instead of it is looked for."""
_MAX_UNSURE = 16
"""A place is given up after so many tokens, from a change on, that did not make it sure again."""


class CopiedPlace:
    """Follows a sequence that repeats an earlier part of itself, with tokens left out, put in or replaced.

    A token that is not the expected one is looked for near the place: after it, where the answer leaves tokens out;
    before it, at those taken for replaced, where it put some in. Near the place one token says as much as several
    do anywhere else. One that is not found counts as a replacement of one token, the likeliest change.
    """

    def __init__(self) -> None:
        self.follows = NOWHERE
        """The index of the token that is expected next."""
        self.matched = 0
        """Tokens in a row, up to the last one, that were the expected ones."""
        self.strays = 0
        """Tokens in a row, up to the last one, that were not found."""
        self._sure = False
        self._unsure = 0
        """Tokens since the last one of so many in a row that the place was sure by them."""
        self._read = 0

    def move(self, follows: int, matched: int, read: int) -> None:
        """Goes to another place, of which so many tokens match the end of a sequence of `read` tokens."""
        self.follows, self.matched, self._read = follows, matched, read
        self.strays, self._sure, self._unsure = 0, matched >= SURE_TOKENS, 0

    def follow(self, token_ids: Sequence[int]) -> None:
        """Takes the tokens that a sequence has got since the last time."""
        if self.follows != NOWHERE:
            for index in range(self._read, len(token_ids)):
                self._take(token_ids, index)
        self._read = len(token_ids)

    def _take(self, token_ids: Sequence[int], index: int) -> None:
        expected = self.follows
        if expected == NOWHERE:
            return
        self._unsure += 1
        if token_ids[expected] == token_ids[index]:
            self.follows, self.matched, self.strays = expected + 1, self.matched + 1, 0
            if self.matched >= SURE_TOKENS:
                self._sure, self._unsure = True, 0
            return
        found = self._near(token_ids, index) if self._sure else NOWHERE
        if found != NOWHERE:
            self.follows, self.matched, self.strays = found + 1, 1, 0
        else:
            self.follows, self.matched, self.strays = expected + 1, 0, self.strays + 1
        if not self._sure or self._unsure > _MAX_UNSURE:
            self.follows = NOWHERE

    def _near(self, token_ids: Sequence[int], index: int) -> int:
        """The nearest place of the token at `index`; before the expected one only as far as tokens were replaced."""
        token, expected = token_ids[index], self.follows
        for distance in range(1, _WINDOW + 1):
            if expected + distance < index and token_ids[expected + distance] == token:
                return expected + distance
            if distance <= self.strays and token_ids[expected - distance] == token:
                return expected - distance
        return NOWHERE
