"""An answer to a golden prompt, and how far another one is from it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

LEAST_PROBABILITY = 1e-6
"""Smaller probabilities count as this one: at the ends of float32's logits their ratios mean nothing."""
MOST_NATS = -math.log(LEAST_PROBABILITY)
"""The largest divergence that there is, therefore; also that of an answer without finite numbers."""


@dataclass(frozen=True, slots=True)
class GoldenToken:
    """One token of an answer, with the log-probabilities of the likeliest tokens at its position, in nats."""

    token_id: int
    top: Mapping[int, float]


GoldenAnswer: TypeAlias = tuple[GoldenToken, ...]


@dataclass(frozen=True, slots=True)
class AnswerComparison:
    """How far an answer is from the reference, over the positions up to the first token that differs.

    After that token the two go on from different texts, so that nothing can be compared.
    """

    kl_nats: float
    """Largest divergence of the distributions at one position; see `divergence`. 0..MOST_NATS."""
    agreement: float
    """Share of the reference's tokens before the first that differs. 0..1."""
    swapped: float = 0.0
    """By how much the reference's token is more probable there than the answer's. 0 without one that differs. 0..1."""

    def exceeds(self, tolerance_nats: float) -> bool:
        """Whether the answer is wrong by this tolerance.

        A token may differ by rounding where two are nearly equally probable. By Pinsker's inequality distributions
        within the tolerance differ by sqrt(tolerance / 2) at most in the probability of any token, so two tokens
        further apart than twice that have not changed places by it.
        """
        return self.kl_nats > tolerance_nats or self.swapped > math.sqrt(2 * tolerance_nats)


BROKEN = AnswerComparison(MOST_NATS, 0.0, 1.0)
"""Of an answer that ended because its logits were not finite."""


def compare(reference: GoldenAnswer, answer: GoldenAnswer) -> AnswerComparison:
    """The comparison of an answer with the reference. What is missing of a shorter answer counts as not agreeing."""
    worst, agreed = 0.0, 0
    for expected, given in zip(reference, answer, strict=False):
        worst = max(worst, divergence(expected.top, given.top))
        if expected.token_id != given.token_id:
            swapped = _probability(expected.top, expected.token_id, 1.0)
            swapped -= _probability(expected.top, given.token_id, 0.0)
            return AnswerComparison(worst, agreed / len(reference), max(0.0, swapped))
        agreed += 1
    missing = agreed < len(reference)
    return AnswerComparison(worst, agreed / len(reference) if reference else 1.0, 1.0 if missing else 0.0)


def divergence(reference: Mapping[int, float], answer: Mapping[int, float]) -> float:
    """A lower bound, in nats, of the Kullback-Leibler divergence of the answer's distribution from the reference's.

    Both are known for their likeliest tokens only. Tokens that both list stand for themselves, those that only the
    reference lists are one event, all others another: merging events never raises the divergence (data processing
    inequality). The probability of the former event under the answer is unknown: at most that of its last listed token
    for each, and what its list leaves. It is taken where the divergence is least. 0 where either has none.
    """
    if not reference or not answer:
        return 0.0
    if not all(math.isfinite(value) for value in (*reference.values(), *answer.values())):
        return MOST_NATS
    both = reference.keys() & answer.keys()
    total = sum(_term(math.exp(reference[token]), math.exp(answer[token])) for token in both)
    missing = sum(math.exp(value) for token, value in reference.items() if token not in both)
    rest = max(0.0, 1.0 - sum(map(math.exp, reference.values())))
    answer_rest = max(0.0, 1.0 - sum(math.exp(answer[token]) for token in both))
    bound = (len(reference) - len(both)) * math.exp(min(answer.values()))
    share = missing / (missing + rest) if missing + rest else 0.0
    unlisted = max(0.0, 1.0 - sum(map(math.exp, answer.values())))
    answer_missing = min(bound, unlisted, answer_rest * share)
    total += _term(missing, answer_missing) + _term(rest, answer_rest - answer_missing)
    return min(max(0.0, total), MOST_NATS)


def _term(p: float, q: float) -> float:
    return p * math.log(max(p, LEAST_PROBABILITY) / max(q, LEAST_PROBABILITY))


def _probability(top: Mapping[int, float], token_id: int, default: float) -> float:
    return math.exp(top[token_id]) if token_id in top else default
