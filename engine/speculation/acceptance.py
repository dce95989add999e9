"""How often drafts are right, by class of guesses: measured for each sequence, and over all of them as its prior."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.speculation.drafter import SUPPORTS

_PRIOR_FIRST = (0.35, 0.6, 0.8, 0.95, 0.4, 0.7)
_PRIOR_FURTHER = (0.55, 0.7, 0.8, 0.95, 0.8, 0.7)
"""Chances of a draft's first token and of each further one, by support, before anything was measured: about those of
the texts in `bench.engine.speculation`; of a draft model, those of pairs in the literature."""
_PRIOR_TRIALS = 6.0
_DECAY_SEQUENCE, _DECAY_ALL = 0.85, 0.98


@dataclass(slots=True)
class AcceptanceRate:
    """How often a drafted token is accepted whose predecessors were. Decays with each draft."""

    decay: float
    accepted: float = 0.0
    trials: float = 0.0

    def record(self, trials: int, accepted: int) -> None:
        """So many tokens were tried, and so many of them accepted."""
        self.accepted = self.accepted * self.decay + accepted
        self.trials = self.trials * self.decay + trials

    def rate(self, prior: float) -> float:
        """The rate, with a `prior` that weighs as much as a few drafted tokens."""
        return (self.accepted + _PRIOR_TRIALS * prior) / (self.trials + _PRIOR_TRIALS)


class _Rates:
    """Of a draft's first token and of its further ones, by support. Whether a guess is at the right place shows at its
    first token; how far it goes, at the others."""

    def __init__(self, decay: float) -> None:
        self.first = [AcceptanceRate(decay) for _ in range(SUPPORTS)]
        self.further = [AcceptanceRate(decay) for _ in range(SUPPORTS)]

    def record(self, support: int, drafted: int, accepted: int) -> None:
        self.first[support].record(1, min(accepted, 1))
        if accepted and drafted > 1:
            self.further[support].record(min(accepted + 1, drafted) - 1, accepted - 1)


class Acceptance:
    """Rates over all sequences, each the prior of a sequence's own."""

    def __init__(self) -> None:
        self._rates = _Rates(_DECAY_ALL)

    def rates(self, support: int) -> tuple[float, float]:
        """The chance of a draft's first token, and that of each further one whose predecessors are right."""
        first = self._rates.first[support].rate(_PRIOR_FIRST[support])
        return first, self._rates.further[support].rate(_PRIOR_FURTHER[support])

    def record(self, support: int, drafted: int, accepted: int) -> None:
        """A draft of `drafted` tokens of which the first `accepted` were right."""
        self._rates.record(support, drafted, accepted)


@dataclass(slots=True)
class SequenceAcceptance:
    """One sequence's rates."""

    everywhere: Acceptance
    _rates: _Rates = field(default_factory=lambda: _Rates(_DECAY_SEQUENCE))

    def chances(self, support: int, length: int) -> Sequence[float]:
        """Of each token of a draft of this length, the chance that it and all before it are right."""
        prior_first, prior_further = self.everywhere.rates(support)
        chance = self._rates.first[support].rate(prior_first)
        further = self._rates.further[support].rate(prior_further)
        found = []
        for _ in range(length):
            found.append(chance)
            chance *= further
        return found

    def record(self, support: int, drafted: int, accepted: int) -> None:
        """See `Acceptance.record`."""
        self._rates.record(support, drafted, accepted)
        self.everywhere.record(support, drafted, accepted)
