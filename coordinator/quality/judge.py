"""Judges the answers of a round: against a reference that the first round elected, by a measured tolerance. Pure.

The tolerance is NOISE_FACTOR times the median divergence of clean answers, but at least a floor and at most a ceiling,
separately for pairs and for decode workers alone: narrow KV makes all pairs differ from the latter a little. The noise
of a logit is a sum of many rounding errors, so a divergence, which is quadratic in it, is distributed about as
chi-square; ten times the median of one with k degrees of freedom is exceeded with a probability of 1e-3 for k = 2 and
1e-12 for k = 8.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median_low

from coordinator.quality.golden_answer import BROKEN, AnswerComparison, GoldenAnswer, compare
from coordinator.quality.target import Target
from coordinator.workers.snapshot import WorkerKey
from splitserve.config.coordinator import QualityConfig

NOISE_FACTOR = 10.0
REMEMBERED_ANSWERS = 256
"""Clean divergences that the tolerance is measured from, of pairs and of decode workers alone."""
MIN_ELECTORS = 2
"""Answers, at least, that elect a reference: one has nothing to be compared with."""

Answers = Mapping[Target, GoldenAnswer | None]
"""Of one round, by target. None: the worker ended the answer because its logits were not finite."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one answer was found to be."""

    comparison: AnswerComparison
    tolerance_nats: float
    failed: bool


@dataclass(frozen=True, slots=True)
class Reference:
    """The elected answer to one prompt, and the boots that agreed on it."""

    answer: GoldenAnswer
    electors: frozenset[WorkerKey]


class Judge:
    """Judges the answers of one model's workers. Depends on what it was given alone."""

    def __init__(self, config: QualityConfig) -> None:
        self._floor, self._ceiling = config.min_tolerance_nats, config.max_tolerance_nats
        self._references: dict[int, Reference] = {}
        self._clean: dict[bool, deque[float]] = {
            is_pair: deque(maxlen=REMEMBERED_ANSWERS) for is_pair in (False, True)
        }

    def tolerance_nats(self, is_pair: bool) -> float:
        """The tolerance in force for pairs, or for decode workers alone."""
        clean = self._clean[is_pair]
        measured = NOISE_FACTOR * median_low(clean) if clean else self._ceiling
        return min(max(measured, self._floor), self._ceiling)

    def judge(self, prompt: int, answers: Answers, registered: frozenset[WorkerKey]) -> dict[Target, Verdict]:
        """The verdicts on the answers to the prompt of this number; none before a reference could be elected.

        A reference is elected anew when none of the boots that agreed on it is registered any more.
        """
        known = self._references.get(prompt)
        if known is None or not known.electors & registered:
            known = elect(answers, self._ceiling)
            if known is None:
                return {}
            self._references[prompt] = known
        compared = {
            target: BROKEN if answer is None else compare(known.answer, answer)
            for target, answer in answers.items()
        }
        for is_pair in (False, True):
            self._measure([c for t, c in compared.items() if (t.prefill is not None) is is_pair], is_pair)
        verdicts: dict[Target, Verdict] = {}
        for target, comparison in compared.items():
            tolerance = self.tolerance_nats(target.prefill is not None)
            verdicts[target] = Verdict(comparison, tolerance, comparison.exceeds(tolerance))
        return verdicts

    def _measure(self, compared: list[AnswerComparison], is_pair: bool) -> None:
        """Takes up the divergences within the tolerance in force; before there is one, those within the ceiling."""
        tolerance = self.tolerance_nats(is_pair)
        self._clean[is_pair].extend(c.kl_nats for c in compared if not c.exceeds(tolerance))


def elect(answers: Answers, ceiling_nats: float) -> Reference | None:
    """The reference for a prompt; None if too few have answered.

    It is the answer that most others are near, within the ceiling: of decode workers alone if any have answered, since
    nothing travelled for these; between equals, the one with the least divergence from all.
    """
    given = {target: answer for target, answer in answers.items() if answer}
    if len(given) < MIN_ELECTORS:
        return None
    alone = [target for target in given if target.prefill is None]
    best: tuple[int, int, float] | None = None
    found: Reference | None = None
    for target in alone or given:
        compared = {other: compare(given[target], answer) for other, answer in given.items()}
        near = [other for other, comparison in compared.items() if not comparison.exceeds(ceiling_nats)]
        rank = (
            len(near),
            sum(other.prefill is None for other in near),
            -sum(comparison.kl_nats + comparison.swapped for comparison in compared.values()),
        )
        if best is None or rank > best:
            best = rank
            found = Reference(given[target], frozenset(key for other in near for key in other.workers))
    return found
