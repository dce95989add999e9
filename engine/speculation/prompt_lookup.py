"""Drafts by prompt lookup: what followed the last tokens when they occurred before, in the prompt or the output.

Answers that repeat what they read (summaries, edits, code) are guessed so without a second model.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

from engine.speculation.drafter import NO_DRAFT, Draft, Drafter, DraftRequest

MIN_MATCH = 2
"""Tokens that must have occurred before."""
MAX_MATCH = 16
"""Longer matches are not told apart."""
MAX_LOOKS = 16
"""Earlier places that are compared; the latest first."""
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
        """Takes what is new of a sequence. Its last token is taken once another one follows it."""
        latest, before, mask = self._latest, self._before, self._mask
        for end in range(len(before), len(token_ids) - 1):
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


class PromptLookup(Drafter):
    """A `SuffixIndex` for each sequence, made when it is first asked for."""

    def __init__(self) -> None:
        self._indexes: dict[Hashable, SuffixIndex] = {}

    def drafts(self, asked: Sequence[DraftRequest]) -> list[Draft]:
        """See `Drafter.drafts`. The support of a draft is the class of its match's length, 0..3."""
        return [self._draft(request) for request in asked]

    def forget(self, key: Hashable) -> None:
        """See `Drafter.forget`."""
        self._indexes.pop(key, None)

    def _draft(self, request: DraftRequest) -> Draft:
        tokens = request.token_ids
        index = self._indexes.get(request.key)
        if index is None:
            index = self._indexes[request.key] = SuffixIndex(2 * len(tokens))
        index.extend(tokens)
        follows, length = index.find(tokens)
        if not length:
            return NO_DRAFT
        # Where the match runs into the end of the sequence, what was guessed is what goes on: a text in a loop.
        period = len(tokens) - follows
        draft = [tokens[follows + place % period] for place in range(request.most)]
        return Draft(draft, min(length.bit_length() - 2, 3) if length > MIN_MATCH else 0)


def _pair(token_ids: Sequence[int], end: int) -> int:
    """A hash of the tokens at `end - 1` and `end`."""
    mixed = (token_ids[end - 1] * 0x9E3779B1 ^ token_ids[end] * 0x85EBCA6B) & 0xFFFFFFFF
    return mixed ^ mixed >> 15
