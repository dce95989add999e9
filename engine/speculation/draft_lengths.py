"""How many drafted tokens a step checks: a pure policy over chances, times of steps, and what streams are owed.

A step over n rows takes t(n). Checking m drafted tokens beside one row for each of B sequences takes
r = t(B + m) / t(B) plain steps, and is expected to give B + E tokens, where E adds up the chances that a drafted token
and all before it are right. Chosen is what gives most tokens a second, (B + E) / (B r): the goodput of Liu et al.,
"Optimizing Speculative Decoding for Serving Large Language Models Using Goodput" (2024). A token counts the same
whoever gets it; bounds on r, and on what each stream must be expected to get, keep one from paying for another.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from engine.speculation.row_costs import RowCosts

MAX_DRAFT = 7
"""Most tokens of one draft: with the row before them they fill the eight rows up to which reading weights dominates."""
MAX_SEQUENCES = 8
"""In larger batches nothing is drafted: arithmetic bounds their steps already."""
MAX_ROWS = 16
"""Most rows of a step with drafts."""
LEAST_GAIN = 1.05
"""Tokens a second, over those without drafts, that a step with drafts must be expected to give."""
PROBE_EVERY = 48
"""After so many steps whose drafts were left out, one token of a draft is checked all the same, to measure anew."""
PROBE_COST = 1.2
"""As seldom in proportion where that makes the step longer than this multiple."""


class Share(NamedTuple):
    """What a stream is owed of a step that takes as long as r plain ones: r `tokens` less its `credit`, in tokens."""

    tokens: float
    credit: float

    def least(self, ratio: float) -> float:
        """The tokens that it must be expected to get of a step that takes as long as `ratio` plain ones."""
        return self.tokens * ratio - self.credit


NOTHING_OWED = Share(0.0, 0.0)


class DraftLengths(NamedTuple):
    """Tokens for each sequence, and the tokens a second that they are expected to give, in those without drafts."""

    gain: float
    lengths: list[int]


NO_LENGTHS = DraftLengths(1.0, [])


def choose_lengths(
    chances: Sequence[Sequence[float]],
    shares: Sequence[Share],
    costs: RowCosts,
    max_rows: int,
    longest: float = math.inf,
) -> list[int]:
    """How many tokens of each sequence's draft to check in a step over all of them.

    `chances`: of each drafted token, that it and all before it are right. `longest`: most plain steps that the step may
    take. For each number of rows the sequences that are owed tokens have theirs first, and the likeliest of all take
    the rest: no other choice of as many rows gives more, because chances only fall along a draft.
    """
    return _best(chances, shares, costs, max_rows, longest, 0.0).lengths


def choose_guesses(
    chances: Sequence[Sequence[float]],
    shares: Sequence[Share],
    costs: RowCosts,
    max_rows: int,
    longest: float,
    guess_cost: float,
) -> DraftLengths:
    """How many tokens to guess for each sequence, where that takes time itself: `guess_cost` plain steps for the first
    token of all drafts, as many for the second, and so on. Otherwise as `choose_lengths`, with expected chances."""
    found = NO_LENGTHS
    for most in range(1, max(map(len, chances), default=0) + 1):
        cut = [each[:most] for each in chances]
        best = _best(cut, shares, costs, max_rows, longest, most * guess_cost)
        if best.gain > found.gain:
            found = best
    return found if found.lengths else DraftLengths(1.0, [0] * len(chances))


def _best(
    chances: Sequence[Sequence[float]],
    shares: Sequence[Share],
    costs: RowCosts,
    max_rows: int,
    longest: float,
    before: float,
) -> DraftLengths:
    """The best lengths of a step before which `before` plain steps pass; none where that does not pay."""
    batch = len(chances)
    ranked = sorted(
        ((chance, -place, index) for index, each in enumerate(chances) for place, chance in enumerate(each)),
        reverse=True,
    )
    most = [0.0, *accumulate(chance for chance, _, _ in ranked)]
    expected = [[*accumulate(each, initial=1.0)] for each in chances]
    best, chosen = LEAST_GAIN, [0] * batch
    for count in range(1, min(len(ranked), max_rows - batch) + 1):
        ratio = costs.ratio(batch, count) + before
        if ratio > longest or (batch + most[count]) / batch <= best * ratio:
            continue
        least = [bisect_left(each, share.least(ratio)) for each, share in zip(expected, shares, strict=True)]
        left = count - sum(least)
        if left < 0 or any(length == len(each) for length, each in zip(least, expected, strict=True)):
            continue
        lengths = _filled(least, ranked, left)
        gain = sum(each[length] for length, each in zip(lengths, expected, strict=True)) / batch / ratio
        if gain > best:
            best, chosen = gain, lengths
    return DraftLengths(best if any(chosen) else 1.0, chosen)


def _filled(least: list[int], ranked: Sequence[tuple[float, int, int]], left: int) -> list[int]:
    """Lengths with the `left` likeliest tokens beyond the `least` ones."""
    lengths = least.copy()
    for _, place, index in ranked:
        if not left:
            break
        if -place >= least[index]:
            lengths[index] += 1
            left -= 1
    return lengths


def may_pay(batch: int, costs: RowCosts, max_rows: int, guess_cost: float = 0.0) -> bool:
    """Whether any draft could pay for its rows beside so many sequences, were it right. `guess_cost`: as in
    `choose_guesses`."""
    return any(
        (batch + count) / batch
        > LEAST_GAIN * (costs.ratio(batch, count) + guess_cost * math.ceil(count / batch))
        for count in range(1, min(max_rows - batch, batch * MAX_DRAFT) + 1)
    )
