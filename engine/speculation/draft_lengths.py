"""How many drafted tokens a step checks: a pure policy over measured acceptance and measured times of steps.

A step over n rows takes t(n). Checking m drafted tokens beside one row for each of B sequences takes t(B + m) and is
expected to give B + E tokens, where a draft's j-th token is accepted with probability p^j. Drafts are worth
t(B + m) / t(B) of a step, or they are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_DRAFT = 7
"""Most tokens of one draft: with the row before them they fill the eight rows up to which reading weights dominates."""
MAX_SEQUENCES = 8
"""In larger batches nothing is drafted: arithmetic bounds their steps already."""
MAX_ROWS = 16
"""Most rows of a step with drafts."""
LEAST_GAIN = 1.05
"""Tokens a second, over those without drafts, that a step with drafts must be expected to give."""
LEAST_SHARE = 0.97
"""No stream of the batch may be expected to get less than this share of the tokens a second that it had without."""
PROBE_EVERY = 48
"""After so many steps whose drafts were left out, one token of a draft is checked all the same, to measure anew."""
MAX_PROBE_COST = 1.2
"""Unless it makes the step longer than this multiple."""
FORGET_AFTER = 1024
"""Steps after which a time that was not measured again is forgotten: it may have been of other contexts."""
_PRIOR_ACCEPTANCE = (0.15, 0.35, 0.6, 0.8)
"""By support, before anything was measured."""
_PRIOR_TRIALS = 3.0
_DECAY_SEQUENCE, _DECAY_ALL = 0.85, 0.98
_PRIOR_ROW_COST = 0.08
"""A further row, as a share of a step of one row, before it was measured."""
_LEAST_ROW_COST = 0.02
"""A further row costs at least this share: where steps seem to cost the same, the measurement is noisy."""
_SMOOTHING = 0.15
_OUTLIER = 1.5


@dataclass(slots=True)
class AcceptanceRate:
    """How often a drafted token is accepted whose predecessors were. Decays with each draft."""

    decay: float
    accepted: float = 0.0
    trials: float = 0.0

    def record(self, drafted: int, accepted: int) -> None:
        """A draft of `drafted` tokens of which the first `accepted` were right."""
        self.accepted = self.accepted * self.decay + accepted
        self.trials = self.trials * self.decay + min(accepted + 1, drafted)

    def rate(self, prior: float) -> float:
        """The rate, with a `prior` that weighs as much as a few drafted tokens."""
        return (self.accepted + _PRIOR_TRIALS * prior) / (self.trials + _PRIOR_TRIALS)


class Acceptance:
    """Rates of all sequences by support, each the prior of a sequence's own."""

    def __init__(self) -> None:
        self._rates = [AcceptanceRate(_DECAY_ALL) for _ in _PRIOR_ACCEPTANCE]

    def rate(self, support: int) -> float:
        """The rate over all sequences."""
        return self._rates[support].rate(_PRIOR_ACCEPTANCE[support])

    def record(self, support: int, drafted: int, accepted: int) -> None:
        """See `AcceptanceRate.record`."""
        self._rates[support].record(drafted, accepted)


@dataclass(slots=True)
class SequenceAcceptance:
    """One sequence's rates by support, and how many of its drafts were left out since the last that was checked."""

    everywhere: Acceptance
    left_out: int = 0
    _rates: list[AcceptanceRate] = field(
        default_factory=lambda: [AcceptanceRate(_DECAY_SEQUENCE) for _ in _PRIOR_ACCEPTANCE]
    )

    def rate(self, support: int) -> float:
        """The expected rate of a draft."""
        return self._rates[support].rate(self.everywhere.rate(support))

    def record(self, support: int, drafted: int, accepted: int) -> None:
        """See `AcceptanceRate.record`."""
        self._rates[support].record(drafted, accepted)
        self.everywhere.record(support, drafted, accepted)


class RowCosts:
    """Times of steps that only decode, in seconds, by their number of rows, drafted tokens included."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._measured_at: dict[int, int] = {}
        self._steps = 0

    def record(self, rows: int, seconds: float) -> None:
        """A step over `rows` rows took so long. One that took much longer than expected counts as a bit longer."""
        expected = self._estimate(rows)
        if expected:
            seconds = min(seconds, _OUTLIER * expected)
        known = self._seconds.get(rows, seconds)
        self._seconds[rows] = known + (seconds - known) * _SMOOTHING
        self._steps += 1
        self._measured_at[rows] = self._steps
        if self._steps % (FORGET_AFTER // 8) == 0:
            for old in [each for each, at in self._measured_at.items() if at < self._steps - FORGET_AFTER]:
                del self._seconds[old], self._measured_at[old]

    def ratio(self, rows: int, more: int) -> float:
        """t(rows + more) / t(rows), above 1; what was not measured lies on the line between its neighbours."""
        plain, least = self._estimate(rows), 1.0 + _LEAST_ROW_COST * more
        return max(least, self._estimate(rows + more) / plain) if plain else 1.0 + _PRIOR_ROW_COST * more

    def _estimate(self, rows: int) -> float:
        measured = self._seconds
        if (exact := measured.get(rows)) is not None:
            return exact
        below = max((known for known in measured if known < rows), default=None)
        above = min((known for known in measured if known > rows), default=None)
        if below is not None and above is not None:
            low, high = measured[below], measured[above]
            return low + (high - low) * (rows - below) / (above - below)
        if below is not None:
            return measured[below] * (1 + _PRIOR_ROW_COST * (rows - below))
        return measured[above] / (1 + _PRIOR_ROW_COST * (above - rows)) if above is not None else 0.0


def choose_lengths(most: Sequence[int], rates: Sequence[float], costs: RowCosts, max_rows: int) -> list[int]:
    """How many tokens of each sequence's draft to check in a step over all of them.

    `most`: tokens that each has a guess for, `rates`: the expected acceptance of its next one. The tokens that are
    likeliest to be accepted come first, up to the number that gives the most tokens a second.
    """
    batch = len(most)
    ranked = sorted(
        (
            (rates[index] ** place, -place, index)
            for index in range(batch)
            for place in range(1, most[index] + 1)
        ),
        reverse=True,
    )[: max(0, max_rows - batch)]
    best, chosen = LEAST_GAIN, [0] * batch
    lengths, gains, expected = [0] * batch, [1.0] * batch, float(batch)
    for count, (chance, _, index) in enumerate(ranked, start=1):
        lengths[index] += 1
        gains[index] += chance
        expected += chance
        ratio = costs.ratio(batch, count)
        gain = expected / batch / ratio
        if gain > best and min(gains) >= LEAST_SHARE * ratio:
            best, chosen = gain, lengths.copy()
    return chosen
