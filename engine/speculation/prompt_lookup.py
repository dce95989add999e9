"""Drafts by prompt lookup: what followed the last tokens when they occurred before, in the prompt or the output.

Answers that repeat what they read (summaries, edits, code) are guessed so without a second model.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from engine.speculation.copied_place import NOWHERE, SURE_TOKENS, CopiedPlace
from engine.speculation.drafter import NO_DRAFT, Draft, Drafter, DraftRequest

MIN_MATCH = 2
"""Tokens that must have occurred before."""
MAX_MATCH = 16
"""Longer matches are not told apart."""
MAX_LOOKS = 16
"""Earlier places that are compared; the latest first."""
MAX_INDEXED = 1024
"""Tokens that are indexed in a step, of each sequence: the index of a long prompt is made in several."""
_AFTER_CHANGE = 4
"""Support where the answer has come back to its source with a token or a few."""
_MIN_BITS, _MAX_BITS = 10, 16
_NONE = -1


class SuffixIndex:
    """Where pairs of tokens occurred: chains of hashed positions, as in LZ77 (RFC 1951, section 4).

    Adding a token and a lookup cost O(1). Memory: 4 bytes a token and 4 bytes for each of 2^10 to 2^16 chains.
    """

    def __init__(self, expected_tokens: int) -> None:
        bits = min(max(expected_tokens.bit_length(), _MIN_BITS), _MAX_BITS)
        self._mask = (1 << bits) - 1
        self._latest = array("i", [_NONE]) * (1 << bits)
        self._before = array("i")
        """Of each position, the one before it in its chain. Chains hold positions that were followed by a token."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Takes what is new of a sequence, `MAX_INDEXED` at most. Its last token is taken once another follows it."""
        latest, before, mask = self._latest, self._before, self._mask
        for end in range(len(before), min(len(token_ids) - 1, len(before) + MAX_INDEXED)):
            chain = _pair(token_ids, end) & mask if end else 0
            before.append(latest[chain] if end else _NONE)
            if end:
                latest[chain] = end

    def find(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """The place of the longest match of the sequence's end, of equal ones the latest.

        Returns the index of the token that followed, and how many tokens match; (0, 0) if fewer than `MIN_MATCH` do.
        """
        last = len(token_ids) - 1
        best = follows = 0
        if last < MIN_MATCH:
            return 0, 0
        end = self._latest[_pair(token_ids, last) & self._mask]
        for _ in range(MAX_LOOKS):
            if end == _NONE:
                break
            length = 0
            while length <= min(end, MAX_MATCH - 1) and token_ids[end - length] == token_ids[last - length]:
                length += 1
            if length > best:
                best, follows = length, end + 1
                if best == MAX_MATCH:
                    break
            end = self._before[end]
        return (follows, best) if best >= MIN_MATCH else (0, 0)


class _Source(NamedTuple):
    """What is kept of a sequence: what it may copy from, and where it does so now."""

    suffixes: SuffixIndex
    place: CopiedPlace


class PromptLookup(Drafter):
    """A `SuffixIndex` and a `CopiedPlace` for each sequence, made when it is first asked for."""

    def __init__(self) -> None:
        self._sources: dict[Hashable, _Source] = {}

    def drafts(self, asked: Sequence[DraftRequest]) -> list[Draft]:
        """See `Drafter.drafts`. A draft's support is the class of its match's length, 0 to 3, or 4: it comes after a
        change."""
        return [self._draft(request) for request in asked]

    def forget(self, key: Hashable) -> None:
        """See `Drafter.forget`."""
        self._sources.pop(key, None)

    def _draft(self, request: DraftRequest) -> Draft:
        tokens = request.token_ids
        source = self._sources.get(request.key)
        if source is None:
            source = self._sources[request.key] = _Source(SuffixIndex(2 * len(tokens)), CopiedPlace())
        suffixes, place = source
        suffixes.extend(tokens)
        place.follow(tokens)
        if place.matched < SURE_TOKENS:
            follows, length = suffixes.find(tokens)
            if length >= SURE_TOKENS:
                place.move(follows, length, len(tokens))
            elif length:
                return Draft(_copied(tokens, follows, request.most), length - MIN_MATCH)
        if place.follows == NOWHERE or place.strays:  # within a change a guess is hardly ever right
            return NO_DRAFT
        return Draft(_copied(tokens, place.follows, request.most), _support(place))


def _copied(tokens: Sequence[int], follows: int, count: int) -> list[int]:
    """The tokens from `follows` on. Where they run into the end of the sequence, what is guessed is what goes on: a
    text in a loop."""
    period = len(tokens) - follows
    return [tokens[follows + ahead % period] for ahead in range(count)]


def _support(place: CopiedPlace) -> int:
    if place.matched < SURE_TOKENS:
        return _AFTER_CHANGE
    return 2 if place.matched < 2 * SURE_TOKENS else 3


def _pair(token_ids: Sequence[int], end: int) -> int:
    """A hash of the tokens at `end - 1` and `end`."""
    mixed = (token_ids[end - 1] * 0x9E3779B1 ^ token_ids[end] * 0x85EBCA6B) & 0xFFFFFFFF
    return mixed ^ mixed >> 15
