"""What lent cores bring: a step on twice the cores does not take half as long, since memory is shared."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

PRIOR = 0.5
"""Share of lent compute that shortens a step, before steps with and without it were measured."""
_LEAST_STEPS = 4
"""Steps of a size, of either kind, before they are compared."""
_MEMORY = 16
"""Time constant of a size's means, in steps."""
_LEARNED = 0.05
"""Weight of a comparison in the share."""
STEADY_S = (2.0, 10.0)
"""Time constants of the means of `SteadySpeed`, in time of steps."""
_COUNTED = 0.6
"""Share of what lent cores bring that admission counts on: they are taken back as soon as prompts come."""


def speedup_of(compute: float, share: float = PRIOR) -> float:
    """How many times as fast a step is that has `compute` times its own compute."""
    return 1.0 + share * (compute - 1.0)


@dataclass(slots=True)
class _Means:
    """Decayed means over steps."""

    steps: int = 0
    unit_s: float = 0.0
    more: float = 0.0

    def add(self, unit_s: float, more: float) -> None:
        self.steps += 1
        weight = max(1 / self.steps, 1 / _MEMORY)
        self.unit_s += (unit_s - self.unit_s) * weight
        self.more += (more - self.more) * weight


class LentEffect:
    """How much longer steps that had lent cores would have taken without, learned from steps of the same size.

    See `speedup_of`. A share that was only assumed to be 1 made
    steps of 20 ms count as 40, and a decode worker with one stream as full.
    """

    def __init__(self) -> None:
        self.share = PRIOR
        self._alone: dict[Hashable, _Means] = {}
        self._lent: dict[Hashable, _Means] = {}

    def speedup(self, size: Hashable, unit_s: float, compute: float) -> float:
        """How many times as fast a step was that had `compute` times its own compute; at least 1.

        `unit_s`: its time, or that of a token of it, comparable with other steps of this `size`.
        """
        more = compute - 1.0
        if more < 0.05:
            self._alone.setdefault(size, _Means()).add(unit_s, 0.0)
            return 1.0
        lent = self._lent.setdefault(size, _Means())
        lent.add(unit_s, more)
        alone = self._alone.get(size)
        if alone is not None and min(alone.steps, lent.steps) >= _LEAST_STEPS and lent.unit_s > 0:
            seen = (alone.unit_s / lent.unit_s - 1.0) / lent.more
            self.share += (min(max(seen, 0.0), 1.0) - self.share) * _LEARNED
        return speedup_of(compute, self.share)


class SteadySpeed:
    """How much faster decode steps can be counted on to be, by cores that neighbours lend between their own steps.

    An answer lasts for many steps, of which some have lent cores: their mean decides. What was lent for a moment says
    little, so the lower one of two means counts, and of what that is above 1 a part.
    """

    def __init__(self) -> None:
        self._took_s = [0.0] * len(STEADY_S)
        self._alone_s = [0.0] * len(STEADY_S)

    def record(self, duration_s: float, speedup: float) -> None:
        """Records a step that only decoded, in `speedup` times less time than alone."""
        for index, memory_s in enumerate(STEADY_S):
            kept = math.exp(-duration_s / memory_s)
            self._took_s[index] = self._took_s[index] * kept + duration_s
            self._alone_s[index] = self._alone_s[index] * kept + duration_s * speedup

    @property
    def lower(self) -> float:
        """The lower mean, at least 1."""
        if self._took_s[0] <= 0:
            return 1.0
        return max(1.0, min(alone / took for alone, took in zip(self._alone_s, self._took_s, strict=True)))

    @property
    def value(self) -> float:
        """What admission counts on, at least 1."""
        return 1.0 + _COUNTED * (self.lower - 1.0)
